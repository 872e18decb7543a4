"""An event loop whose virtual clock jumps to the next timer when all threads wait, so that tests need no real waits."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from typing import Any

_GRACE_S = 0.03
"""Real seconds without an event before the clock jumps; less if the next timer is nearer."""
_BEGAN_S = 1_000.0


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = _BEGAN_S

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(min(timeout, _GRACE_S))
        if events or not _others_wait():
            return events
        events = super().select(0)  # a thread may have reported since
        if not events:
            self.now_s += timeout
        return events


def _others_wait() -> bool:
    """Return True if every other thread sleeps: none computes, and none waits for a processor or a disk.

    A thread may wake another one during a check, so two checks must give the same result.
    """
    first = _waiting_threads()
    return first is not None and first == _waiting_threads()


def _waiting_threads() -> dict[str, list[str]] | None:
    """Return the context-switch counts of each other thread; None if one of them runs or waits for a disk."""
    own = str(threading.get_native_id())
    switches = {}
    for thread in os.listdir("/proc/self/task"):
        if thread != own:
            try:
                with open(f"/proc/self/task/{thread}/status") as file:
                    lines = file.read().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if any(line.startswith(("State:\tR", "State:\tD")) for line in lines):
                return None
            switches[thread] = [line for line in lines if "ctxt_switches" in line]
    return switches


class JumpingClockLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=JumpingClockLoop)`. Timers fire in order, at once.

    The clock is purely virtual: real time does not move it, however slow the machine is. It stands still while threads
    compute or use a disk.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s
