"""One Mooncake client, set up in the background, and the memory that it may read and write."""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from tiercache.core.header import PACKED_BYTES, aligned
from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.mooncake_settings import MooncakeAddress

logger = logging.getLogger("tiercache.mooncake")

_LOOK_S = 1.0
_AGAIN_S = 0.5
_CELL_BYTES = 128

Register = Callable[[int, int], int]
"""`register_buffer(address, size)`, which returns 0 on success."""


def import_mooncake() -> Any:
    """Return the module `mooncake.store`. Raises ImportError, also if a library of the system is missing."""
    import mooncake.store

    return mooncake.store


class WiredMemory:
    """The arena, cells for headers, and a bounce buffer for payloads elsewhere, registered with Mooncake.

    Thread-safe, except that `wire` and `release` are not called at the same time. Stays mapped while this object lives.
    """

    def __init__(self, arena: np.ndarray | None, chunk_bytes: int, cells: int, wait_s: float) -> None:
        self._arena = arena
        self._arena_wired = False
        self._headers = np.frombuffer(mmap.mmap(-1, aligned(cells * _CELL_BYTES)), dtype=np.uint8)
        self._free: SimpleQueue[int] = SimpleQueue()
        for number in range(cells):
            self._free.put(number * _CELL_BYTES)
        self._detour = np.frombuffer(mmap.mmap(-1, aligned(chunk_bytes)), dtype=np.uint8)
        self._detour_lock = threading.Lock()
        self._wait_s = wait_s
        self._registered: list[int] = []

    def wire(self, register: Register) -> int:
        """Register all memory. Returns Mooncake's code; 0 also if only the arena cannot be registered."""
        for memory in (self._headers, self._detour):
            if code := self._wire(memory, register):
                return code
        if self._arena is not None and self._arena.nbytes:
            code = self._wire(self._arena, register)
            self._arena_wired = code == 0
            if code:
                logger.warning(
                    "the arena (%d bytes) cannot be registered with Mooncake (code %d): each chunk is copied once more; "
                    "with RDMA see ulimit -l",
                    self._arena.nbytes,
                    code,
                )
        return 0

    def release(self, unregister: Callable[[int], int]) -> None:
        """Unregister all memory. No transfer may be in flight."""
        while self._registered:
            unregister(self._registered.pop())
        self._arena_wired = False

    @contextlib.contextmanager
    def header(self) -> Iterator[tuple[np.ndarray, int]]:
        """Lend the memory for one header, with its address."""
        offset = self._free.get()
        try:
            yield self._headers[offset : offset + PACKED_BYTES], int(self._headers.ctypes.data) + offset
        finally:
            self._free.put(offset)

    @contextlib.contextmanager
    def reachable(self, payload: np.ndarray) -> Iterator[np.ndarray]:
        """Yield `payload` itself if it is in the arena, else as many bytes of the bounce buffer, which one thread has at a
        time.

        The caller copies. Raises TierUnavailable if another thread keeps the bounce buffer too long.
        """
        if self._arena_wired and self._arena is not None:
            offset = int(payload.ctypes.data) - int(self._arena.ctypes.data)
            if 0 <= offset <= self._arena.nbytes - payload.nbytes:
                yield payload
                return
        if not self._detour_lock.acquire(timeout=self._wait_s):
            raise TierUnavailable("Mooncake's detour for memory outside of the arena stays taken")
        try:
            yield self._detour[: payload.nbytes]
        finally:
            self._detour_lock.release()

    def _wire(self, memory: np.ndarray, register: Register) -> int:
        code = register(int(memory.ctypes.data), memory.nbytes)
        if code == 0:
            self._registered.append(int(memory.ctypes.data))
        return code


class Session:
    """A store that was set up, and the number of its users."""

    def __init__(self, store: Any, write_config: Any) -> None:
        self.store = store
        self.write_config = write_config
        self.users = 0
        self.left = threading.Event()
        """Set when no thread of Mooncake's uses the memory any more."""


class MooncakeClient:
    """Sets up a session, and another one after it was retired. Thread-safe.

    A session reconnects by itself to a master that comes back. `setup` blocks for 90 s without a master, so a thread of its
    own calls it, and first looks if anything listens at the master's address.
    """

    def __init__(self, name: str, address: MooncakeAddress, memory: WiredMemory) -> None:
        self.name = name
        self.address = address
        self._memory = memory
        self._session: Session | None = None
        self._problem = "it is being set up"
        self._changed = threading.Condition()
        self._setting_up = False
        self._sessions = 0
        self._first_try = threading.Event()
        self._closing = threading.Event()

    def start(self) -> None:
        with self._changed:
            self._start_setting_up()

    def wait_for_first_try(self, wait_s: float) -> str | None:
        """Block for up to `wait_s`. Returns the problem, or None once the client can be used."""
        self._first_try.wait(wait_s)
        return None if self._session is not None else self._problem

    @contextlib.contextmanager
    def use(self) -> Iterator[Session]:
        """Lend the session, which stays until the block ends. Raises TierUnavailable while there is none."""
        with self._changed:
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

    def retire(self, session: Session, problem: str) -> None:
        """Admit no new users to `session`; its last user leaves the store. A new session is then set up."""
        with self._changed:
            if self._session is not session:
                return
            self._session, self._problem = None, problem
            session.users += 1
        self._done_with(session)

    def leave(self) -> None:
        """Retire the session for good, and block until nothing uses it, however long that takes."""
        self._closing.set()
        with self._changed:
            session = self._session
        if session is not None:
            self.retire(session, "it is closed")
        with self._changed:
            self._changed.wait_for(lambda: not self._setting_up and self._sessions == 0)

    def _done_with(self, session: Session) -> None:
        with self._changed:
            session.users -= 1
            if session.users or self._session is session:
                return
        try:
            self._memory.release(session.store.unregister_buffer)
            session.store.close()
        finally:
            session.left.set()
            with self._changed:
                self._sessions -= 1
                if not self._closing.is_set():
                    self._start_setting_up()
                self._changed.notify_all()

    def _start_setting_up(self) -> None:
        self._setting_up = True
        threading.Thread(target=self._set_up, name=f"tiercache-{self.name}-setup", daemon=True).start()

    def _set_up(self) -> None:
        session: Session | None = None
        try:
            while session is None and not self._closing.is_set():
                found = self._unreachable() or self._try_once()
                if isinstance(found, Session):
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
        with self._changed:
            self._setting_up = False
            self._session = session
            self._sessions += session is not None
            self._changed.notify_all()
        self._first_try.set()
        if session is not None and self._closing.is_set():
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

    def _try_once(self) -> Session | str:
        """Return a session, or the problem. Each try has a store of its own, which is dropped with all that it holds."""
        module = import_mooncake()
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
            return f"Mooncake registers no memory: code {code}"
        config = module.ReplicateConfig()
        config.replica_num = 1
        if address.prefer_local:
            config.preferred_segment = store.get_hostname()
        logger.info("%s: at %s (%.1f s)", self.name, address.shown_master, time.monotonic() - began_s)
        return Session(store, config)
