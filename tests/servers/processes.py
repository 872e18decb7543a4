"""Stop a process for a test, and know that it stands still."""

import os
import signal
import time

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
