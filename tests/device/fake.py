"""A driver whose events happen when the test says so, and that refuses when the test says so."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tiercache.device.driver import DeviceError, Driver, Event, Span, Stream


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.happened = threading.Event()


class FakeStream:
    """`work` is what is enqueued and not done: events to wait for, and native calls."""

    def __init__(self) -> None:
        self.work: deque[FakeEvent | tuple[int, int]] = deque()
        self.events: deque[FakeEvent] = deque()


class FakeDriver(Driver):
    """No memory and no kernels; streams and events only.

    `refused` holds names of methods that fail from now on. `happen` lets the oldest events of a stream happen, which runs
    native calls in the calling thread, at once. `queries`, `calls` and `released` count.
    """

    name = "fake"

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.streams: list[FakeStream] = []
        self.queries = self.calls = self.released = 0
        self.idle = self.make_stream()

    def happen(self, stream: FakeStream, count: int = 1) -> None:
        for _ in range(count):
            stream.events.popleft().happened.set()
        for other in self.streams:
            while other.work:
                first = other.work[0]
                if isinstance(first, FakeEvent):
                    if not first.happened.is_set():
                        break
                else:
                    function, argument = first
                    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
                other.work.popleft()

    def make_stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def drop_stream(self, stream: Stream) -> None:
        """What is enqueued on it still ends, when the test says so."""

    def current_stream(self) -> Stream:
        return self.idle

    def record(self, stream: Stream) -> FakeEvent:
        self._check("record")
        event = FakeEvent(stream)
        stream.events.append(event)
        return event

    def release(self, event: Event) -> None:
        self.released += 1

    def wait(self, stream: Stream, event: Event) -> None:
        self._check("wait")
        stream.work.append(event)

    def query(self, event: Event) -> bool:
        self.queries += 1
        self._check("query")
        return bool(event.happened.is_set())

    def synchronize(self, event: Event) -> None:
        self._check("synchronize")
        event.happened.wait()

    def call(self, stream: Stream, function: int, argument: int) -> None:
        self._check("call")
        self.calls += 1
        stream.work.append((function, argument))

    def _check(self, method: str) -> None:
        if method in self.refused:
            raise DeviceError(f"fake: {method} refused", lost="lost" in self.refused)

    def memory_bytes(self) -> tuple[int, int]:
        raise NotImplementedError

    def allocate(self, length_bytes: int) -> Span:
        raise NotImplementedError

    def free(self, span: Span) -> None:
        raise NotImplementedError

    def pin(self, memory: np.ndarray) -> bool:
        return False

    def unpin(self, memory: np.ndarray) -> None: ...

    def owns(self, tensor: Any) -> bool:
        return False

    def array(self, span: Span) -> Any:
        raise NotImplementedError

    def copy(self, destination: int, source: int, length_bytes: int, stream: Stream) -> None:
        raise NotImplementedError

    def fill(self, address: int, value: int, length_bytes: int, stream: Stream) -> None:
        raise NotImplementedError

    @property
    def has_kernels(self) -> bool:
        return False

    def launch(self, kernel: str, threads: int, arguments: Sequence[np.ndarray], stream: Stream) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


@contextmanager
def forked() -> Iterator[None]:
    """While a child lives that does nothing and holds every file of ours."""
    child_waits, end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are alive; the child touches none of theirs
        child = os.fork()
    if child == 0:
        os.close(end)
        os.read(child_waits, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(end)
        os.close(child_waits)
        os.waitpid(child, 0)
