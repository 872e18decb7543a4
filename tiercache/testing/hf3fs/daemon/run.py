"""One daemon: builds its parts, says that it is ready, serves until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiercache.testing.hf3fs.daemon.buffers import Buffers
from tiercache.testing.hf3fs.daemon.clients import ClientWatch
from tiercache.testing.hf3fs.daemon.engine import Engine
from tiercache.testing.hf3fs.daemon.faults import Fault, Faults
from tiercache.testing.hf3fs.daemon.files import KnownFiles
from tiercache.testing.hf3fs.daemon.service import Handler, Service
from tiercache.testing.hf3fs.statistics import Statistics
from tiercache.testing.hf3fs.wire import SEMAPHORE_LINKS, SOCKET_NAME, VIRTUAL_DIRECTORY


@dataclass
class Settings:
    mount: Path
    backing: Path | None
    """None: no FUSE; `mount` is a plain directory."""
    socket: Path | None = None
    """None: without FUSE the one in `3fs-virt`, with FUSE none."""
    threads: int = 4
    read_only: bool = False
    ready_descriptor: int | None = None
    """Gets a line of JSON once clients can come."""
    until_stdin_closes: bool = False


class Daemon:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.files = KnownFiles()
        self.buffers = Buffers()
        self.faults = Faults()
        self.engine = Engine(
            self.files, self.buffers, self.faults, threads=settings.threads, read_only=settings.read_only
        )
        self.clients = ClientWatch(self.buffers.forget_process)
        self._ready = False

    def serve(self) -> None:
        """Until SIGTERM, SIGINT or, if so set, the end of stdin."""
        if self.settings.until_stdin_closes:
            threading.Thread(target=_terminate_at_end_of_stdin, name="stdin", daemon=True).start()
        self.engine.start()
        try:
            if self.settings.backing is None:
                self._serve_directory()
            else:
                self._serve_fuse(self.settings.backing)
        finally:
            self.faults.clear()
            self.engine.stop()
            self.clients.stop()

    def _serve_fuse(self, backing: Path) -> None:
        # Bound late: it needs libfuse3, which the daemon without FUSE does without.
        os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
        import mfusepy

        from tiercache.testing.hf3fs.daemon.filesystem import Filesystem

        service = None
        if self.settings.socket is not None:
            service = Service(self.settings.socket, self._control(), lambda pid: None)
            service.start()
        targets = [f"/dev/shm/sem.{semaphore.name}" for semaphore in self.engine.semaphores]
        filesystem = Filesystem(
            backing,
            self.files,
            self.buffers,
            targets,
            mfusepy.fuse_get_context,
            self._say_ready,
            self.clients.watch,
            read_only=self.settings.read_only,
        )
        try:
            mfusepy.FUSE(
                filesystem,
                str(self.settings.mount),
                foreground=True,
                fsname="hf3fs.emulator",
                subtype="hf3fs",
                use_ino=True,
                hard_remove=True,
                # The real client invalidates the kernel's copy of what it changes; this interface cannot.
                attr_timeout=0,
                entry_timeout=0,
                negative_timeout=0,
            )
        except RuntimeError:
            if not self._ready:
                raise  # else it reports the signal that ended it as a failure
        finally:
            if service is not None:
                service.stop()

    def _serve_directory(self) -> None:
        iovs = self.settings.mount / VIRTUAL_DIRECTORY / "iovs"
        iovs.mkdir(parents=True, exist_ok=True)
        for link in iovs.iterdir():
            link.unlink()  # of a daemon that was killed
        for name, semaphore in zip(SEMAPHORE_LINKS, self.engine.semaphores, strict=True):
            (iovs / name).symlink_to(f"/dev/shm/sem.{semaphore.name}")
        path = self.settings.socket or self.settings.mount / VIRTUAL_DIRECTORY / SOCKET_NAME
        path.unlink(missing_ok=True)
        service = Service(path, {**self._control(), **self._clients_without_fuse(iovs)}, self.clients.watch)
        service.start()
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        self._say_ready()
        stop.wait()
        service.stop()
        for link in iovs.iterdir():
            link.unlink()

    def _say_ready(self) -> None:
        self._ready = True
        if self.settings.ready_descriptor is not None:
            names = [semaphore.name for semaphore in self.engine.semaphores]
            os.write(self.settings.ready_descriptor, json.dumps({"semaphores": names}).encode() + b"\n")
            os.close(self.settings.ready_descriptor)
        else:
            print(f"serving {self.settings.mount}", flush=True)

    def _control(self) -> dict[str, Handler]:
        def add_fault(pid: int, descriptors: list[int], **fault: Any) -> None:
            self.faults.add(Fault(**fault))

        return {
            "fault": add_fault,
            "clear": lambda pid, descriptors: self.faults.clear(),
            "hang": lambda pid, descriptors: self.faults.hang(),
            "resume": lambda pid, descriptors: self.faults.resume(),
            "until_hanging": lambda pid, descriptors, operations: self.faults.until_hanging(operations),
            "statistics": lambda pid, descriptors: asdict(self.statistics()),
        }

    def _clients_without_fuse(self, iovs: Path) -> dict[str, Handler]:
        """What the kernel would bring us if this were a mount."""

        def symlink(name: str, target: str, pid: int, descriptors: list[int]) -> None:
            self.buffers.register(name, target, pid)
            (iovs / name).symlink_to(target)

        def unlink(name: str, pid: int, descriptors: list[int]) -> None:
            self.buffers.unregister(name)
            (iovs / name).unlink()

        def hold(pid: int, descriptors: list[int]) -> int:
            return self.files.hold(descriptors[0])

        def release(inode: int, pid: int, descriptors: list[int]) -> None:
            self.files.release(inode)

        return {"symlink": symlink, "unlink": unlink, "hold": hold, "release": release}

    def statistics(self) -> Statistics:
        buffers, rings = self.buffers.counts()
        return Statistics(
            self.engine.operations, self.engine.transferred_bytes, self.faults.struck, buffers, rings, len(self.files)
        )


def _terminate_at_end_of_stdin() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
