"""A plain directory in place of a mount: clients say over a socket what the kernel would have told us."""

from __future__ import annotations

import errno
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.hf3fs_emulator.daemon.buffers import Buffers
from tests.hf3fs_emulator.daemon.files import KnownFiles
from tests.hf3fs_emulator.daemon.service import Handler, Service
from tests.hf3fs_emulator.wire import SEMAPHORE_LINKS, SOCKET_NAME, VIRTUAL_DIRECTORY

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Directory:
    def __init__(self, mount: Path, files: KnownFiles, buffers: Buffers, semaphore_targets: list[str]) -> None:
        self._virtual = mount / VIRTUAL_DIRECTORY
        self._iovs = self._virtual / "iovs"
        self._files = files
        self._buffers = buffers
        self._semaphores = dict(zip(SEMAPHORE_LINKS, semaphore_targets, strict=True))
        self._lock = threading.Lock()
        self._held: Counter[tuple[int, int]] = Counter()
        """(process, inode) -> how often that process registered a descriptor of that file"""

    def serve(
        self, handlers: dict[str, Handler], on_client: Callable[[int], None], on_ready: Callable[[], None]
    ) -> None:
        """Until one of STOP_SIGNALS, which must be blocked in all threads."""
        self._iovs.mkdir(parents=True, exist_ok=True)
        self._clear()
        for name, target in self._semaphores.items():
            (self._iovs / name).symlink_to(target)
        mine: dict[str, Handler] = {
            "symlink": self._symlink,
            "unlink": self._unlink,
            "hold": self._hold,
            "release": self._release,
        }
        service = Service(self._virtual / SOCKET_NAME, {**handlers, **mine}, on_client)
        service.start()
        on_ready()
        signal.sigwait(STOP_SIGNALS)
        service.stop()
        self._clear()

    def forget_process(self, pid: int) -> None:
        """A client died: let go of the files that it held."""
        with self._lock:
            held = {key: count for key, count in self._held.items() if key[0] == pid}
            for key, count in held.items():
                del self._held[key]
                for _ in range(count):
                    self._files.release(key[1])
        known = self._buffers.names()
        for link in self._iovs.iterdir():
            if link.name not in known and link.name not in self._semaphores:
                link.unlink(missing_ok=True)

    def _symlink(self, name: str, target: str, pid: int, descriptors: list[int]) -> None:
        self._buffers.register(name, target, pid)
        (self._iovs / name).symlink_to(target)

    def _unlink(self, name: str, pid: int, descriptors: list[int]) -> None:
        self._buffers.unregister(name)
        (self._iovs / name).unlink(missing_ok=True)

    def _hold(self, pid: int, descriptors: list[int]) -> int:
        with self._lock:
            inode = self._files.hold(descriptors[0])
            self._held[pid, inode] += 1
            return inode

    def _release(self, inode: int, pid: int, descriptors: list[int]) -> None:
        with self._lock:
            if not self._held[pid, inode]:
                raise OSError(errno.EBADF, f"process {pid} does not hold inode {inode}")
            self._held[pid, inode] -= 1
            self._files.release(inode)

    def _clear(self) -> None:
        """Take away what a daemon that was killed has left."""
        for link in self._iovs.iterdir():
            link.unlink()
        (self._virtual / SOCKET_NAME).unlink(missing_ok=True)
