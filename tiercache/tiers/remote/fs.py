"""The fs tier: directories on any mount that several hosts share, such as NFS, Lustre or CephFS.

It is composed as the Weka tier is, without a device: for mounts where a round trip is dear and many instances come and go.
Compared with the disk tier, that matters on NFS in three places:

- look-ups are answered from memory, kept fresh by listing the directories that changed; the disk tier asks the server once a
  key. (What another host stored is seen once this one's attribute cache lets it: mount with `actimeo=1` to see it soon.)
- the count of bytes is charged in steps; one lock on the server for each chunk would be what all instances wait for.
- a chunk is written under a name of its own, closed, and only then given its name, by `link` where the server has no rename
  that spares what is there: with close-to-open consistency whoever opens that name sees all of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from tiercache.tiers.files.index import RelistingLookup
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.weka import METADATA_THREADS, WekaSettings

_THREADS = 8


def make_fs_tier(settings: RemoteSettings) -> FsTier:
    """The tier, not open yet. Raises ConfigError when the settings name no directory."""
    options = settings.options
    engine = WekaSettings(
        directories=_directories(settings),
        cap_bytes=int(options.get("max_size", 0.0) * 2**30),
        tenant_bytes=int(options.get("tenant_max_size", 0.0) * 2**30),
        threads=options.get("threads", _THREADS),
        direct=options.get("use_odirect"),
        durable=options.get("durability", "fdatasync") == "fdatasync",
        chunk_bytes=settings.chunk_bytes,
        file_access=options.get("file_access", "owner"),
        compression=options.get("compression", "none"),
        item_bytes=settings.item_bytes,
    )
    return FsTier(settings, engine)


def _directories(settings: RemoteSettings) -> tuple[Path, ...]:
    """From base_path, or from LMCache's `fs://host:port/path,/path`, of which only the paths count."""
    paths = list(settings.options.get("base_path") or ())
    url = settings.url or settings.options.get("url") or ""
    if not paths and url:
        paths = [part.strip() for part in _path_of(settings, url).split(",")]
    found = tuple(Path(path) for path in paths if path)
    if not found:
        raise settings.error("base_path", "this tier needs a directory, or several with commas between")
    for path in found:
        if not path.is_absolute():
            raise settings.error("base_path", f"expected a path that begins with /, found {str(path)!r}")
    if len({os.path.normpath(path) for path in found}) < len(found):
        raise settings.error("base_path", "a directory stands there twice, which would fill it twice")
    return found


def _path_of(settings: RemoteSettings, url: str) -> str:
    """Raises ConfigError that does not repeat the URL."""
    parts = urlsplit(url) if "://" in url else None
    if "@" in url and (parts is not None or not url.startswith("/")):
        raise settings.error("url", "a mount takes no user and no password; say a path with @ in base_path")
    return url if parts is None else parts.path


class FsTier(FileTier):
    """The preset for other mounts. It opens late where its mount is away at the start.

    Reads and writes on a mount that hangs stay in their threads, as many as the tier has; the scheduler stops waiting, and
    its breaker opens.
    """

    def __init__(self, remote: RemoteSettings, settings: WekaSettings) -> None:
        super().__init__(
            remote.name,
            remote.key("base_path"),
            settings,
            remote.fingerprint,
            PosixIO,
            lambda directories: RelistingLookup(directories, settings.refresh_s),
            metadata_threads=METADATA_THREADS,
            late_s=remote.timeout_s,
        )
