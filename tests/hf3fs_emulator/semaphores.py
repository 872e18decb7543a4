"""POSIX semaphores in shared memory, over ctypes: libc's own, since the two sides of a ring share the bytes of a `sem_t`."""

from __future__ import annotations

import ctypes
import errno
import os
import time

_blocking = ctypes.CDLL(None, use_errno=True)
# Posting never blocks, so it keeps the GIL: giving it away and taking it back costs more than the call.
_immediate = ctypes.PyDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_immediate.sem_open.restype = ctypes.c_void_p
for _function in (_immediate.sem_post, _immediate.sem_trywait, _immediate.sem_close):
    _function.argtypes = [ctypes.c_void_p]
_immediate.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_immediate.sem_unlink.argtypes = [ctypes.c_char_p]
_blocking.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]


class Semaphore:
    """A semaphore at an address. The memory is the caller's and must outlive it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def initialise(self) -> None:
        """Make it a process-shared semaphore of value 0."""
        _check(_immediate.sem_init(self.address, 1, 0))

    def post(self) -> None:
        _check(_immediate.sem_post(self.address))

    def wait(self, timeout_s: float) -> bool:
        """Take one; False after `timeout_s`, and when a signal came. Releases the GIL."""
        until = time.time() + timeout_s
        moment = _Timespec(int(until), int(until % 1 * 1e9))
        if _blocking.sem_timedwait(self.address, ctypes.byref(moment)) == 0:
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(ctypes.get_errno(), f"sem_timedwait: {os.strerror(ctypes.get_errno())}")

    def try_wait(self) -> bool:
        """Take one if there is one."""
        return bool(_immediate.sem_trywait(self.address) == 0)


class NamedSemaphore(Semaphore):
    """`/dev/shm/sem.<name>`. The daemon creates it and unlinks it, clients open it."""

    def __init__(self, name: str, *, create: bool) -> None:
        self.name = name
        self._path = f"/{name}".encode()
        address = _immediate.sem_open(self._path, os.O_CREAT | os.O_EXCL if create else 0, 0o666, 0)
        if not address:
            raise OSError(ctypes.get_errno(), f"sem_open: {os.strerror(ctypes.get_errno())}", name)
        super().__init__(address)
        if create:
            os.chmod(f"/dev/shm/sem.{name}", 0o666)  # the umask must not keep other users' clients out

    def close(self) -> None:
        if self.address:
            _immediate.sem_close(self.address)
            self.address = 0

    def unlink(self) -> None:
        _immediate.sem_unlink(self._path)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
