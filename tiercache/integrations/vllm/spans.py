"""OpenTelemetry spans of what the cache does for a request, in the request's own trace, which the client began.

vLLM sets up the exporter in each of its processes (`--otlp-traces-endpoint`). Without OpenTelemetry, and for requests
without a trace, nothing happens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = None  # type: ignore[assignment]

Trace = Mapping[str, str]
"""The headers `traceparent` and `tracestate` of a request."""


def trace_of(request: Any) -> Trace | None:
    """None where the request has none, or nobody would look at it."""
    headers = getattr(request, "trace_headers", None)
    return dict(headers) if headers and trace is not None else None


def add_span(name: str, of: Trace | None, began_s: float, **attributes: str | int | float) -> None:
    """One that began at `began_s` (of `time.monotonic`) and ends now. Any thread may call this, and it never raises."""
    if of is None or trace is None:
        return
    with contextlib.suppress(Exception):  # a trace is worth no request
        end_ns = time.time_ns()
        span = trace.get_tracer("tiercache").start_span(
            f"tiercache.{name}",
            context=TraceContextTextMapPropagator().extract(dict(of)),
            start_time=end_ns - int((time.monotonic() - began_s) * 1e9),
            attributes={f"tiercache.{key}": value for key, value in attributes.items()},
        )
        span.end(end_ns)
