"""The Mooncake tier: chunks in the memory that other processes lend to a Mooncake Store, over TCP or RDMA.

A value is the payload without padding, followed by the 88 bytes of the chunk's header; a header in front would shift
the payload off the boundary of a cache line. Mooncake moves both directly between the store and the arena, and shows a
value to readers once it has arrived completely. Its multi-buffer reads need the exact length of the value, so each read
asks the master for it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import PACKED_BYTES, aligned
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierFull, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import NotOurs, RemoteSettings, RemoteTier
from tiercache.tiers.remote.mooncake_settings import MooncakeAddress, read_address

logger = logging.getLogger("tiercache.mooncake")

T = TypeVar("T")

_CONTROL_THREADS = 2
_UNANSWERED = 8
"""Limit of the queued requests, besides those that the control threads are sending."""
_LEAVE_S = 3.0
_GIVEN_UP_S = 20.0
"""A read that fails after this many seconds may have been abandoned by Mooncake while bytes still arrive."""

_LOOK_S = 1.0
_AGAIN_S = 0.5
_CELL_BYTES = 128

# Return codes of Mooncake: `ErrorCode` in its types.h.
_CODES = {
    -1: "internal error",
    -10: "its local buffer is too small",
    -101: "no segment",
    -103: "the master does not know this client",
    -200: "no room in any segment",
    -600: "invalid parameters",
    -601: "illegal client",
    -706: "the value is being read",
    -707: "the read took longer than the master's lease",
    -708: "the value is being copied",
    -714: "the replica is busy",
    -800: "the transfer failed",
    -801: "checksum mismatch",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
_ALREADY_THERE = -705
_MISSES = frozenset({-703, -704, -710, -712})
"""Codes of a missing value, which includes a value that is still being written (-703)."""
_FULL = -200


class MooncakeTier(RemoteTier):
    """Uses `settings.concurrency` threads to read and as many to write; two more check existence and remove.

    A frozen master blocks a thread, and the memory that it works on, for Mooncake's `MC_RPC_TIMEOUT_MS` (30 s by
    default). Checks of existence wait `timeout_s` at most.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self._arena: Arena | None = None
        self._address: MooncakeAddress | None = None
        self._client: MooncakeClient | None = None
        self._readers = Workers(f"{self.name}-read", settings.concurrency)
        self._writers = Workers(f"{self.name}-write", settings.concurrency)
        self._control = Workers(f"{self.name}-control", _CONTROL_THREADS)
        self._last = Workers(f"{self.name}-close", 1)

    def use_arena(self, arena: Arena) -> None:
        self._arena = arena
        arena.pinned = True

    def describe(self) -> str:
        return f"{self.name} ({self._address.shown_master}, {self._address.protocol})" if self._address else self.name

    def load_library(self) -> None:
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs Mooncake, which cannot be imported ({error}): pip install "
                "'tiercache[mooncake]', and the system's libibverbs1, also without RDMA"
            ) from error

    async def _connect(self) -> None:
        """Start to set up the client.

        An unreachable master does not stop the start: operations fail until it is reachable.
        """
        settings = self.settings
        self._address = await self._control.submit(read_address, settings)
        await self._control.submit(self.load_library)
        arena = None if self._arena is None else self._arena.memory
        self._memory = WiredMemory(arena, headers=2 * settings.concurrency)
        self._client = MooncakeClient(self.name, self._address, self._memory)
        self._client.start()
        problem = await self._control.submit(self._client.wait_for_first_try, settings.timeout_s)
        if problem is not None:
            logger.warning("%s: starting without it: %s", self.name, problem)

    async def _disconnect(self) -> None:
        """Leave the store. Operations that still run keep the client, and the arena's pages, until they end."""
        for workers in (self._readers, self._writers, self._control):
            workers.close()
        if self._client is not None:
            await asyncio.wait([self._last.submit(self._client.leave)], timeout=_LEAVE_S)
        self._last.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._readers.submit(self._get_blocking, key, into)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return await self._writers.submit(self._put_blocking, key, payload)

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._ask(self._exist_blocking, keys)

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._ask(self._delete_blocking, key)

    async def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a request without a payload in a control thread, and abandon it after `timeout_s`."""
        if self._control.unfinished >= _UNANSWERED + _CONTROL_THREADS:
            raise TierUnavailable(f"{self.name}: the master answers none of {self._control.unfinished} questions")
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await self._control.submit(call, *arguments)
        except TimeoutError:
            raise TierUnavailable(f"{self.name}: the master does not answer in {self.settings.timeout_s:g} s") from None

    def _use(self) -> AbstractContextManager[_Session]:
        if self._client is None:
            raise TierUnavailable(f"{self.name} is closed")
        return self._client.use()

    # Blocking calls for threads: Mooncake's calls block, with the GIL released.

    def _get_blocking(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Read a value without changing bytes after the payload. Raises CorruptChunk, TierUnavailable."""
        name = self.value_name(key)
        with self._use() as session:
            size = session.store.get_size(name)
        if size in _MISSES:
            return None
        if size < 0:
            raise self._failure(f"the length of {name}", size)
        payload_bytes = size - PACKED_BYTES
        if not 0 < payload_bytes <= into.nbytes:
            raise NotOurs(f"{self.name}: {name} has {size} bytes, which no chunk has")
        with self._memory.header() as (header, header_address):
            code = self._read(name, [int(into.ctypes.data), header_address], [payload_bytes, PACKED_BYTES])
            if code in _MISSES:
                return None
            if code != size:
                raise self._failure(f"reading {name}", code)
            return self.verified(key, bytes(header), into, payload_bytes)

    def _read(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        """Return Mooncake's code, or the number of bytes read.

        Mooncake abandons a transfer after 60 s, and bytes may arrive after that. So if a failed read took long, this
        waits until the store was left, which ends all transfers. The caller keeps its memory until then.
        """
        began_s = time.monotonic()
        with self._use() as session:
            code = int(session.store.batch_get_into_multi_buffers([name], [addresses], [sizes])[0])
            given_up = code != sum(sizes) and time.monotonic() - began_s >= _GIVEN_UP_S
            if given_up and self._client is not None:
                self._client.retire(session, "a read was given up: a new client is being set up")
        if given_up:
            session.left.wait()
        return code

    def _put_blocking(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Store a value. Mooncake keeps an existing one. Raises TierFull, TierUnavailable."""
        name = self.value_name(key)
        packed = self.packed_header(key, payload)
        with self._memory.header() as (header, header_address), self._use() as session:
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            addresses, sizes = [int(payload.ctypes.data), header_address], [payload.nbytes, PACKED_BYTES]
            code = session.store.batch_put_from_multi_buffers([name], [addresses], [sizes], session.write_config)[0]
        if code not in (0, _ALREADY_THERE):
            raise self._failure(f"writing {name}", code)
        return True

    def _exist_blocking(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._use() as session:
            codes = session.store.batch_is_exist([self.value_name(key) for key in keys])
        for code in codes:
            if code < 0 and code not in _MISSES:
                raise self._failure("asking what is there", code)
        return [code == 1 for code in codes]

    def _delete_blocking(self, key: ChunkKey) -> bool:
        """Remove the value even while the master's lease for a read lasts (10 s), since readers verify their result."""
        with self._use() as session:
            code = session.store.remove(self.value_name(key), True)
        if code < 0 and code not in _MISSES:
            raise self._failure(f"removing {self.value_name(key)}", code)
        return bool(code >= 0)

    def _failure(self, what: str, code: int) -> TierFull | TierUnavailable:
        """Return the error for a code that is neither success nor a miss."""
        meaning = f"{self.name}: {what}: Mooncake says {code} ({_CODES.get(code, 'see ErrorCode in its types.h')})"
        if code == _FULL:
            return TierFull(meaning)
        return TierUnavailable(meaning)


class WiredMemory:
    """The arena and memory for headers, registered with Mooncake.

    Thread-safe, except that `wire` and `release` must not be called at the same time. Stays mapped while this object
    lives.
    """

    def __init__(self, arena: np.ndarray | None, headers: int) -> None:
        self._headers = np.frombuffer(mmap.mmap(-1, aligned(headers * _CELL_BYTES)), dtype=np.uint8)
        self._memories = [self._headers] if arena is None else [self._headers, arena]
        self._free: SimpleQueue[int] = SimpleQueue()
        for number in range(headers):
            self._free.put(number * _CELL_BYTES)
        self._registered: list[int] = []

    def wire(self, register: Callable[[int, int], int]) -> int:
        """Register all memory by `register(address, size)`, which returns 0 on success. Return Mooncake's code."""
        for memory in self._memories:
            if code := register(int(memory.ctypes.data), memory.nbytes):
                return code
            self._registered.append(int(memory.ctypes.data))
        return 0

    def release(self, unregister: Callable[[int], int]) -> None:
        """Unregister all memory. No transfer may be in flight."""
        while self._registered:
            unregister(self._registered.pop())

    @contextlib.contextmanager
    def header(self) -> Iterator[tuple[np.ndarray, int]]:
        """Lend the memory for one header, with its address."""
        offset = self._free.get()
        try:
            yield self._headers[offset : offset + PACKED_BYTES], int(self._headers.ctypes.data) + offset
        finally:
            self._free.put(offset)


class _Session:
    """A connected store, and the number of its users."""

    def __init__(self, store: Any, write_config: Any) -> None:
        self.store = store
        self.write_config = write_config
        self.users = 0
        self.left = threading.Event()
        """Set when no thread of Mooncake uses the memory any more."""


class MooncakeClient:
    """Sets up a session, and a new session after it was retired. Thread-safe.

    A session reconnects by itself to a master that returns. `setup` blocks for 90 s without a master, so a separate
    thread calls it, and first checks if anything listens at the master's address.
    """

    def __init__(self, name: str, address: MooncakeAddress, memory: WiredMemory) -> None:
        self.name = name
        self.address = address
        self._memory = memory
        self._session: _Session | None = None
        self._problem = "it is being set up"
        self._lock = threading.Lock()
        self._first_try = threading.Event()
        self._closing = threading.Event()
        self._gone = threading.Event()
        """Set when there is no session any more, and none is set up."""

    def start(self) -> None:
        """Begin to set up a session."""
        threading.Thread(target=self._set_up, name=f"tiercache-{self.name}-setup", daemon=True).start()

    def wait_for_first_try(self, wait_s: float) -> str | None:
        """Block for up to `wait_s`. Return the problem, or None once the client can be used."""
        self._first_try.wait(wait_s)
        return None if self._session is not None else self._problem

    @contextlib.contextmanager
    def use(self) -> Iterator[_Session]:
        """Lend the session, which stays until the block ends. Raises TierUnavailable while there is none."""
        with self._lock:
            if self._closing.is_set():
                raise TierUnavailable(f"{self.name} is closed")
            if self._session is None:
                raise TierUnavailable(f"{self.name}: {self._problem}")
            session = self._session
            session.users += 1
        try:
            yield session
        finally:
            self._done_with(session)

    def retire(self, session: _Session, problem: str) -> None:
        """Admit no new users to `session`; its last user leaves the store. A new session is then set up."""
        with self._lock:
            if self._session is not session:
                return
            self._session, self._problem = None, problem
            session.users += 1
        self._done_with(session)

    def leave(self) -> None:
        """Retire the session for good, and block without limit until it has no users."""
        self._closing.set()
        with self._lock:
            session = self._session
        if session is not None:
            self.retire(session, "it is closed")
        self._gone.wait()

    def _done_with(self, session: _Session) -> None:
        with self._lock:
            session.users -= 1
            if session.users or self._session is session:
                return
        try:
            self._memory.release(session.store.unregister_buffer)
            session.store.close()
        finally:
            session.left.set()
            if self._closing.is_set():
                self._gone.set()
            else:
                self.start()

    def _set_up(self) -> None:
        session: _Session | None = None
        try:
            while not self._closing.is_set():
                found = self._unreachable() or self._try_once()
                if isinstance(found, _Session):
                    session = found
                    break
                if found != self._problem:
                    logger.warning("%s: not there yet: %s", self.name, found)
                    self._problem = found
                self._first_try.set()
                self._closing.wait(_AGAIN_S)
        except Exception:
            self._problem = "it could not be set up, see the log"
            logger.exception("%s: %s", self.name, self._problem)
        with self._lock:
            self._session = session
        self._first_try.set()
        if session is None:  # it is closed, or the setup failed for good
            self._gone.set()
        elif self._closing.is_set():
            self.retire(session, "it is closed")

    def _unreachable(self) -> str | None:
        """Return a message if nothing listens at the master's address."""
        endpoint = self.address.master_endpoint
        if endpoint is None:
            return None
        try:
            with socket.create_connection(endpoint, _LOOK_S):
                return None
        except OSError as error:
            return f"mooncake_master at {self.address.shown_master} cannot be reached: {error.strerror or error}"

    def _try_once(self) -> _Session | str:
        """Return a session, or the problem. Each try has its own store, which is dropped with everything that it holds."""
        import mooncake.store as module

        address, store = self.address, module.MooncakeDistributedStore()
        began_s = time.monotonic()
        code = store.setup(
            address.local_hostname,
            address.metadata_server,
            address.global_segment_bytes,
            address.local_buffer_bytes,
            address.protocol,
            address.device_name,
            address.master,
        )
        if code:
            return f"Mooncake's setup ({address.protocol}, master {address.shown_master}) says {code}"
        code = self._memory.wire(store.register_buffer)
        if code:
            self._memory.release(store.unregister_buffer)
            store.close()
            return f"Mooncake registers no memory: code {code}; with RDMA see ulimit -l"
        config = module.ReplicateConfig()
        config.replica_num = 1
        if address.prefer_local:
            config.preferred_segment = store.get_hostname()
        logger.info("%s: at %s (%.1f s)", self.name, address.shown_master, time.monotonic() - began_s)
        return _Session(store, config)
