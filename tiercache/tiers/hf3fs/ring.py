"""A ring of 3FS, which works in one direction, with its thread, and the registered memory that rings use.

A transfer moves the header and the payload of a chunk file. If the arena is not in shared memory, both go through a
transfer buffer, and a worker thread copies the payload. If it is, the arena itself is registered, and buffers hold
headers only.

Each ring has one thread, which prepares the queued operations, waits up to 10 ms for the first completion, and starts
again. A second thread that only waits would abort the process: the native `prepare` publishes an operation before it
records the slice of the operation, with the GIL released in between, and a `wait` that sees the completion by then
finds no slice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import tempfile
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import xxhash

from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import SHM_DIRECTORY, Arena, ArenaSettings

logger = logging.getLogger("tiercache.hf3fs")

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.01
"""Bounds in seconds of a wait for completions. New transfers are prepared after it."""
_BLOCK_BYTES = 256 << 10

Part = tuple[Any, int]
"""A slice of a registered iovec, for one operation, and its offset in the file."""


@dataclass(frozen=True)
class RingSettings:
    entries: int = 256
    io_depth: int = 0
    rings: int = 4
    """Number of rings in each direction."""
    numa: int = -1
    timeout_s: float = 5.0
    """Seconds after which a transfer fails. Its memory and file stay reserved until it is over."""


@dataclass(eq=False)
class Transfer:
    """A set of parts of a file that are moved together."""

    descriptor: int
    parts: list[Part]
    ended: asyncio.Future[int]
    """The bytes moved; OSError if any part failed, TierUnavailable if there was no answer in time."""
    over: asyncio.Future[None]
    """Done when the daemon no longer uses the memory and the file: together with `ended`, or any time after a timeout."""
    began_s: float
    missing: int = 0
    """Number of parts without a result."""
    moved_bytes: int = 0
    error: OSError | None = None


Operation = tuple[Transfer, Any, int]
"""A transfer, a slice to move, and its offset in the file."""


class Ring:
    """Keeps a ring full, and reports ended transfers by calling `settled` on the event loop, many at a time.

    `submit` and `close` belong to the event loop.
    """

    def __init__(
        self,
        ring: Any,
        settings: RingSettings,
        *,
        read: bool,
        loop: asyncio.AbstractEventLoop,
        settled: Callable[[list[Transfer]], None],
        name: str,
    ) -> None:
        self.entries = settings.entries
        self.unfinished: dict[Transfer, None] = {}
        """Transfers that were submitted and not settled, oldest first. Used by the loop only."""
        self._ring = ring
        del ring
        self._read = read
        self._loop = loop
        self._settled = settled
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._closed = False
        # The following attributes are used by the thread alone.
        self._waiting: deque[Operation] = deque()
        self._in_flight: dict[int, Operation] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._run, name=f"tiercache-{name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._ring = None  # a thread that was not started refers to this object, so only a collection would free it
            raise

    @property
    def works(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def submit(self, transfer: Transfer) -> None:
        transfer.missing = len(transfer.parts)
        self.unfinished[transfer] = None
        self._queue.put(transfer)

    def close(self) -> list[Transfer]:
        """Tell the thread to end and to drop the ring. Non-blocking. Returns the transfers that had not ended."""
        self._closed = True
        self._queue.put(None)
        left, self.unfinished = list(self.unfinished), {}
        return left

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._fill()
                if self._in_flight:
                    self._reap()
        except Exception:
            # Log text only, since the frames of the exception would keep the ring alive.
            logger.error("%s ended: %s", self._thread.name, traceback.format_exc())
        # This removes its registration, by a call that may hang with the mount.
        self._ring = None

    def _fill(self) -> None:
        """Prepare queued operations while there is room. Wait for a transfer if none is in flight."""
        try:
            while (transfer := self._queue.get(block=not self._waiting and not self._in_flight)) is not None:
                self._waiting.extend((transfer, piece, offset) for piece, offset in transfer.parts)
        except Empty:
            pass
        refused: list[tuple[Operation, int]] = []
        prepared = 0
        while self._waiting and not self._closed and len(self._in_flight) < self.entries:
            operation = transfer, piece, offset = self._waiting.popleft()
            try:
                self._ring.prepare(piece, self._read, transfer.descriptor, offset)
            except BlockingIOError:
                # Entries are reused in order: a slow operation holds back all later entries.
                self._waiting.appendleft(operation)
                break
            except OSError as error:
                refused.append((operation, -(error.errno or errno.EIO)))
                continue
            prepared += 1
            self._in_flight[id(piece)] = operation
        if prepared:
            self._ring.submit()
        self._completed(refused)

    def _reap(self) -> None:
        done = self._ring.wait(max_results=self.entries, min_results=1, timeout=self._pause_s)
        self._pause_s = _FIRST_PAUSE_S if done else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._completed((self._in_flight.pop(id(piece)), piece.result) for piece in done)

    def _completed(self, ended: Iterable[tuple[Operation, int]]) -> None:
        """Process the results of operations, and notify the loop of transfers whose parts have all ended."""
        whole = []
        for (transfer, _, _), result in ended:
            if result < 0:
                transfer.error = transfer.error or OSError(-result, os.strerror(-result))
            else:
                transfer.moved_bytes += result
            transfer.missing -= 1
            if not transfer.missing:
                whole.append(transfer)
        if whole:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, whole)

    def _settle(self, transfers: list[Transfer]) -> None:
        settled = [transfer for transfer in transfers if transfer in self.unfinished]
        for transfer in settled:
            del self.unfinished[transfer]
        if settled:
            self._settled(settled)


def in_parts(iov: Any, start: int, length: int, offset: int, part_bytes: int) -> list[Part]:
    """Cut a run of registered memory at multiples of `part_bytes` from the beginning of the memory."""
    boundaries = range((start // part_bytes + 1) * part_bytes, start + length, part_bytes)
    cuts = itertools.pairwise([start, *boundaries, start + length])
    return [(iov[begin:end], offset + begin - start) for begin, end in cuts]


Piece = tuple["RegisteredMemory", int, int]
"""Registered memory, an offset in it and a length, both in bytes."""


class RegisteredMemory:
    """A run of shared memory with the two attributes of a SharedMemory that `make_iovec` uses, `name` and `buf`.

    The standard library's SharedMemory has a resource tracker that may remove memory in use; arenas have a lock.
    """

    def __init__(self, arena: Arena) -> None:
        """`arena` is in shared memory."""
        assert arena.shm_path is not None
        self.name = arena.shm_path.name
        self.arena = arena
        self.buf = arena.memory.data
        self.memory = arena.memory
        self.iov: Any = None

    def register(self, library: Any, mount: str, numa: int) -> None:
        self.iov = library.make_iovec(self, mount, 0, numa)

    def unregister(self) -> None:
        """Remove the registration. Blocks while the mount hangs. Idempotent.

        The finaliser of an iovec unlinks the registration, and raises uncatchably if it disappeared with its daemon. So
        it is called here first, and gets a temporary file to unlink for its second call.
        """
        iov, self.iov = self.iov, None
        if iov is None:
            return
        with contextlib.suppress(OSError):
            iov.__del__()
        with contextlib.suppress(OSError):
            stand_in, iov.link = tempfile.mkstemp(prefix="tiercache-")
            os.close(stand_in)

    def release(self) -> None:
        """Remove the registration and then the reference to the memory."""
        self.unregister()
        self.buf.release()
        self.memory = np.empty(0, dtype=np.uint8)


class Buffers:
    """A number `count` of transfer buffers of `place_bytes` each, in shared memory that is removed with this process."""

    def __init__(self, size_bytes: int, place_bytes: int, what: str) -> None:
        self.place_bytes = place_bytes
        self.count = size_bytes // place_bytes
        if self.count < 2:
            raise ConfigError(
                f"hf3fs_iov_size: {size_bytes} bytes hold {self.count} {what} of {place_bytes} bytes; at least 2 are needed"
            )
        self._arena = Arena(ArenaSettings(size_bytes=size_bytes, shm_name=f"iov-{os.getpid()}-{uuid.uuid4().hex}"))
        self.registered = RegisteredMemory(self._arena)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for place in range(self.count - 1, -1, -1):
            self._free.put_nowait(place)

    async def take(self, timeout_s: float) -> int:
        """Wait for a free place and return it. Raises TierUnavailable if there is none within `timeout_s`."""
        if not self._free.empty():
            return self._free.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._free.get()
        except TimeoutError:
            raise TierUnavailable(f"no transfer buffer was free for {timeout_s:.1f} s") from None

    def give_back(self, place: int) -> None:
        self._free.put_nowait(place)

    def view(self, place: int) -> np.ndarray:
        """Return the memory of a place, or an empty array if the buffers were closed."""
        start = place * self.place_bytes
        return self.registered.memory[start : start + self.place_bytes]

    def piece(self, place: int, start: int, length_bytes: int) -> Piece:
        return self.registered, place * self.place_bytes + start, length_bytes

    def close(self) -> None:
        """Remove the registration and the memory. Blocks while the mount hangs."""
        self.registered.release()
        self._arena.close()


def copy_with_checksum(source: np.ndarray, target: np.ndarray) -> int:
    """Copy `source` to `target` and return `payload_checksum(source)`. Works in blocks that stay in the CPU's cache."""
    digest = xxhash.xxh3_64()
    for start in range(0, source.nbytes, _BLOCK_BYTES):
        block = source[start : start + _BLOCK_BYTES]
        digest.update(block.data)
        np.copyto(target[start : start + block.nbytes], block)
    return digest.intdigest()


def registered_arena(arena: Arena) -> RegisteredMemory | None:
    """Return the arena as memory to register, or None if it is not in shared memory."""
    if arena.shm_path is None or arena.shm_path.parent != SHM_DIRECTORY or not os.path.exists(arena.shm_path):
        return None
    arena.pinned = True
    return RegisteredMemory(arena)
