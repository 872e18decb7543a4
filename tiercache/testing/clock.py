"""An event loop whose clock jumps to the next timer when nothing else happens, so that tests wait for no deadline."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Callable
from typing import Any

_GRACE_S = 0.03
"""Real time that worker threads get to report before the clock jumps."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0
        self.busy: Callable[[], bool] | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= _GRACE_S:
            return super().select(timeout)
        events = super().select(_GRACE_S)
        if events or _others_run() or (self.busy is not None and self.busy()):
            return events
        events = super().select(0)  # of a thread that has reported since
        if not events:
            self.jumped_s += timeout - _GRACE_S
        return events


def _others_run() -> bool:
    """Whether another thread of this process computes, waits for a processor, or for a disk. One that waits for a lock, an
    event or another process does not."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        if thread != own:
            try:
                with open(f"/proc/self/task/{thread}/stat") as file:
                    state = file.read().rpartition(")")[2].split(maxsplit=1)[0]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if state in "RD":
                return True
    return False


class JumpingClockLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=JumpingClockLoop)`. Timers fire in order, at once. The clock stands while
    threads compute or use a disk, however busy the machine is, and while `busy` says that they wait for what will come."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @property
    def busy(self) -> Callable[[], bool] | None:
        return self._jumping.busy

    @busy.setter
    def busy(self, busy: Callable[[], bool] | None) -> None:
        self._jumping.busy = busy

    def time(self) -> float:
        return super().time() + self._jumping.jumped_s
