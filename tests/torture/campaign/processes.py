"""Workers as the referee sees them: started, spoken to, stopped, killed, each by a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.servers.processes import stands_still
from tests.torture.campaign.messages import Command, Order, Report, now_s, packed, report_of

START_S = 30.0
DEATH_S = 30.0
"""From kill -9 to the end: what a process has asked a device for is waited for by the kernel."""
STOP_S = 1.0
_LONGEST_NEWS = 4000
"""Characters."""

R = TypeVar("R")


class NurseryFailed(Exception):
    """No process can be started any more."""


class Nursery:
    """Used with `with`. `worker` is a module whose `run(order, connection)` is a worker's life."""

    def __init__(self, worker: str, log: Path) -> None:
        self._worker = worker
        self._log = log
        self._told_bytes = 0

    def __enter__(self) -> Nursery:
        """Wait until it can fork. Raises NurseryFailed."""
        self._asking, theirs = socket.socketpair()
        self._asking.settimeout(START_S)
        command = [sys.executable, "-m", "tests.torture.campaign.nursery", str(theirs.fileno()), self._worker]
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}  # who forks has no threads
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **threads, "MALLOC_ARENA_MAX": "1"},  # heaps of their threads would not shrink
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is the campaign's to handle
            )
        with contextlib.suppress(OSError):
            if self._asking.recv(1):
                return self
        self.__exit__()
        raise NurseryFailed(f"the process that starts workers did not start; it said: {self._log.read_text()[-2000:]}")

    def start(self, order: Order) -> Process:
        """Raises NurseryFailed."""
        ours, theirs = socket.socketpair()
        ending, write_end = os.pipe()
        try:
            socket.send_fds(self._asking, [packed(order)], [theirs.fileno(), write_end])
            said, given, _, _ = socket.recv_fds(self._asking, 64, 1)
            if not given:
                raise ConnectionError("the nursery is gone")
        except OSError as error:
            ours.close()
            os.close(ending)
            raise NurseryFailed(f"no worker can be started: {error}; see {self._log}") from error
        finally:
            theirs.close()
            os.close(write_end)
        return Process(order, int(json.loads(said)), given[0], ending, ours)

    def news(self) -> str:
        """What was written to the log since the last call: tracebacks of workers, and what libraries print."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(self._told_bytes)
            written = log.read()
        self._told_bytes += len(written)
        return written.decode(errors="replace")[-_LONGEST_NEWS:]

    def __exit__(self, *exception: object) -> None:
        """Its children go with it."""
        self._asking.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(START_S)


class Process:
    """One worker. Its reports go to `hear`, and the one that `ask` waits for is its result."""

    def __init__(self, order: Order, pid: int, pidfd: int, ending: int, connection: socket.socket) -> None:
        self.order = order
        self.name = order.name
        self.pid = pid
        self.heard_s = now_s()
        self.may_end_with: set[int] = set()
        """Statuses: 0 when it was told to end, -9 when it is killed. Empty: it must go on."""
        self.status: int | None = None
        """Known once it has ended, except when the nursery was gone before: negative for a signal."""
        self.ended = asyncio.Event()
        self.hear: Callable[[Process, Report], None] = lambda process, report: None
        self.judge: Callable[[Process], None] = lambda process: None
        """Called when it has ended."""
        self._pidfd = pidfd
        self._ending = ending
        self._connection = connection
        self._connection.setblocking(False)
        self._rest = b""
        self._waiting: list[tuple[type[Report], asyncio.Future[Report | None]]] = []
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._read)
        loop.add_reader(ending, self._end)

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def tell(self, command: Command) -> None:
        """Does nothing where nobody is left to hear it."""
        with contextlib.suppress(OSError):
            self._connection.send(packed(command))

    async def until(self, kind: type[R], within_s: float) -> R | None:
        """The next report of this kind; None when there was none in time, or the process ended."""
        if not self.is_alive:
            return None
        future: asyncio.Future[Report | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, future))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(within_s):
                found = await future
        except TimeoutError:
            return None
        finally:
            self._waiting = [each for each in self._waiting if each[1] is not future]
        return found if isinstance(found, kind) else None

    async def ask(self, command: Command, kind: type[R], within_s: float) -> R | None:
        self.tell(command)
        return await self.until(kind, within_s)

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def kill(self) -> bool:
        """kill -9; whether it was gone within `DEATH_S`."""
        self.may_end_with.add(-signal.SIGKILL)
        self.send(signal.SIGKILL)
        return await self.is_gone(DEATH_S)

    async def is_gone(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.ended.wait()
        return not self.is_alive

    async def stop(self) -> bool:
        """SIGSTOP; whether all its threads stand still, soon."""
        self.send(signal.SIGSTOP)
        until_s = now_s() + STOP_S
        while self.is_alive and not stands_still(self.pid):
            if now_s() > until_s:
                return False
            await asyncio.sleep(0.001)
        return True

    def go_on(self) -> None:
        self.send(signal.SIGCONT)
        self.heard_s = now_s()

    def drain(self) -> None:
        """Hear all that was said up to now."""
        while self._read():
            pass

    def _read(self) -> bool:
        try:
            received = self._connection.recv(1 << 16)
        except OSError:
            return False
        if not received:
            asyncio.get_running_loop().remove_reader(self._connection)
            return False
        self.heard_s = now_s()
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            self._hear(report_of(line))
        return True

    def _hear(self, report: Report) -> None:
        for kind, future in self._waiting:
            if isinstance(report, kind) and not future.done():
                future.set_result(report)
                break
        self.hear(self, report)

    def _end(self) -> None:
        """It is dead: all its threads are gone, and all that it had open is closed."""
        self.drain()
        status = os.read(self._ending, 16)
        self.status = int(status) if status else None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ending)
        loop.remove_reader(self._connection)
        self._connection.close()
        os.close(self._ending)
        os.close(self._pidfd)
        self.ended.set()
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        self.judge(self)
