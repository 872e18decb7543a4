"""An event loop whose clock jumps to the next timer when nothing else happens, so that tests wait for no deadline."""

from __future__ import annotations

import asyncio
import selectors
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
        if not events and (self.busy is None or not self.busy()):
            self.jumped_s += timeout - _GRACE_S
        return events


class JumpingClockLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=JumpingClockLoop)`. Timers fire in order, at once; the clock stands while `busy`
    says that threads are at work, which is worth saying where they may take longer than 30 ms on a busy machine."""

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
