"""The fs tier: directories on any mount that several hosts share, such as NFS, Lustre or CephFS.

It is composed as the Weka tier is, without a device: for mounts where a round trip is dear and many instances come and go.
Compared with the disk tier, that matters on NFS in three places:

- look-ups are answered from memory, kept fresh by listing the directories that changed; the disk tier asks the server once a
  key. (What another host stored is seen once this one's attribute cache lets it: mount with `actimeo=1` to see it soon.)
- the count of bytes is charged in steps; one lock on the server for each chunk would be what all instances wait for.
- a chunk is written under a name of its own, closed, and only then given its name, by `link` where the server has no rename
  that spares what is there: with close-to-open consistency whoever opens that name sees all of it.

The mount may be away: at the start (the cache starts without it, and it comes in when it answers) and later. One that is so
full that our bookkeeping finds no room on it counts as away.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.tiers.files.access import ACCESS, Access, Mount, local_locks, mount_of, warn_of_missing_mount
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.index import FollowedIndex
from tiercache.tiers.files.io_posix import ThreadMover
from tiercache.tiers.files.tier import BeginRead, BeginWrite, FileTier
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.weka import METADATA_THREADS, WekaSettings

logger = logging.getLogger("tiercache.fs")

_THREADS = 8
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_MAY_PASS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.EREMOTEIO}
    | {
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ESHUTDOWN,
        errno.ENODEV,
        errno.ENXIO,
    }
)
"""What file systems say whose server is away."""


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
    """A file tier whose directories are opened when their mount answers: until then operations raise TierUnavailable.

    Reads and writes on a mount that hangs stay in their threads, as many as the tier has; the scheduler stops waiting, and
    its breaker opens.
    """

    def __init__(self, remote: RemoteSettings, settings: WekaSettings) -> None:
        super().__init__(
            remote.name,
            remote.key("base_path"),
            settings,
            remote.fingerprint,
            ThreadMover,
            lambda shelves: FollowedIndex(shelves, settings.refresh_s),
            metadata_threads=METADATA_THREADS,
        )
        self._timeout_s = remote.timeout_s
        self._coming: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Waits `timeout_s` at most. Raises ConfigError for what does not pass by waiting. Cancelled, it closes again."""
        self._coming = asyncio.create_task(self._come_up(), name=f"tiercache-open-{self.name}")
        try:
            await asyncio.wait([self._coming], timeout=self._timeout_s)
            if self._coming.done():
                self._coming.result()
                return
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: nothing would run what waits
            await self.close()
            raise
        logger.warning("%s: %s; the tier is used as soon as it answers", self.name, self._silence())
        self._coming.add_done_callback(self._say)

    async def close(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming], timeout=self._timeout_s)
        await super().close()

    def describe(self) -> str:
        if self.shelves.is_open:
            return super().describe()
        return f"{self.name} ({', '.join(map(str, self.settings.directories))})"

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        with self._mount():
            return await super().probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._mount():
            return await super().probe_each(keys)

    async def remove(self, key: ChunkKey) -> bool:
        with self._mount():
            return await super().remove(key)

    async def _read(self, key: ChunkKey, read: BeginRead) -> int | None:
        with self._mount():
            return await super()._read(key, read)

    async def _write(self, key: ChunkKey, payload_bytes: int, write: BeginWrite) -> bool:
        with self._mount():
            return await super()._write(key, payload_bytes, write)

    @contextmanager
    def _mount(self) -> Iterator[None]:
        """Bracket an operation on the mount. Raises TierUnavailable, with the tier's name, where the mount is away."""
        if self._coming is None or not self.shelves.is_open:
            raise TierUnavailable(f"{self.name}: {self._silence() if self._coming is not None else 'closed'}")
        try:
            yield
        except OSError as error:
            if error.errno in _MAY_PASS or isinstance(error, FileNotFoundError):
                raise TierUnavailable(f"{self.name}: {error}") from error
            raise

    async def _come_up(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._open()
                return
            except TierUnavailable as error:
                logger.warning("%s; trying again", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self) -> None:
        """Raises TierUnavailable for what may pass by waiting, ConfigError for what does not."""
        try:
            # First, and by itself: a mount that hangs does it here, where nothing has to be undone.
            access = ACCESS[self.settings.file_access] if self.writes else None
            mounts = await self.shelves.metadata.submit(_mounts_of, self.settings.directories, access)
            for mount in mounts:
                option, _ = local_locks(mount)
                if option:
                    logger.warning(
                        "%s: %s is mounted with %s: the cap holds among the instances of one host, not of all",
                        self.name, mount.point, option,
                    )  # fmt: skip
            await self.shelves.open(only_reads=not self.writes)
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            # Full: others put files on the mount as well, and may take them away.
            may_pass = cause.errno in _MAY_PASS or cause.errno in NO_ROOM or _was_wiped(cause)
            # Who only reads waits for the one who writes.
            if may_pass or (not self.writes and isinstance(cause, FileNotFoundError)):
                raise TierUnavailable(f"{self.name}: {cause}") from error
            raise ConfigError(f"{self.option}: {cause}") from error

    def _say(self, coming: asyncio.Task[None]) -> None:
        if not coming.cancelled() and (error := coming.exception()) is not None:
            logger.error("%s stays out of use: %s", self.name, error)

    def _silence(self) -> str:
        return f"{', '.join(map(str, self.settings.directories))} cannot be reached"


def _was_wiped(error: OSError) -> bool:
    """Whether somebody deleted our bookkeeping while we began."""
    return isinstance(error, FileNotFoundError) and "/.tiercache" in str(error.filename)


def _mounts_of(directories: Sequence[Path], access: Access | None) -> list[Mount]:
    """With `access`, makes the directories that are not there. In a thread; asks the mounts, and raises what they say."""
    for directory in directories:
        if access is not None and not directory.is_dir():
            warn_of_missing_mount(directory)
            access.make_root(directory)
        with os.scandir(directory) as entries:
            next(entries, None)
    return list(dict.fromkeys(mount_of(directory) for directory in directories))
