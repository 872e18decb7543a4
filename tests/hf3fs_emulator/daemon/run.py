"""One daemon: builds its parts, says that it is ready, serves until it is told to stop."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hf3fs_emulator.daemon.buffers import Buffers
from tests.hf3fs_emulator.daemon.clients import ClientWatch
from tests.hf3fs_emulator.daemon.engine import Engine
from tests.hf3fs_emulator.daemon.faults import CallFault, Fault, Faults
from tests.hf3fs_emulator.daemon.files import KnownFiles
from tests.hf3fs_emulator.daemon.filesystem import Filesystem
from tests.hf3fs_emulator.daemon.pacing import Pacing
from tests.hf3fs_emulator.daemon.service import Handler, Service
from tests.hf3fs_emulator.daemon.session import Session
from tests.hf3fs_emulator.pace import Pace
from tests.hf3fs_emulator.statistics import Statistics

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Settings:
    mount: str
    backing: str
    """The directory of the files."""
    socket: str
    """For fault injection."""
    negative_io_depth: bool
    ready_descriptor: int
    """Gets a line of JSON once clients can come."""


class Daemon:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.files = KnownFiles()
        self.buffers = Buffers(negative_io_depth=settings.negative_io_depth)
        self.faults = Faults()
        self.pacing = Pacing()
        self.engine = Engine(self.files, self.buffers, self.faults)
        self.semaphore_targets = [f"/dev/shm/sem.{semaphore.name}" for semaphore in self.engine.semaphores]
        self.clients = ClientWatch(self.buffers.forget_process)

    def serve(self) -> None:
        """Until SIGTERM, SIGINT or the end of stdin."""
        # Only the main thread is to get them: one that comes to another does not wake it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        # An owner that dies while we are stopped (`pause`) must not leave a mount that hangs everybody: go on, and end.
        # Linux says so when the thread ends that started us; to a daemon that is not stopped it means nothing.
        ctypes.CDLL(None).prctl(1, int(signal.SIGCONT), 0, 0, 0)  # PR_SET_PDEATHSIG
        threading.Thread(target=_terminate_at_end_of_stdin, name="stdin", daemon=True).start()
        self.engine.start()
        self.clients.start()
        try:
            self._serve_fuse()
        finally:
            self.faults.clear()
            self.engine.stop()
            self.clients.stop()

    def _serve_fuse(self) -> None:
        filesystem = Filesystem(
            self.settings.backing, self.files, self.buffers, self.faults, self.semaphore_targets, self.clients.watch
        )
        session = Session(filesystem, Path(self.settings.mount), self.pacing, self._say_ready)
        self.files.on_visible = session.changed
        service = Service(Path(self.settings.socket), self._control())
        service.start()

        def serve() -> None:
            try:
                session.serve()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=serve, name="fuse", daemon=True).start()
        try:
            signal.sigwait(STOP_SIGNALS)
        finally:
            session.unmount()
            service.stop()

    def _say_ready(self) -> None:
        names = [semaphore.name for semaphore in self.engine.semaphores]
        os.write(self.settings.ready_descriptor, json.dumps({"semaphores": names}).encode() + b"\n")
        os.close(self.settings.ready_descriptor)

    def _control(self) -> dict[str, Handler]:
        def set_pace(**pace: float) -> None:
            self.pacing.pace = Pace(**pace) if pace else None

        def clear() -> None:
            self.pacing.pace = None
            self.faults.clear()

        return {
            "until_registered": self.buffers.until,
            "fault": lambda **fault: self.faults.add(Fault(**fault)),
            "call_fault": lambda **fault: self.faults.add_call(CallFault(**fault)),
            "clear": clear,
            "pace": set_pace,
            "hang": self.faults.hang,
            "resume": self.faults.resume,
            "until_struck": self.faults.until_struck,
            "until_hanging": self.faults.until_hanging,
            "statistics": lambda: asdict(self.statistics()),
        }

    def statistics(self) -> Statistics:
        return Statistics(operations=self.engine.operations, faults_struck=self.faults.struck)


def _terminate_at_end_of_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
