"""Getting our lines into the server's log, and saying once what might be said a thousand times."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("tiercache.vllm")

R = TypeVar("R")

_complained: set[str] = set()


def show_our_log() -> None:
    """vLLM sets up its own loggers only; without a handler of ours INFO lines would vanish in its processes. Where some
    library has given the root logger one, as `logging.warning` does, that is used. A level that somebody set stays."""
    ours = logging.getLogger("tiercache")
    if ours.handlers or ours.level:
        return
    if logging.getLogger().handlers:
        ours.setLevel(logging.INFO)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def survives(instead: Callable[[], Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """An exception becomes `instead()`, and one log line per method and kind."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> R:
            try:
                return method(*arguments, **named)
            except Exception as error:
                kind = f"{method.__name__}: {type(error).__name__}"
                if kind not in _complained:
                    _complained.add(kind)
                    logger.exception("the cache is of no use for a moment (said once): %s", kind)
                substitute: R = instead()
                return substitute

        return call

    return decorate
