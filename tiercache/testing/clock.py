"""An event loop whose clock jumps to the next timer when nothing else happens, so that tests wait for no deadline."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

_GRACE_S = 0.03
"""Real time that worker threads get to report before the clock jumps."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= _GRACE_S:
            return super().select(timeout)
        events = super().select(_GRACE_S)
        if not events:
            self.jumped_s += timeout - _GRACE_S
        return events


class JumpingClockLoop(asyncio.SelectorEventLoop):
    """Use with `asyncio.Runner(loop_factory=JumpingClockLoop)`. Timers fire in order, at once."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return super().time() + self._jumping.jumped_s
