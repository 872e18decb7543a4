"""End commands and examples on SIGTERM and SIGHUP as on Ctrl-C, so that no directory, shared memory or process is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make both signals call the handler that SIGINT has at that moment. Use it in the main thread of a program.

    The handler raises KeyboardInterrupt, or is that of asyncio or uvicorn. Ignored signals (`nohup`) stay ignored.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:  # Ctrl-C is ignored, as in the background of a shell
            raise KeyboardInterrupt

    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for signum in before:
            signal.signal(signum, interrupt)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
