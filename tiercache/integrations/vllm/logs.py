"""Log lines in vLLM's log, and OpenTelemetry spans in a request's own trace.

Repeated messages are logged once. vLLM sets up the exporter of spans in each of its processes (`--otlp-traces-endpoint`).
Without OpenTelemetry, and for requests without a trace, no span is made.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

logger = logging.getLogger("tiercache.vllm")

R = TypeVar("R")

_complained: set[str] = set()


def show_our_log() -> None:
    """Make tiercache's INFO lines visible, since vLLM sets up a handler for its own loggers only.

    Uses the root logger's handler if it has one. Changes nothing if tiercache's logger has a handler or a level already.
    """
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
    """Turn an exception of the method into the result `instead()`. Log it once per method and exception type."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> R:
            try:
                return method(*arguments, **named)
            except Exception as error:
                kind = f"{method.__name__}: {type(error).__name__}"
                if kind not in _complained:
                    _complained.add(kind)
                    logger.exception("tiercache failed, and the engine goes on without it (logged once): %s", kind)
                substitute: R = instead()
                return substitute

        return call

    return decorate


try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = None  # type: ignore[assignment]

Trace = Mapping[str, str]
"""The headers `traceparent` and `tracestate` of a request."""


def trace_of(request: Any) -> Trace | None:
    """Return the request's trace; None if it has none, or spans are not exported."""
    headers = getattr(request, "trace_headers", None)
    return dict(headers) if headers and trace is not None else None


def add_span(name: str, of: Trace | None, began_s: float, **attributes: str | int | float) -> None:
    """Export a span that began at `began_s` (`time.monotonic`) and ends now. Thread-safe; never raises."""
    if of is None or trace is None:
        return
    with contextlib.suppress(Exception):  # a failed trace must not fail the request
        end_ns = time.time_ns()
        span = trace.get_tracer("tiercache").start_span(
            f"tiercache.{name}",
            context=TraceContextTextMapPropagator().extract(dict(of)),
            start_time=end_ns - int((time.monotonic() - began_s) * 1e9),
            attributes={f"tiercache.{key}": value for key, value in attributes.items()},
        )
        span.end(end_ns)
