"""`ioring`: a queue of reads or of writes in shared memory, served by the daemon."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
import uuid
import warnings
from collections import deque
from datetime import timedelta

from tests.hf3fs_emulator.client.buffers import iovec
from tests.hf3fs_emulator.client.descriptors import registered
from tests.hf3fs_emulator.client.threads import OneThread
from tests.hf3fs_emulator.ring_memory import Arguments, RingMemory
from tests.hf3fs_emulator.semaphores import NamedSemaphore
from tests.hf3fs_emulator.wire import SHARED_MEMORY, VIRTUAL_DIRECTORY, Registration, RingTraits, ring_bytes

_WAKES_S = 0.001
"""How often a waiting thread looks by itself: a completion without a wake-up costs no more than this."""


class ioring:
    """One direction, one thread that prepares and submits, one that waits; they may be two. Else RuntimeError is raised.

    `priority`, `timeout` and `flags` have no effect. The time-out of `wait` is in s.
    """

    def __init__(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> None:
        self._memory: RingMemory | None = None
        self._submitted: NamedSemaphore | None = None
        if not hf3fs_mount_point or entries <= 0 or (timeout or 0) < 0:
            raise OSError(errno.EINVAL, f"entries {entries}, timeout {timeout}: expected entries > 0 and timeout >= 0")
        traits = RingTraits(for_read, io_depth)
        self._link, memory = _register(hf3fs_mount_point, traits, entries)
        self._traits = traits
        self._free = deque(range(entries))
        self._in_flight: list[tuple[iovec, object] | None] = [None] * entries
        self._memory = RingMemory(memory)
        self._submitted = NamedSemaphore(_submit_semaphore(hf3fs_mount_point), create=False)
        self._submitter = OneThread("only one thread may prepare and submit a ring")
        self._waiter = OneThread("only one thread may wait on a ring")

    @staticmethod
    def size_for_entries(entries: int) -> int:
        """Bytes of shared memory."""
        return ring_bytes(entries)

    @property
    def entries(self) -> int:
        return self._open().entries

    def prepare(self, iov: iovec, read: bool, fd: int, off: int, userdata: object = None) -> ioring:
        """Queue a transfer of the whole of `iov`. It may run before `submit`.

        Raises OSError: EINVAL for the wrong direction, an empty piece or one out of range, EBADF when `fd` is not
        registered, EACCES when it is not open for this, EAGAIN when the ring is full. A slot is free again when its
        completion was waited for and all operations before it have ended.
        """
        self._submitter.check()
        if not isinstance(iov, iovec):
            raise TypeError(f"prepare takes an iovec, found {type(iov).__name__}")
        if off < 0:
            raise TypeError(f"off: expected an unsigned number, found {off}")
        if userdata is not None:
            warnings.warn(
                "userdata: the real wait() counts its references without the GIL; leave it out and match on the slice",
                RuntimeWarning,
                stacklevel=2,
            )
        memory = self._open()
        if read != self._traits.for_read or iov._size == 0:
            raise OSError(errno.EINVAL, f"read={read} of {iov._size} bytes, in a ring for_read={self._traits.for_read}")
        if not 0 <= iov.base_off <= iov.base._size - iov._size:
            raise OSError(errno.EINVAL, f"{iov._size} bytes from {iov.base_off} on are out of the buffer's range")
        file = registered(fd)
        if file is None:
            raise OSError(errno.EBADF, f"descriptor {fd} is not registered")
        if file.access == (os.O_WRONLY if read else os.O_RDONLY):
            raise OSError(errno.EACCES, f"descriptor {fd} is not open for {'reading' if read else 'writing'}")
        if iov._in_flight:
            raise RuntimeError("this slice object has an operation in flight: its result would be lost")
        if not self._free:
            raise OSError(errno.EAGAIN, f"all {memory.entries} entries are in use; wait for completions")
        index = self._free.popleft()
        iov._in_flight = True
        self._in_flight[index] = (iov, userdata)
        if not memory.submit(index, Arguments(iov._id, iov.base_off, file.inode, off, iov._size)):
            # The daemon gives submissions back in order, so one that is slow holds back all that came after it.
            iov._in_flight = False
            self._in_flight[index] = None
            self._free.append(index)
            raise OSError(errno.EAGAIN, "an early operation has not ended and holds back the room of later ones")
        return self

    def submit(self) -> ioring:
        """Tell the daemon that there is work."""
        self._submitter.check()
        self._open()
        self._wake_daemon()
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | float | None = None
    ) -> list[iovec]:
        """Slices whose operations have ended, in any order; their `result` is set.

        Returns when there are `min_results` and no more are at hand, or when there are `max_results` (the larger of both
        counts; at least one), or after `timeout`, with fewer, perhaps none. Without a time-out it waits for ever when the
        daemon has died. Releases the GIL.
        """
        self._waiter.check()
        deadline_s = None if timeout is None else time.monotonic() + _seconds(timeout)
        wanted = max(max_results, min_results)
        out: list[iovec] = []
        while True:
            # With enough at hand it only collects, whatever the time-out says.
            until_s = deadline_s if len(out) < min_results else 0.0
            found = self._collect(max(wanted, 1), min_results - len(out), until_s)
            out.extend(found)
            if not found or len(out) >= wanted:
                return out

    def destroy(self) -> None:
        """Take the ring away; also done when it is collected. The ring is of no use any more."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if self._submitted is not None:
            self._submitted.close()
        memory.close()
        for entry in filter(None, self._in_flight):
            entry[0]._in_flight = False
        with contextlib.suppress(OSError):  # upstream does not look either
            os.unlink(self._link)

    def __del__(self) -> None:
        self.destroy()

    def _collect(self, capacity: int, minimum: int, until_s: float | None) -> list[iovec]:
        memory = self._open()
        found: list[iovec] = []
        while len(found) < capacity:
            taken = memory.take_completion()
            if taken is not None:
                while taken is not None:
                    found.append(self._completed(*taken))
                    taken = memory.take_completion() if len(found) < capacity else None
                self._wake_daemon()  # it may have had no room for more results
                continue
            if len(found) >= minimum or (until_s is not None and time.monotonic() >= until_s):
                break
            memory.completed.wait(_WAKES_S)
        return found

    def _completed(self, index: int, result: int) -> iovec:
        entry = self._in_flight[index]
        if entry is None:
            raise AssertionError(f"completion {index} came twice")
        self._in_flight[index] = None
        iov, userdata = entry
        iov._userdata = userdata
        iov._result = result
        iov._in_flight = False
        self._free.append(index)
        return iov

    def _wake_daemon(self) -> None:
        assert self._submitted is not None
        self._submitted.post()

    def _open(self) -> RingMemory:
        if self._memory is None:
            raise OSError(errno.EINVAL, "the ring was destroyed")
        return self._memory


def _register(mount_point: str, traits: RingTraits, entries: int) -> tuple[str, mmap.mmap]:
    identity = uuid.uuid4()
    target = f"{SHARED_MEMORY}/hf3fs-iov-{os.getpid()}-{identity}"
    link = f"{mount_point}/{VIRTUAL_DIRECTORY}/iovs/{Registration(identity.bytes, ring=traits).name()}"
    size_bytes = ring_bytes(entries)
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, size_bytes)
        memory = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        os.symlink(target, link)
        return link, memory
    finally:
        os.close(descriptor)
        os.unlink(target)  # the daemon has mapped it: nothing stays behind, however this process ends


def _submit_semaphore(mount_point: str) -> str:
    target = os.readlink(f"{mount_point}/{VIRTUAL_DIRECTORY}/iovs/submit-ios")
    prefix = f"{SHARED_MEMORY}/sem."
    if not target.startswith(prefix):
        raise OSError(errno.EIO, f"invalid submit semaphore {target!r}")
    return target.removeprefix(prefix)


def _seconds(timeout: timedelta | float) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if not isinstance(timeout, float):
        raise TypeError(f"timeout: expected a timedelta or a float of seconds, found {type(timeout).__name__}")
    return timeout
