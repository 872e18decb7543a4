"""A single mapping for all payloads: anonymous with transparent huge pages, hugetlb, or POSIX shared memory.

It is allocated once and every page is touched at start, so that no put or read causes a page fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache.errors import ConfigError

logger = logging.getLogger("tiercache.memory")

HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000
_MADV_POPULATE_WRITE = 23
SHM_DIRECTORY = Path("/dev/shm")
_SHM_PREFIX = "tiercache."
_CLAIM_TRIES, _CLAIM_PAUSE_S = 10, 0.01
"""Tries and pause in seconds for a name: starts lock files for a moment as they look for those of dead processes."""
_PREFAULT_STEP_BYTES = 64 << 20


@dataclass(frozen=True)
class ArenaSettings:
    size_bytes: int
    hugepages: bool = False
    shm_name: str | None = None
    numa_node: int | None = None


class Arena:
    """A page-aligned, pre-faulted run of memory. `kind` is "thp", "hugetlb" or "shm".

    Its mapping lives as long as any view of `memory`, also after `close`: a thread that hangs with a slot keeps it.
    """

    def __init__(self, settings: ArenaSettings) -> None:
        """Block until every page is touched. Raises ConfigError."""
        self.size_bytes = whole_pages(settings.size_bytes)
        self.shm_path: Path | None = None
        self._shm_file = -1
        self._not_closed: weakref.finalize[..., Arena] | None = None
        self.memory = np.empty(0, dtype=np.uint8)
        self.pinned = False
        """True once a device, a ring or a network card holds the addresses of the pages: they are not returned then."""
        self.lent = False
        """True while another process may still write to the memory for a tier that was detached."""
        try:
            if settings.shm_name:
                self._map_shared(settings.shm_name)
            elif not (settings.hugepages and self._map_hugetlb()):
                self._map_anonymous()
            self.memory = np.frombuffer(self._mapping, dtype=np.uint8)
            if settings.numa_node is not None:
                self._prefer_node(settings.numa_node)
            offset = -self.address % HUGE_PAGE_BYTES if self.kind == "thp" else 0
            self.memory = self.memory[offset : offset + self.size_bytes]
            self.populate([range(self.size_bytes)])
        except (OSError, MemoryError, OverflowError) as error:
            self.close()
            raise ConfigError(self._refused(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def is_ours_alone(self) -> bool:
        """Return True if no other process of this host has the shared memory open or mapped, so that none can write to
        it.

        The kernel grants a write lease only then; the lease is released at once.
        """
        if self._shm_file < 0:
            return True
        # An open in between sends a signal. The default signal would end the process; SIGURG is ignored.
        fcntl.fcntl(self._shm_file, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(self._shm_file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        fcntl.fcntl(self._shm_file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def close(self) -> None:
        """Release the name and this reference to the memory. Views keep the mapping alive until they end. Idempotent."""
        if self._not_closed is not None:
            self._not_closed.detach()
        self.memory = np.empty(0, dtype=np.uint8)
        mapping = self.__dict__.pop("_mapping", None)
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:
                logger.debug("arena: views are still held; the mapping goes when they do")
        if self.shm_path is not None:
            _unlink_own(self.shm_path, self._shm_file)
            self.shm_path = None
        if self._shm_file >= 0:
            os.close(self._shm_file)
            self._shm_file = -1

    def _refused(self, error: Exception) -> str:
        """Return the message for memory that the system refuses."""
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return (
            f"max_local_cpu_size: {self.size_bytes / 2**30:.2f} GB of memory cannot be reserved ({reason}); there are "
            f"{free_bytes / 2**30:.2f} GB free. Lower it, or raise what this process may have (ulimit -v, the container's "
            "memory)"
        )

    def _map_anonymous(self) -> None:
        self.kind = "thp"
        # Map another huge page, since the kernel uses huge pages only at addresses aligned to them.
        self._mapping = mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def _map_hugetlb(self) -> bool:
        try:
            self._mapping = mmap.mmap(
                -1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
            )
        except OSError as error:
            logger.warning(
                "local_cpu_use_hugepages: %d huge pages of 2 MiB cannot be reserved (%s); using normal pages with "
                "transparent huge pages. Reserve them with: sysctl vm.nr_hugepages=%d",
                self.size_bytes // HUGE_PAGE_BYTES,
                error.strerror,
                self.size_bytes // HUGE_PAGE_BYTES,
            )
            return False
        self.kind = "hugetlb"
        return True

    def _map_shared(self, name: str) -> None:
        """Map a new file `/dev/shm/tiercache.<name>`, which stays locked while it is open.

        A file of this user without a lock was left by a dead process, and is removed. Raises ConfigError if the name is
        taken otherwise.
        """
        path = SHM_DIRECTORY / f"{_SHM_PREFIX}{name.strip('/')}"
        descriptor = _claimed(path)
        try:
            free = os.statvfs(SHM_DIRECTORY)
            if free.f_bavail * free.f_frsize < self.size_bytes:
                raise ConfigError(
                    f"shm_name: {SHM_DIRECTORY} has {free.f_bavail * free.f_frsize / 2**30:.2f} GB free, the arena needs "
                    f"{self.size_bytes / 2**30:.2f}; lower max_local_cpu_size or enlarge {SHM_DIRECTORY}"
                )
            os.ftruncate(descriptor, self.size_bytes)
            self._mapping = mmap.mmap(descriptor, self.size_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            _unlink_own(path, descriptor)
            os.close(descriptor)
            raise
        self.kind = "shm"
        self.shm_path = path
        self._shm_file = descriptor
        self._not_closed = weakref.finalize(self, _give_back, path, descriptor, os.getpid())

    def _prefer_node(self, node: int) -> None:
        """Prefer pages from `node` while it has any: mbind(MPOL_PREFERRED)."""
        libc = ctypes.CDLL(None, use_errno=True)
        mask = ctypes.c_ulong(1 << node)
        system_call_mbind = 237
        failed = libc.syscall(
            system_call_mbind,
            ctypes.c_void_p(self.address),
            ctypes.c_ulong(self.size_bytes),
            1,
            ctypes.byref(mask),
            ctypes.c_ulong(64),
            0,
        )
        if failed:
            logger.warning("numa_mode: node %d could not be preferred: %s", node, os.strerror(ctypes.get_errno()))

    def populate(self, places: Sequence[range]) -> None:
        """Touch every page of the bytes `places`, which are not in use. Blocks. Raises OSError if there is no memory.

        Uses a thread for each usable CPU, at most 16.
        """
        # A list of views would keep the memory alive after an error.
        steps = [
            place[start : start + _PREFAULT_STEP_BYTES]
            for place in places
            for start in range(0, len(place), _PREFAULT_STEP_BYTES)
        ]
        threads = min(16, len(os.sched_getaffinity(0)))
        failures: list[OSError] = []
        began_s, size_gb = time.monotonic(), sum(map(len, places)) / 2**30
        logger.info("arena: touching %.2f GB of %s memory", size_gb, self.kind)

        def run() -> None:
            while not failures:
                try:
                    step = steps.pop()
                except IndexError:
                    return
                part = self.memory[step.start : step.stop]
                try:
                    if not _populate(part):
                        part[:: mmap.PAGESIZE] = 0
                except OSError as error:
                    # Drop the frames, which keep the memory alive and are kept by this list.
                    failures.append(error.with_traceback(None))

        helpers: list[threading.Thread] = []
        for _ in range(min(threads, len(steps)) - 1):
            helper = threading.Thread(target=run, daemon=True)
            try:
                helper.start()
            except RuntimeError:
                break  # continue with fewer threads
            helpers.append(helper)
        run()
        for helper in helpers:
            helper.join()
        if failures:
            raise failures[0]
        logger.info("arena: %.2f GB of %s memory in %.1f s", size_gb, self.kind, time.monotonic() - began_s)

    def give_up(self, places: Sequence[range]) -> None:
        """Return the pages of the bytes `places`, which are not in use, to the system, except those of a pinned arena.

        Blocks. `populate` brings pages back; until then the memory must not be used.
        """
        if self.pinned:
            return
        advice = mmap.MADV_REMOVE if self.kind == "shm" else mmap.MADV_DONTNEED
        page_bytes = HUGE_PAGE_BYTES if self.kind == "hugetlb" else mmap.PAGESIZE
        for place in places:
            part = self.memory[place.start : place.stop]
            start = -part.ctypes.data % page_bytes
            whole = part[start : start + max(0, part.nbytes - start) // page_bytes * page_bytes]
            if whole.nbytes and (code := _madvise(whole, advice)):
                logger.warning("arena: memory that is not used any more stays: %s", os.strerror(code))


def whole_pages(size_bytes: int) -> int:
    """Return the size of an arena for `size_bytes`: whole huge pages."""
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _give_back(path: Path, descriptor: int, process: int) -> None:
    """Remove the file of an unclosed arena when it is collected or the process exits, except in a forked child."""
    with contextlib.suppress(OSError):  # the descriptor belongs to the parent of a forked process
        if os.getpid() == process and _unlink_own(path, descriptor):
            logger.warning("shm_name: the cache was not closed; removed %s", path)
        os.close(descriptor)


def _unlink_own(path: Path, descriptor: int) -> bool:
    """Remove `path` if it is still the file that is open as `descriptor`; return True if it was."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            path.unlink()
            return True
    return False


