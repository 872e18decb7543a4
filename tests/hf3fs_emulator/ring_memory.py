"""A ring in shared memory, as its client and its daemon both see it.

Each of the four markers has one writer: the client moves the submission head and the completion tail, the daemon the others.
What a marker announces is written before it, and read after it. x86-64 keeps that order by itself: stores are seen in the
order in which they were made, and loads are made in theirs. Elsewhere `_fence` sees to it.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from typing import NamedTuple

from tests.hf3fs_emulator.semaphores import Semaphore
from tests.hf3fs_emulator.wire import (
    ARGUMENTS,
    COMPLETION,
    MARKER_BYTES,
    SEMAPHORE_BYTES,
    SUBMISSION,
    entries_in,
)

_SUBMISSION_HEAD, _SUBMISSION_TAIL, _COMPLETION_HEAD, _COMPLETION_TAIL = range(4)


class Arguments(NamedTuple):
    buffer_id: bytes
    buffer_offset: int
    inode: int
    file_offset: int
    length: int
    userdata: int = 0


def _make_fence() -> Callable[[], object]:
    if platform.machine() in ("x86_64", "AMD64"):
        return lambda: None
    # A release and an acquire on one semaphore, which keep what is before them from passing what is after.
    memory = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    semaphore = Semaphore(ctypes.addressof(memory))
    semaphore.initialise()

    def fence(_keep: object = memory) -> None:
        semaphore.post()
        semaphore.try_wait()

    return fence


_fence = _make_fence()


class RingMemory:
    def __init__(self, memory: mmap.mmap) -> None:
        size_bytes = len(memory)
        self.entries = entries_in(size_bytes)
        if self.entries <= 0:
            raise ValueError(f"{size_bytes} bytes are too few for a ring")
        self.slots = self.entries + 1
        self._memory = memory
        self._view = memoryview(memory)
        self._markers = self._view[:MARKER_BYTES].cast("i")
        self._completions = MARKER_BYTES + self.slots * ARGUMENTS.size
        self._submissions = self._completions + self.slots * COMPLETION.size
        semaphore_at = self._submissions + self.slots * SUBMISSION.size
        self._anchor = (ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, semaphore_at)
        self.completed = Semaphore(ctypes.addressof(self._anchor))

    def close(self) -> None:
        """Unmap. For the side that knows that nobody uses the ring any more; else leave it to the last reference."""
        self.completed = Semaphore(0)
        del self._anchor
        self._markers.release()
        self._view.release()
        self._memory.close()

    def arguments(self, index: int) -> Arguments:
        return Arguments(*ARGUMENTS.unpack_from(self._view, MARKER_BYTES + index * ARGUMENTS.size))

    def submit(self, index: int, arguments: Arguments) -> bool:
        """Client: publish an operation; False when there is no room."""
        head = self._markers[_SUBMISSION_HEAD]
        following = (head + 1) % self.slots
        if following == self._markers[_SUBMISSION_TAIL]:
            return False
        ARGUMENTS.pack_into(self._view, MARKER_BYTES + index * ARGUMENTS.size, *arguments)
        SUBMISSION.pack_into(self._view, self._submissions + head * SUBMISSION.size, index, arguments.userdata)
        _fence()
        self._markers[_SUBMISSION_HEAD] = following
        return True

    def submitted_after(self, tail: int) -> int:
        """Daemon: operations published and not claimed, when claims have come to `tail`."""
        count = (self._markers[_SUBMISSION_HEAD] - tail) % self.slots
        _fence()
        return count

    def submission(self, position: int) -> tuple[int, int]:
        """Daemon: (index, userdata) of a published operation."""
        at = self._submissions + position % self.slots * SUBMISSION.size
        index, userdata = SUBMISSION.unpack_from(self._view, at)
        return index, userdata

    def consume(self, tail: int) -> None:
        """Daemon: the submissions before `tail` may be overwritten."""
        self._markers[_SUBMISSION_TAIL] = tail

    def complete(self, index: int, result: int, userdata: int) -> None:
        """Daemon: publish a result. There is always room: no more is claimed than fits. One caller at a time."""
        head = self._markers[_COMPLETION_HEAD]
        following = (head + 1) % self.slots
        assert following != self._markers[_COMPLETION_TAIL], "claimed more than the ring can report"
        COMPLETION.pack_into(self._view, self._completions + head * COMPLETION.size, index, 0, result, userdata)
        _fence()
        self._markers[_COMPLETION_HEAD] = following

    def completions(self) -> int:
        """Either side: results published and not taken."""
        return (self._markers[_COMPLETION_HEAD] - self._markers[_COMPLETION_TAIL]) % self.slots

    def take_completion(self) -> tuple[int, int] | None:
        """Client: (index, result) of the oldest result; None when there is none. One caller at a time."""
        tail = self._markers[_COMPLETION_TAIL]
        if tail == self._markers[_COMPLETION_HEAD]:
            return None
        _fence()
        index, _, result, _ = COMPLETION.unpack_from(self._view, self._completions + tail * COMPLETION.size)
        _fence()
        self._markers[_COMPLETION_TAIL] = (tail + 1) % self.slots
        return index, result
