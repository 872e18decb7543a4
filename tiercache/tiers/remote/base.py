"""The base class of all remote tiers: verification, the known keys of the server, counters. A tier is one server.

A subclass of `RemoteTier` moves the values; see `redis/` for a tier that works in threads, `s3.py` for a tier with an
asynchronous client, and `examples/sqlite_tier.py` for a small example.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import MAGIC, Header, HeaderError, payload_checksum
from tiercache.core.index import RememberedKeys
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Tombstones
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.workers import wait_shielded
from tiercache.tiers.base import Tier, TierStatistics, Traits
from tiercache.tiers.compression import Compression, Packed, unpacked

logger = logging.getLogger("tiercache.remote")

T = TypeVar("T")

_KNOWN_KEYS = 1 << 20
_BAD_KEYS = 1 << 16
_REMEMBERED_S = 10.0
_CLOSE_S = 1.0
"""Seconds that `close` waits for operations that `_disconnect` has interrupted."""


@dataclass(frozen=True)
class RemoteSettings:
    """The settings of a remote tier. `url` and `options` may hold secrets, so neither is in the `repr`."""

    name: str
    """Name of the instance in statistics and log lines: `redis`, or `redis.primary`."""
    type: str
    """Name in the registry: the first part of a plug-in's name, or a URL's scheme."""
    fingerprint: bytes
    """The layout's fingerprint, 16 bytes."""
    chunk_bytes: int
    """Length of the largest payload."""
    url: str = field(default="", repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The instance's settings by name, with the types that `tiercache.config.remote_options` declares.

    Settings of undeclared tier types are plain text. Includes the configuration's `file_access`, for file tiers.
    """
    timeout_s: float = 5.0
    """Longest wait for the answer to one request."""
    concurrency: int = 4
    """Largest number of concurrent transfers in each direction."""
    item_bytes: int = 1
    """Length of a number in a payload, for compression."""

    url_key: str = ""
    """The configuration key that `url` came from."""

    def key(self, option: str) -> str:
        """Return the configuration key of `option`, for error messages."""
        if option == "url" and self.url_key:
            return self.url_key
        return f"remote_storage_plugin.{self.name}.{option}"

    def make_compression(self) -> Compression:
        """Return the compression for a type that has the option. Raises ConfigError."""
        mode = self.options.get("compression", "none")
        return Compression(mode, self.item_bytes, concurrency=self.concurrency, tier=self.name)

    def error(self, option: str, problem: str) -> ConfigError:
        """Return a ConfigError about `option`. `problem` must not hold secrets."""
        return ConfigError(f"{self.key(option)}: {problem}")


class NotOurs(CorruptChunk):
    """The value under the chunk's name was not written by tiercache. Reads do not delete it."""


class RemoteTier(Tier):
    """A tier on a shared server, which may be slow or unavailable.

    Subclasses implement `_connect`, `_disconnect`, `_get`, `_put`, `_exist` and `_delete`. Each of these runs to its
    end even if its caller is cancelled, so none may wait longer than about `settings.timeout_s` without progress. They
    raise TierUnavailable, OSError or TierFull; each of these counts against the tier's circuit breaker.

    A value that fails verification twice in a row raises CorruptChunk, is counted, is not reported as present for 10 s,
    and is deleted from the server if tiercache wrote it and this process writes to the tier.
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
        """Stores plain payloads, unless a subclass that calls `pack` replaces it. Compressed values are always read."""
        self.known = RememberedKeys(_KNOWN_KEYS, _REMEMBERED_S)
        """Keys that this process recently saw on the server."""
        self._bad = RememberedKeys(_BAD_KEYS, _REMEMBERED_S)
        """Keys whose value recently failed verification; lookups do not report them."""
        self._writing: set[ChunkKey] = set()
        self._removing_bad: set[ChunkKey] = set()
        self._removed = Tombstones()
        """Removals, since a lookup or a read in flight may have found the value before."""
        self._operations: set[asyncio.Future[Any]] = set()
        self.counters = TierStatistics()
        self._open = False

    # Methods for subclasses

    @abstractmethod
    async def _connect(self) -> None:
        """Make the tier usable. Raises ConfigError for a wrong setting, TierUnavailable for a temporary problem."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Release everything, and interrupt operations where possible, since they keep memory in use.

        Called once, also after a `_connect` that failed. Must not wait for operations that hang.
        """

    @abstractmethod
    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read the value into `into`, call `self.verified` in a thread, and return its result; None if there is no value."""

    @abstractmethod
    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Store `payload` (uint8, without padding) after `self.packed_header(key, payload)`, or the result of `pack`.

        No reader may ever see a part of it. Returns False if the tier declines, or if another program's value has the
        name.
        """

    @abstractmethod
    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return a flag per key, True if the server has the key, in a single round trip."""

    @abstractmethod
    async def _delete(self, key: ChunkKey) -> bool:
        """Delete the value; return False if there was none."""

    def value_name(self, key: ChunkKey) -> str:
        """Return the name of the value: `prefix:<key in hex>`, without a prefix the key alone."""
        prefix = self.settings.options.get("prefix")
        return f"{prefix}:{key.hex()}" if prefix else key.hex()

    def packed_header(self, key: ChunkKey, payload: np.ndarray) -> bytes:
        """Return the 88 bytes of the header of a plain `payload`. Computes a checksum: call it in a thread."""
        return Header(key, self.fingerprint, payload.nbytes, payload_checksum(payload)).pack()

    def pack(self, key: ChunkKey, payload: np.ndarray) -> Packed:
        """Return the chunk with its header, compressed if that is worthwhile. Call it in a thread."""
        return self.compression.pack(key, self.fingerprint, payload, payload.nbytes)

    def verified(self, key: ChunkKey, raw_header: Any, into: np.ndarray, got_bytes: int) -> int:
        """Check `into[:got_bytes]` against its header, decompress it in place, and return the payload's length in bytes.

        Call it in a thread. Raises CorruptChunk; NotOurs if tiercache did not write the value.
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
        """Return the header of the value of `key`. No field of a raw header may be used before this check.

        Raises CorruptChunk, also for an empty or truncated header; NotOurs if it does not begin like a tiercache
        header.
        """
        if not MAGIC.startswith(bytes(raw_header[: len(MAGIC)])):
            raise NotOurs(f"{self.name}: the value of {key.hex()} was not written by tiercache")
        try:
            return Header.check(raw_header, key, self.fingerprint)
        except HeaderError as error:
            raise CorruptChunk(f"{self.name}: {error}") from error

    # The tier interface

    async def open(self) -> None:
        self._open = True
        try:
            await self._connect()
        except (Exception, asyncio.CancelledError):  # not GeneratorExit, after which no await is allowed
            await self.close()
            raise

    def take_over(self, before: Tier) -> None:
        super().take_over(before)
        if isinstance(before, RemoteTier):
            self.counters, self.compression.stored_bytes = before.counters, before.compression.stored_bytes

    async def close(self) -> None:
        if self._open:
            self._open = False
            self.known.clear()
            await self._disconnect()
            if self._operations:
                await asyncio.wait(self._operations, timeout=_CLOSE_S)
            await asyncio.sleep(0)  # the callers of these operations release their memory

    def contains(self, key: ChunkKey) -> bool:
        return self.known.has(key, time.monotonic())

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """Ask the server about all unknown keys at once, so that chunks after a gap become known as well."""
        self._check_open()
        now_s = time.monotonic()
        unknown = [key for key in keys if not self.known.has(key, now_s) and not self._bad.has(key, now_s)]
        if unknown:
            epoch = self._removed.epoch
            found = await self._exist(unknown)
            for key, is_there in zip(unknown, found, strict=True):
                if is_there and not self._bad.has(key, now_s) and not self._removed.forgot(key, epoch):
                    self.known.add(key, now_s)
        return self.prefix(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self.probe(keys)
        return [self.contains(key) for key in keys]

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        self._check_open()
        epoch = self._removed.epoch
        try:
            length = await self._get_with_retry(key, into)
        except CorruptChunk as error:
            self.counters.corrupt += 1
            # A write that has ended since the first attempt has discarded the key: the value is a new one.
            if key not in self._writing and self._bad.discard(key):
                self._bad.add(key, time.monotonic())
                if self.writes and not isinstance(error, NotOurs):
                    await self._remove_bad(key)
            raise
        self._bad.discard(key)
        if length is None:
            self.counters.read_misses += 1
            self.known.discard(key)
            return None
        self.counters.reads += 1
        self.counters.read_bytes += length
        if not self._removed.forgot(key, epoch):
            self.known.add(key, time.monotonic(), length)
        return length

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        self._check_open()
        if self.contains(key):
            return True
        if key in self._removing_bad:  # the server might execute the two requests in any order
            return False
        self._writing.add(key)
        try:
            stored = await self._finish(self._put(key, payload[:payload_bytes]))
        except BaseException:
            self.counters.write_failures += 1
            raise
        finally:
            self._writing.discard(key)
        if stored:
            self._bad.discard(key)
            self.counters.writes += 1
            self.counters.written_bytes += payload_bytes
            self.known.add(key, time.monotonic(), payload_bytes)
        return stored

    async def remove(self, key: ChunkKey) -> bool:
        self._check_open()
        try:
            return await self._finish(self._delete(key))
        finally:
            self.known.discard(key)
            self._removed.forget(key)

    def statistics(self) -> TierStatistics:
        """Return the counters. `resident` and `occupied_bytes` cover only the keys that this process knows."""
        counters = TierStatistics(**vars(self.counters))
        counters.stored_bytes = self.compression.stored_bytes or counters.written_bytes
        counters.resident = len(self.known)
        counters.occupied_bytes = self.known.bytes_known
        return counters

    async def _get_with_retry(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read a value, and read it again if it fails verification, since perhaps only the transfer has damaged it."""
        try:
            return await self._finish(self._get(key, into))
        except CorruptChunk as error:
            self.counters.read_again += 1
            self.known.discard(key)
            self._bad.add(key, time.monotonic())
            logger.info("%s; reading it again", error)
        return await self._finish(self._get(key, into))

    async def _remove_bad(self, key: ChunkKey) -> None:
        """Delete a value that failed verification. A failure is only logged: it does not mean that reads fail."""
        if key in self._removing_bad:
            return
        self._removing_bad.add(key)
        try:
            await self._finish(self._delete(key))
        except (TierUnavailable, TierFull, OSError) as error:
            logger.info("%s: a bad value stays for now: %s", self.name, error)
        finally:
            self._removing_bad.discard(key)

    def _check_open(self) -> None:
        if not self._open:
            raise TierUnavailable(f"{self.name} is closed")

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even if the caller is cancelled, since it uses the caller's memory."""
        operation = asyncio.ensure_future(work)
        self._operations.add(operation)
        operation.add_done_callback(self._operations.discard)
        return await wait_shielded(operation)
