"""One ring of 3FS, in one direction, with a thread that keeps it full and takes what has ended.

A transfer moves a chunk file's header and its payload. With buffers of our own both lie side by side and a worker thread
copies the payload; where the arena lies in shared memory it is registered itself, and only headers have a place of ours.

One thread and not two, a submitter and a waiter: the native `prepare` publishes an operation before it notes which slice it
is for, with the GIL released in between, and where another thread's `wait` sees it end by then it aborts the process. So the
thread prepares whatever is queued, waits for the first completion or a millisecond, and looks again.
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

from tiercache.core.header import HEADER_BYTES, aligned
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import SHM_DIRECTORY, Arena, ArenaSettings

logger = logging.getLogger("tiercache.hf3fs")

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.01
"""How long what is queued may wait for a ring whose operations do not end."""
_PADDING_BYTES = 4096

Part = tuple[Any, int]
"""A slice of a registered iovec, for one operation, and its offset in the file."""


@dataclass(frozen=True)
class RingSettings:
    entries: int = 256
    io_depth: int = 0
    rings: int = 4
    """In each direction, with a thread each."""
    numa: int = -1
    hang_s: float = 5.0
    """A transfer that takes longer has failed. What it uses is not used again before it is over all the same."""


@dataclass(eq=False)
class Transfer:
    """Parts of one file that are moved together."""

    descriptor: int
    parts: list[Part]
    ended: asyncio.Future[int]
    """The bytes moved; OSError when any part failed, TierUnavailable when nobody will say."""
    over: asyncio.Future[None]
    """Done when the daemon touches neither the memory nor the file any more. Not before `ended`, perhaps long after."""
    began_s: float
    arena_bytes: int = 0
    """Of the arena's, that it reads into: they stay with it until it is over."""
    missing: int = 0
    moved_bytes: int = 0
    error: OSError | None = None


Operation = tuple[Transfer, Any, int, bool]
"""What it belongs to, slice, offset in the file, whether its result counts (that of a batch's padding does not)."""


