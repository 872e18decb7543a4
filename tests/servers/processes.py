"""Stop and kill processes of a test, know that one stands still, and wait until one answers."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

START_S = 20.0
_STOP_S = 60.0


def stop_process(pid: int) -> None:
    """Send SIGSTOP and wait until no thread of the process runs. Blocks. Raises TimeoutError after a minute.

    `kill` returns before the threads have stopped: one that runs on another core goes on for a moment.
    """
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + _STOP_S
    while not stands_still(pid):
        if time.monotonic() > until_s:
            raise TimeoutError(f"process {pid} goes on {_STOP_S:.0f} s after SIGSTOP")


def stands_still(pid: int) -> bool:
    """Return True if every thread of the process is stopped, or the process has ended."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "TtZX":
                    return False
    except OSError:
        pass  # a thread, or the process, has ended
    return True


def until(condition: Callable[[], Any], *refusals: type[Exception], why: Callable[[], str] = lambda: "") -> Any:
    """Ask until it is so; OSError and `refusals` are a no. The pause spares the processor, nothing counts on it."""
    end_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, *refusals):
            if found := condition():
                return found
        assert time.monotonic() < end_s, why()
        time.sleep(0.01)


class Process:
    """Something that can be killed and frozen."""

    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """As kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        stop_process(self.process.pid)

    def thaw(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