def _claimed(path: Path) -> int:
    """Create the file `path` and lock it, again if a sweep removes it before. Raises ConfigError if the name is taken."""
    for _ in range(_CLAIM_TRIES):
        _sweep_dead_arenas()
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            os.close(descriptor)
        time.sleep(_CLAIM_PAUSE_S)
    raise ConfigError(
        f"shm_name: {path} is in use by a living process, or is no file that only user {os.geteuid()} may write; choose "
        "another name, or remove it"
    )


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _sweep_dead_arenas() -> None:
    """Remove arenas of dead processes of this user, whose lock is free."""
    for path in SHM_DIRECTORY.glob(f"{_SHM_PREFIX}*"):
        try:
            if not _is_own(os.lstat(path)):
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size_bytes = os.fstat(descriptor).st_size
            if _unlink_own(path, descriptor):
                logger.info("arena: removed %s (%.2f GB), left behind by a dead process", path, size_bytes / 2**30)
        except OSError:
            pass  # a living process holds the lock
        finally:
            os.close(descriptor)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _madvise(part: np.ndarray, advice: int) -> int:
    """Call madvise without the GIL. Return 0 or the error number."""
    return ctypes.get_errno() if _libc.madvise(part.ctypes.data, part.nbytes, advice) else 0


def _populate(part: np.ndarray) -> bool:
    """Fault a range in: madvise(MADV_POPULATE_WRITE), Linux 5.14.

    Returns False if the kernel lacks that, and raises OSError if there is no memory; touching such a page would kill
    the process.
    """
    code = _madvise(part, _MADV_POPULATE_WRITE)
    if code in (errno.ENOMEM, errno.EFAULT):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return not code


def numa_node_for(mode: str | None) -> int | None:
    """Return the NUMA node for `numa_mode`: None, "auto" (the node of the first usable CPU) or a number."""
    if mode is None:
        return None
    if mode == "auto":
        cpu = min(os.sched_getaffinity(0))
        nodes = list(Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"))
        return int(nodes[0].name.removeprefix("node")) if nodes else None
    if mode.isdigit() and Path(f"/sys/devices/system/node/node{mode}").exists():
        return int(mode)
    raise ConfigError(f"numa_mode: expected 'auto' or the number of a node of this machine, found {mode!r}")
