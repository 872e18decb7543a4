"""Serves the rings: one watcher per priority claims operations, a pool of workers moves the bytes.

A worker reads from the file straight into the client's shared memory, and writes from it, in system calls that release the
GIL. So the threads run in parallel, and the only copy is the kernel's, between the page cache and the buffer.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
import uuid
from queue import SimpleQueue

from tests.hf3fs_emulator.daemon.buffers import Buffer, Buffers
from tests.hf3fs_emulator.daemon.faults import Fault, Faults
from tests.hf3fs_emulator.daemon.files import KnownFile, KnownFiles
from tests.hf3fs_emulator.daemon.later import Later
from tests.hf3fs_emulator.daemon.served_ring import Batch
from tests.hf3fs_emulator.semaphores import NamedSemaphore
from tests.hf3fs_emulator.wire import SEMAPHORE_LINKS

logger = logging.getLogger("tiercache.hf3fs.emulator")

_PASSED_ON = {errno.EINVAL, errno.EBADF, errno.EROFS, errno.ENOSPC, errno.EREMOTEIO}
"""All else is EIO to a client."""
_WATCHER_WAKES_S = 1.0
_THREADS = min(4, os.cpu_count() or 4)
"""More than there are CPUs only fight for the GIL."""

_Work = tuple[Batch, int, Buffer | None, Fault | None]
"""A batch, which of its operations, the memory for it, and what goes wrong."""


class Engine:
    def __init__(self, files: KnownFiles, buffers: Buffers, faults: Faults) -> None:
        self._files = files
        self._buffers = buffers
        self._faults = faults
        self._later = Later("late-transfers")
        # With whose they are in the name: who finds some can tell what they are left from.
        names = [f"hf3fs-submit-ios.{os.getppid()}.{uuid.uuid4()}" for _ in SEMAPHORE_LINKS]
        self.semaphores = [NamedSemaphore(name, create=True) for name in names]
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._stopping = False
        self._workers = [threading.Thread(target=self._run, name=f"worker-{number}") for number in range(_THREADS)]
        self._watchers = [
            threading.Thread(target=self._watch, args=(priority,), name=f"watcher-{priority}")
            for priority in range(len(self.semaphores))
        ]
        self._count_lock = threading.Lock()
        self.operations = 0

    def start(self) -> None:
        for thread in self._workers + self._watchers:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        self._stopping = True
        for semaphore in self.semaphores:
            semaphore.post()
        for thread in self._watchers:
            thread.join()
        for _ in self._workers:
            self._work.put(None)
        for thread in self._workers:
            thread.join()
        for semaphore in self.semaphores:
            semaphore.close()
            semaphore.unlink()

    def _watch(self, priority: int) -> None:
        semaphore = self.semaphores[priority]
        while not self._stopping:
            if not semaphore.wait(_WATCHER_WAKES_S):
                continue  # as upstream does: time alone issues nothing
            while self._issue(priority):
                pass

    def _issue(self, priority: int) -> bool:
        """Dispatch what rings hold; whether there was any. Apart from `_watch`, whose variables would keep a ring mapped."""
        claimed = False
        for ring in self._buffers.rings(priority):
            for batch in ring.claim():
                claimed = True
                self._dispatch(batch)
        return claimed

    def _dispatch(self, batch: Batch) -> None:
        for position in range(len(batch.submissions)):
            for_read = batch.ring.traits.for_read
            arguments = batch.ring.memory.arguments(batch.submissions[position][0])
            # Looked up now, as 3FS does: however long an operation takes, it keeps its memory mapped and may write to it.
            item = (batch, position, self._buffers.find(arguments.buffer_id), self._faults.next(for_read))
            if not self._faults.parks(functools.partial(self._work.put, item)):
                self._work.put(item)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._serve(*item)
            del item  # an idle worker keeps no ring mapped

    def _serve(self, batch: Batch, position: int, buffer: Buffer | None, fault: Fault | None) -> None:
        if fault is not None and fault.action == "delay":
            # Not slept away in a worker: other operations are not to wait for this one.
            again = functools.partial(self._work.put, (batch, position, buffer, None))
            self._later.at(time.monotonic() + fault.value, again)
            return
        if fault is not None and fault.action == "hold":
            self._faults.hold(functools.partial(self._work.put, (batch, position, buffer, None)))
            return
        result: int | None
        try:
            result = self._transfer(batch, position, buffer, fault)
        except OSError as error:
            result = -(error.errno if error.errno in _PASSED_ON else errno.EIO)
        except Exception:
            logger.exception("operation %d of a batch failed", position)
            result = -errno.EIO
        self._finish(batch, position, result)

    def _finish(self, batch: Batch, position: int, result: int | None) -> None:
        with self._count_lock:
            self.operations += 1
        if batch.done(position, result):
            batch.ring.finish(batch)
            # Requests that came meanwhile run without another submission.
            for following in batch.ring.claim(1):
                self._dispatch(following)

    def _transfer(self, batch: Batch, position: int, buffer: Buffer | None, fault: Fault | None) -> int | None:
        """Bytes moved or -errno; None for a completion that is to be lost."""
        arguments = batch.ring.memory.arguments(batch.submissions[position][0])
        if fault is not None and fault.action == "errno":
            raise OSError(int(fault.value), "a fault was asked for")
        known = self._files.find(arguments.inode)
        if known is None:
            return -errno.EBADF
        piece = None if buffer is None else buffer.piece(arguments.buffer_offset, arguments.length)
        if piece is None:
            return -errno.EINVAL
        if fault is not None and fault.action == "short":
            piece = piece[: int(fault.value)]
        if batch.ring.traits.for_read:
            moved = _read(known, piece, arguments.file_offset)
        else:
            self._files.will_write(known, arguments.file_offset + len(piece))
            moved = _write(known, piece, arguments.file_offset)
        return None if fault is not None and fault.action == "lose" else moved


def _read(known: KnownFile, piece: memoryview, offset: int) -> int:
    moved = 0
    while moved < len(piece) and (got := os.preadv(known.descriptor, [piece[moved:]], offset + moved)):
        moved += got
    return moved


def _write(known: KnownFile, piece: memoryview, offset: int) -> int:
    if not known.writable:
        return -errno.EROFS
    moved = 0
    while moved < len(piece):
        moved += os.pwritev(known.descriptor, [piece[moved:]], offset + moved)
    return moved
