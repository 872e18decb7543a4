"""One ring of 3FS, in one direction, kept full: a thread that prepares and submits, and a thread that waits.

Both are daemon threads and look every tenth of a second whether the ring is to end, so a daemon that died or hangs keeps
neither of them.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from tiercache.tiers.hf3fs.segments import Piece

_LOOK_S = 0.1
_PAUSE_S = 0.001


@dataclass(eq=False)
class Transfer:
    """Pieces of one file that are moved together. Its future has the bytes moved by each piece, or an OSError."""

    descriptor: int
    pieces: list[tuple[Piece, int]]
    """With the offset in the file."""
    future: asyncio.Future[list[int]]
    began_s: float = 0.0
    results: list[int] = field(default_factory=list)
    missing: int = 0
    error: BaseException | None = None


@dataclass(eq=False)
class _Operation:
    transfer: Transfer
    number: int
    """Of the piece; -1 for padding of a batch, whose result is nobody's."""


class Ring:
    """`submit` belongs to the event loop; `settled` is called on it, with transfers that have ended, in batches."""

    def __init__(
        self,
        library: Any,
        mount: str,
        *,
        read: bool,
        entries: int,
        io_depth: int,
        numa: int,
        loop: asyncio.AbstractEventLoop,
        settled: Callable[[list[Transfer]], None],
        name: str,
    ) -> None:
        self._ring = library.make_ioring(mount, entries, read, io_depth, None, None, numa)
        self._read = read
        self._exact = io_depth if io_depth > 1 else 0
        self._loop = loop
        self._settled = settled
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._entries = entries
        self._state = threading.Condition()
        self._in_flight: dict[int, tuple[Any, _Operation]] = {}
        self._closed = False
        self._done: deque[Transfer] = deque()
        self._wake_pending = False
        self.unfinished: dict[Transfer, None] = {}
        """Transfers that were submitted and have not been settled, the oldest first. The loop's."""
        self._threads = [
            threading.Thread(target=self._submit_all, name=f"tiercache-{name}-submit", daemon=True),
            threading.Thread(target=self._reap_all, name=f"tiercache-{name}-reap", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> None:
        transfer.began_s = self._loop.time()
        transfer.results = [0] * len(transfer.pieces)
        transfer.missing = len(transfer.pieces)
        self.unfinished[transfer] = None
        self._queue.put(transfer)

    def close(self) -> list[Transfer]:
        """Stop both threads and give the ring back. Returns what had not ended; their memory is the daemon's still, unless
        it is dead. Belongs to the loop; does not wait for the threads (`join` does)."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._queue.put(None)
        left, self.unfinished = list(self.unfinished), {}
        return left

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; whether they ended. For a worker thread."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._ring = None
        return ended

    # The submitting thread

    def _submit_all(self) -> None:
        while (transfer := self._queue.get()) is not None:
            prepared = 0
            while True:
                for number in range(len(transfer.pieces)):
                    prepared += self._prepare(_Operation(transfer, number))
                if prepared >= self._entries // 2:
                    break
                try:
                    following = self._queue.get_nowait()
                except Empty:
                    break
                if following is None:
                    self._queue.put(None)
                    break
                transfer = following
            if self._exact:
                # The ring issues whole batches only: what is missing is the last header page once more.
                for _ in range(-prepared % self._exact):
                    with self._state:
                        transfer.missing += 1
                    self._prepare(_Operation(transfer, -1))
            self._ring.submit()

    def _prepare(self, operation: _Operation) -> bool:
        """Into the ring as soon as it has room. Whatever else it says is the piece's result."""
        transfer = operation.transfer
        (segment, start, length), offset = transfer.pieces[max(0, operation.number)]
        if operation.number < 0:
            length = min(length, 4096)
        while not self._closed:
            with self._state:
                if not self._state.wait_for(lambda: len(self._in_flight) < self._entries or self._closed, _LOOK_S):
                    continue
            piece = segment.iov[start : start + length]
            with self._state:
                self._in_flight[id(piece)] = (piece, operation)  # known before it can come back
            try:
                self._ring.prepare(piece, self._read, transfer.descriptor, offset)
            except OSError as error:
                with self._state:
                    del self._in_flight[id(piece)]
                if error.errno != errno.EAGAIN:
                    self._completed([(operation, -(error.errno or errno.EIO))])
                    return False
                # An early operation holds back the room of those behind it, some of which may not have been submitted.
                self._ring.submit()
                with self._state:
                    self._state.wait(_PAUSE_S)
                continue
            with self._state:
                self._state.notify_all()
            return True
        return False

    # The reaping thread

    def _reap_all(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._in_flight or self._closed)
                if self._closed:
                    return
            done = self._ring.wait(max_results=self._entries, min_results=1, timeout=_LOOK_S)
            ended = []
            with self._state:
                for piece in done:
                    _, operation = self._in_flight.pop(id(piece))
                    ended.append((operation, piece.result))
                if done:
                    self._state.notify_all()
            if ended:
                self._completed(ended)

    def _completed(self, ended: list[tuple[_Operation, int]]) -> None:
        """Count pieces; a transfer whose pieces have all ended goes to the loop. Either thread may come here."""
        whole = []
        with self._state:
            for operation, result in ended:
                transfer = operation.transfer
                if operation.number >= 0:
                    transfer.results[operation.number] = result
                    if result < 0 and transfer.error is None:
                        transfer.error = OSError(-result, os.strerror(-result))
                transfer.missing -= 1
                if not transfer.missing:
                    whole.append(transfer)
            if not whole:
                return
            self._done.extend(whole)
            if self._wake_pending:
                return
            self._wake_pending = True
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            return  # the loop is closed

    def _settle(self) -> None:
        with self._state:
            self._wake_pending = False
            transfers = list(self._done)
            self._done.clear()
        transfers = [transfer for transfer in transfers if self.unfinished.pop(transfer, self) is None]
        if transfers:
            self._settled(transfers)


def in_parts(piece: Piece, offset: int, part_bytes: int) -> list[tuple[Piece, int]]:
    """A piece cut where its place in the segment is a multiple of `part_bytes`, for several requests at once."""
    segment, start, length = piece
    boundaries = range((start // part_bytes + 1) * part_bytes, start + length, part_bytes)
    cuts = itertools.pairwise([start, *boundaries, start + length])
    return [((segment, begin, end - begin), offset + begin - start) for begin, end in cuts]
