"""Checks of what callers give the cache."""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop
from math import isfinite


def check_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise RuntimeError unless `loop` is the running one: the cache's state has no locks."""
    if _get_running_loop() is not loop:
        raise RuntimeError(
            "the cache belongs to the event loop that started it, and this call comes from elsewhere; use "
            "asyncio.run_coroutine_threadsafe(..., loop) or CacheThread, or open a cache of its own on this loop"
        )


def check_number(name: str, seconds: float) -> None:
    """Raise ValueError for NaN, which no time ever reaches. Infinite and past times are valid."""
    if seconds != seconds:
        raise ValueError(f"{name}: expected a number of seconds, found {seconds}")


def check_seconds(name: str, value_s: float) -> None:
    """Raise ValueError unless `value_s` is a finite number of seconds from 0 on."""
    if not (isfinite(value_s) and value_s >= 0):
        raise ValueError(f"{name}: expected a number of seconds from 0 on, found {value_s}")
