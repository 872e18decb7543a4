"""The fs tier: directories on any mount that several hosts share, such as NFS, Lustre or CephFS.

It is built like the Weka tier, but without a device, for mounts where a round trip is expensive and many instances
start and stop. On NFS it works as follows:

- Lookups are answered from memory, kept fresh by listing the directories that changed; the disk tier asks the server
  once per key. Chunks of another host are seen after this host's attribute cache expires: `actimeo=1` shortens this.
- Bytes are counted in steps, since all instances would wait for a lock on the server for each chunk.
- A chunk is written under a temporary name, closed, and then renamed, by `link` if the server has no rename that keeps
  an existing file: with close-to-open consistency, a process that opens the final name sees all of it.
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


def _directories(settings: RemoteSettings) -> tuple[Path, ...]:
    """Return the directories of base_path, or the paths of LMCache's `fs://host:port/path,/path`."""
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
    """Return the path of the URL. Raises ConfigError that does not repeat the URL."""
    parts = urlsplit(url) if "://" in url else None
    if "@" in url and (parts is not None or not url.startswith("/")):
        raise settings.error("url", "a mount takes no user and no password; say a path with @ in base_path")
    return url if parts is None else parts.path


class FsTier(FileTier):
    """The preset for other mounts. It opens later if its mount is missing at the start.

    Reads and writes on a mount that hangs keep their threads, whose number is bounded; the scheduler stops waiting, and
    its circuit breaker opens. Raises ConfigError if the settings name no directory.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        options = settings.options
        files = WekaSettings(
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
        super().__init__(
            settings.name,
            settings.key("base_path"),
            files,
            settings.fingerprint,
            PosixIO,
            lambda directories: RelistingLookup(directories, files.refresh_s),
            metadata_threads=METADATA_THREADS,
            late_s=settings.timeout_s,
        )
