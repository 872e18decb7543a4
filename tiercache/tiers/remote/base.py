"""What all remote tiers have in common: verification, what is known of the server, counting. One server, one tier.

A subclass of `RemoteTier` says how values move; see `redis/` for one that moves them in threads, `s3/` for one whose client
is asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import MAGIC, Header, HeaderError, payload_checksum
from tiercache.core.keys import ChunkKey
from tiercache.core.remembered import RememberedKeys
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.workers import wait_shielded
from tiercache.tiers.base import Tier, TierStatistics, Traits
from tiercache.tiers.compression import Compression, Packed, unpacked

logger = logging.getLogger("tiercache.remote")

T = TypeVar("T")

_REMEMBERED_KEYS = 1 << 20
_REMEMBERED_S = 10.0
_REFUSED_KEYS = 1 << 16
_END_S = 0.1
"""How long who waits may take to hear that what was interrupted has ended."""


@dataclass(frozen=True)
class RemoteSettings:
    """What a remote tier is made from. `url` and `options` may hold secrets, so neither is in the `repr`."""

    name: str
    """The instance, as statistics and log lines call it: `redis`, or `redis.primary`."""
    type: str
    """What the registry found it by: the first part of a plug-in's name, or a URL's scheme."""
    fingerprint: bytes
    """The layout's, 16 bytes."""
    chunk_bytes: int
    """The largest payload."""
    url: str = field(default="", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The instance's settings by name, of the types that `tiercache.config.remote_options` declares; plain text for types
    that it does not know. And the configuration's `file_access`, for tiers on files."""
    timeout_s: float = 5.0
    """The longest wait for the answer to one request."""
    concurrency: int = 4
    """Transfers at a time in each direction, at most."""
    item_bytes: int = 1
    """Length of a number in a payload, for compression."""

    url_key: str = ""
    """The configuration's key that `url` came from."""

    def key(self, option: str) -> str:
        """The configuration's key for `option`, for error messages."""
        if option == "url" and self.url_key:
            return self.url_key
        return f"remote_storage_plugin.{self.name}.{option}"

    def make_compression(self) -> Compression:
        """For types that have the option. Raises ConfigError."""
        mode = self.options.get("compression", "none")
        return Compression(mode, self.item_bytes, concurrency=self.concurrency, tier=self.name)

    def error(self, option: str, problem: str) -> ConfigError:
        """A ConfigError about `option`. `problem` must not hold secrets."""
        return ConfigError(f"{self.key(option)}: {problem}")


@dataclass
class _Use:
    """Reads and writes of one key that are under way. What a read finds bad is replaced by a write beside it."""

    reads: int = 0
    writes: int = 0
    stored: bool = False
    """Whether a write has ended well since the first of the reads began."""
    removal: asyncio.Future[None] | None = None
    """Of what a read found bad: a write waits for its end, or what it stores would go, too."""


class RemoteTier(Tier):
    """A tier on a server that is shared, may be slow, and may be gone.

    What subclasses do: `_connect`, `_disconnect`, `_get`, `_put`, `_exist`, `_delete`. They need not care for cancellation:
    each runs to its end once begun, so none may wait for longer than about `settings.timeout_s` without progress. They raise
    TierUnavailable, OSError, or TierFull; any of these is a bad sign for the tier's breaker, which belongs to the scheduler.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.fingerprint = settings.fingerprint
        self.traits = Traits(
            durable=True,
            shared=True,
            read_concurrency=settings.concurrency,
            write_concurrency=settings.concurrency,
        )
        self.compression = Compression()
        """None, but for subclasses that store what `pack` gives them. All of them read what is compressed."""
        self.known = RememberedKeys(_REMEMBERED_KEYS, _REMEMBERED_S)
        self._refused = RememberedKeys(_REFUSED_KEYS, _REMEMBERED_S)
        """What lies there is bad: it is no hit until somebody may have stored it anew."""
        self._uses: dict[ChunkKey, _Use] = {}
        self._removed: list[set[ChunkKey]] = []
        """For each look-up and read in flight, the keys that were removed since it began."""
        self.counters = TierStatistics()
        self._open = False
        self._busy = 0
        """Operations that somebody waits for."""
        self._idle = asyncio.Event()
        self._idle.set()

    # For subclasses

    @abstractmethod
    async def _connect(self) -> None:
        """Make the tier usable. Raises ConfigError for what the operator must mend, TierUnavailable for what may pass."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Give everything back. Called once, also after a `_connect` that failed; does not wait for hung operations.

        What can make them end does: memory that they use cannot be given back before.
        """

    @abstractmethod
    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Move the value into `into` and let `self.verified` check it, in a thread. None: the server has none."""

    @abstractmethod
    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Store `payload` (without padding) after `self.packed_header(key, payload)`, or what `self.pack` makes of it, so
        that no reader ever sees a part.

        False: the tier declines, or somebody else's value is in the way.
        """

    @abstractmethod
    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Which of `keys` the server has: one round trip for all of them, not one each."""

    @abstractmethod
    async def _delete(self, key: ChunkKey) -> bool:
        """Whether it was there."""

    def packed_header(self, key: ChunkKey, payload: np.ndarray) -> bytes:
        """The 88 bytes that say what `payload` is, plain. Hashes it: in a thread."""
        return Header(key, self.fingerprint, payload.nbytes, payload_checksum(payload)).pack()

    def pack(self, key: ChunkKey, payload: np.ndarray) -> Packed:
        """The chunk with its header, compressed if that is worth it. In a thread."""
        return self.compression.pack(key, self.fingerprint, payload, payload.nbytes)

    def verified(self, key: ChunkKey, raw_header: Any, into: np.ndarray, got_bytes: int) -> int:
        """Check `into[:got_bytes]` against its header, make it plain, and return the payload's length. In a thread.

        Raises CorruptChunk; `NotOurs` where the value is nothing that tiercache wrote. An empty value, or the beginning of
        one, is what is left of ours.
        """
        header = self.verified_header(key, raw_header)
        if header.payload_bytes != got_bytes:
            raise CorruptChunk(f"{self.name}: length: expected {header.payload_bytes} bytes, found {got_bytes}")
        try:
            header.check_payload(payload_checksum(into[:got_bytes]))
        except HeaderError as error:
            raise CorruptChunk(f"{self.name}: {error}") from error
        return unpacked(header, into)

    def verified_header(self, key: ChunkKey, raw_header: Any) -> Header:
        """What `verified` does first: before its end nothing that a header says may be relied upon, lengths least of all."""
        if not MAGIC.startswith(bytes(raw_header[: len(MAGIC)])):
            raise NotOurs(f"{self.name}: the value of {key.hex()} was not written by tiercache")
        try:
            return Header.check(raw_header, key, self.fingerprint)
        except HeaderError as error:
            raise CorruptChunk(f"{self.name}: {error}") from error

    # The contract

    async def open(self) -> None:
        self._open = True
        try:
            await self._connect()
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: nobody would run what waits
            await self.close()
            raise

    async def close(self) -> None:
        if self._open:
            self._open = False
            self.known.clear()
            await self._disconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._idle.wait()
            await asyncio.sleep(0)  # who waited for them hears of it before anybody asks whether their memory is free

    def contains(self, key: ChunkKey) -> bool:
        return self.known.has(key, time.monotonic())

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """Asks the server about every key that is not known, in one go, so that chunks behind a gap are known as well."""
        self._check_open()
        now_s = time.monotonic()
        unknown = [key for key in keys if not self.known.has(key, now_s) and not self._refused.has(key, now_s)]
        if unknown:
            with self._removals() as removed:
                found = await self._exist(unknown)
            for key, there in zip(unknown, found, strict=True):
                if there and key not in removed and not self._refused.has(key, now_s):  # since this was asked, too
                    self.known.add(key, now_s)
                else:
                    self.known.discard(key)
        return self.prefix(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self.probe(keys)
        return [self.contains(key) for key in keys]

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        self._check_open()
        use = self._uses.setdefault(key, _Use())
        use.reads += 1
        try:
            with self._removals() as removed:
                length = await self._get_believed(key, into)
        except CorruptChunk as error:
            self.counters.corrupt += 1
            if not use.stored:
                self.known.discard(key)
                self._refused.add(key, time.monotonic())
                if self.writes and not (isinstance(error, NotOurs) or use.writes):
                    await self._remove_bad(key, use)
            raise
        finally:
            stored = use.stored
            use.reads -= 1
            self._used(key, use)
        if length is None:
            self.counters.read_misses += 1
            if not stored:
                self.known.discard(key)
            return None
        self.counters.reads += 1
        self.counters.read_bytes += length
        if key not in removed:
            self.known.add(key, time.monotonic(), length)
        return length

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        self._check_open()
        if self.contains(key):
            return True
        use = self._uses.setdefault(key, _Use())
        use.writes += 1
        try:
            if use.removal is not None:
                await asyncio.wait([use.removal])
                self._check_open()
            stored = await self._finish(self._put(key, payload[:payload_bytes]))
            use.stored |= stored and use.reads > 0
        except BaseException:
            self.counters.write_failures += 1
            raise
        finally:
            use.writes -= 1
            self._used(key, use)
        if stored:
            self._refused.discard(key)
            self.counters.writes += 1
            self.counters.written_bytes += payload_bytes
            self.known.add(key, time.monotonic(), payload_bytes)
        return stored

    async def remove(self, key: ChunkKey) -> bool:
        self._check_open()
        self.known.discard(key)
        try:
            return await self._finish(self._delete(key))
        finally:  # a look-up or a read beside it may have found the value, or may find it yet
            self.known.discard(key)
            for removed in self._removed:
                removed.add(key)

    def statistics(self) -> TierStatistics:
        """`resident` and `occupied_bytes` are what this process knows of, not what the server holds."""
        counters = TierStatistics(**vars(self.counters))
        counters.stored_bytes = self.compression.stored_bytes or counters.written_bytes
        counters.resident = len(self.known)
        counters.occupied_bytes = self.known.bytes_known
        return counters

    async def _get_believed(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """As `_get`; what is bad is read once more, for it belongs to everybody, and a bit may have flipped on its way."""
        try:
            return await self._finish(self._get(key, into))
        except CorruptChunk as error:
            self.counters.read_again += 1
            logger.info("%s; reading it again", error)
        return await self._finish(self._get(key, into))

    async def _remove_bad(self, key: ChunkKey, use: _Use) -> None:
        """That it cannot be removed says nothing about whether the tier can be read: the next one to store it will see."""
        if use.removal is not None:
            return
        use.removal = asyncio.get_running_loop().create_future()
        try:
            await self._finish(self._delete(key))
        except (TierUnavailable, TierFull, OSError) as error:
            logger.info("%s: a bad value stays for now: %s", self.name, error)
        finally:
            use.removal.set_result(None)
            use.removal = None
        self.known.discard(key)

    @contextlib.contextmanager
    def _removals(self) -> Iterator[set[ChunkKey]]:
        """Collect the keys that are removed meanwhile."""
        removed: set[ChunkKey] = set()
        self._removed.append(removed)
        try:
            yield removed
        finally:
            self._removed = [each for each in self._removed if each is not removed]

    def _used(self, key: ChunkKey, use: _Use) -> None:
        if not use.reads:
            use.stored = False
            if not use.writes:
                del self._uses[key]

    def _check_open(self) -> None:
        if not self._open:
            raise TierUnavailable(f"{self.name} is closed")

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Memory is in use until `work` has ended, whatever happens to whoever waits for it."""
        self._busy += 1
        self._idle.clear()
        try:
            return await wait_shielded(asyncio.ensure_future(work))
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()


class NotOurs(CorruptChunk):
    """A value under our key that tiercache did not write: it is left alone."""