class Ring:
    """`submit` and `close` belong to the event loop; `settled` is called on it, with transfers that ended, in batches."""

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
        """Transfers that were submitted and have not been settled, the oldest first. The loop's."""
        self.jammed = False
        """Whether the last operation found no room though entries were free: one before it has not ended. The thread's."""
        self._ring = ring
        del ring
        self._read = read
        self._batch = max(1, settings.io_depth)
        self._loop = loop
        self._settled = settled
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._closed = False
        self._done: deque[Transfer] = deque()
        self._wake_pending = False
        # All that follows is the thread's.
        self._waiting: deque[Operation] = deque()
        self._in_flight: dict[int, Operation] = {}
        self._partial: Operation | None = None
        self._partial_count = 0
        self._pause_s = _FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._run, name=f"tiercache-{name}", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._ring = None  # the thread that was not started refers to this object, so only a collection would free it
            raise

    @property
    def works(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def submit(self, transfer: Transfer) -> None:
        transfer.missing = len(transfer.parts)
        self.unfinished[transfer] = None
        self._queue.put(transfer)

    def lost_entries(self, late: list[Transfer]) -> int:
        """All of them where the room behind an operation that is never answered is used up."""
        return self.entries if late and self.jammed else sum(each.missing for each in late)

    def close(self) -> list[Transfer]:
        """Let the thread end and take the ring away. Does not wait. Returns what had not ended."""
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
            # As text: frames of the exception would keep the ring.
            logger.error("%s ended: %s", self._thread.name, traceback.format_exc())
        # Takes away its registration, which is a call to a mount that may hang: nobody waits for this thread then.
        self._ring = None

    def _fill(self) -> None:
        """Prepare what is queued as far as there is room; wait for something where nothing is in flight."""
        try:
            while (transfer := self._queue.get(block=not self._waiting and not self._in_flight)) is not None:
                self._waiting.extend((transfer, piece, offset, True) for piece, offset in transfer.parts)
        except Empty:
            pass
        refused: list[tuple[Operation, int]] = []
        prepared = 0
        while not self._closed and len(self._in_flight) < self.entries and (operation := self._next()) is not None:
            try:
                self._ring.prepare(operation[1], self._read, operation[0].descriptor, operation[2])
            except BlockingIOError:
                # An operation that takes long holds back the room of all that came after it, although entries are free.
                if operation[3]:
                    self._waiting.appendleft(operation)
                self.jammed = True
                break
            except OSError as error:
                refused.append((operation, -(error.errno or errno.EIO)))
                continue
            prepared += 1
            self.jammed = False
            self._in_flight[id(operation[1])] = operation
            self._partial_count = (self._partial_count + 1) % self._batch
            self._partial = operation if self._partial_count else None
            if not operation[3]:
                operation[0].missing += 1
        if prepared:
            self._ring.submit()
        self._completed(refused)

    def _next(self) -> Operation | None:
        """What is to be prepared next. Where the ring issues whole batches only, one that is not full is filled up with the
        first bytes of its last operation, once more: it cannot have begun, so its memory and file are still its own."""
        if self._waiting:
            return self._waiting.popleft()
        if self._partial is None:
            return None
        transfer, piece, offset, _ = self._partial
        return transfer, piece[:_PADDING_BYTES], offset, False

    def _reap(self) -> None:
        done = self._ring.wait(max_results=self.entries, min_results=1, timeout=self._pause_s)
        self._pause_s = _FIRST_PAUSE_S if done else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._completed((self._in_flight.pop(id(piece)), piece.result) for piece in done)

    def _completed(self, ended: Iterable[tuple[Operation, int]]) -> None:
        """Count parts; transfers whose parts have all ended go to the loop."""
        whole = False
        for (transfer, _, _, counts), result in ended:
            if result < 0:
                transfer.error = transfer.error or OSError(-result, os.strerror(-result))
            elif counts:
                transfer.moved_bytes += result
            transfer.missing -= 1
            if not transfer.missing:
                self._done.append(transfer)
                whole = True
        # The flag is set after the append and cleared before the loop drains: nothing is left without a wake-up behind it.
        if whole and not self._wake_pending:
            self._wake_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._wake_pending = False
        settled = []
        while self._done:
            transfer = self._done.popleft()
            if transfer in self.unfinished:
                del self.unfinished[transfer]
                settled.append(transfer)
        if settled:
            self._settled(settled)


def in_parts(iov: Any, start: int, length: int, offset: int, part_bytes: int) -> list[Part]:
    """A run of registered memory cut where its place in the memory is a multiple of `part_bytes`."""
    boundaries = range((start // part_bytes + 1) * part_bytes, start + length, part_bytes)
    cuts = itertools.pairwise([start, *boundaries, start + length])
    return [(iov[begin:end], offset + begin - start) for begin, end in cuts]


_BLOCK_BYTES = 256 << 10

Piece = tuple["RegisteredMemory", int, int]
"""Registered memory, an offset in it, a length."""


class RegisteredMemory:
    """One run of shared memory, with the two attributes that `make_iovec` asks of a SharedMemory.

    That class of the standard library has a second process remove the memory of whoever it thinks is gone; our arenas
    have a lock for that.
    """

    def __init__(self, name: str, memory: np.ndarray, is_ours_alone: Callable[[], bool] = lambda: False) -> None:
        """`is_ours_alone`: whether certainly no other process has the memory mapped."""
        self.name = name
        self.is_ours_alone = is_ours_alone
        self.buf = memory.data
        self.memory = memory
        self.iov: Any = None

    def register(self, library: Any, mount: str, numa: int) -> None:
        self.iov = library.make_iovec(self, mount, 0, numa)

    def unregister(self) -> None:
        """Blocks while the mount hangs.

        The iovec's finaliser unlinks the registration. It raises, where nobody can catch it, when that has gone with its
        daemon; so it is called here first, and finds a link of its own when it is called again.
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
        """The registration goes before the memory does."""
        self.unregister()
        self.buf.release()
        self.memory = np.empty(0, dtype=np.uint8)


class Buffers:
    """`count` places for a transfer each, in shared memory of `size_bytes` that is ours and goes with us."""

    def __init__(self, size_bytes: int, place_bytes: int, what: str) -> None:
        self.place_bytes = place_bytes
        self.count = size_bytes // place_bytes
        if self.count < 2:
            raise ConfigError(
                f"hf3fs_iov_size: {size_bytes} bytes hold {self.count} {what} of {place_bytes} bytes; at least 2 are needed"
            )
        self._arena = Arena(ArenaSettings(size_bytes=size_bytes, shm_name=f"iov-{os.getpid()}-{uuid.uuid4().hex}"))
        assert self._arena.shm_path is not None
        self.registered = RegisteredMemory(self._arena.shm_path.name, self._arena.memory)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for place in range(self.count - 1, -1, -1):
            self._free.put_nowait(place)

    async def take(self, patience_s: float) -> int:
        """A free place. Raises TierUnavailable when there is none for so long: transfers that hang have them all."""
        if not self._free.empty():
            return self._free.get_nowait()
        try:
            async with asyncio.timeout(patience_s):
                return await self._free.get()
        except TimeoutError:
            raise TierUnavailable(f"no transfer buffer was free for {patience_s:.1f} s") from None

    def give_back(self, place: int) -> None:
        self._free.put_nowait(place)

    def view(self, place: int) -> np.ndarray:
        """Empty when the buffers were closed meanwhile."""
        start = place * self.place_bytes
        return self.registered.memory[start : start + self.place_bytes]

    def piece(self, place: int, start: int, length_bytes: int) -> Piece:
        return self.registered, place * self.place_bytes + start, length_bytes

    def close(self) -> None:
        """Blocks while the mount hangs."""
        self.registered.release()
        self._arena.close()


def copy_with_checksum(source: np.ndarray, target: np.ndarray) -> int:
    """As `payload_checksum(source)`, copied on the way: each block is read once from memory and once from the cache."""
    digest = xxhash.xxh3_64()
    for start in range(0, source.nbytes, _BLOCK_BYTES):
        block = source[start : start + _BLOCK_BYTES]
        digest.update(block.data)
        np.copyto(target[start : start + block.nbytes], block)
    return digest.intdigest()


def transfer_bytes(chunk_bytes: int) -> int:
    """Of a whole chunk file."""
    return HEADER_BYTES + aligned(chunk_bytes)


def registered_arena(arena: Arena) -> RegisteredMemory | None:
    """The arena, to be registered; None where it does not lie in shared memory."""
    if arena.shm_path is None or arena.shm_path.parent != SHM_DIRECTORY or not os.path.exists(arena.shm_path):
        return None
    return RegisteredMemory(arena.shm_path.name, arena.memory, arena.is_ours_alone)
