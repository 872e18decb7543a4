"""Simulate an accelerator in host memory: its streams are threads, and work may end after the call that enqueues it.

Code that omits an event can fail on it. The device can be lost, like a GPU that falls off its bus.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from tiercache.device.driver import Driver, Event, Stream
from tiercache.errors import DeviceError

STREAM_THREAD = "twin-stream"
_LOOK_S = 0.05


class TwinStream:
    """A daemon thread that runs its work in order."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class TwinEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()


class TwinDriver(Driver):
    """A driver that reports `total_bytes` of memory."""

    name = "twin"

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        super().__init__(total_bytes)
        self._streams: list[TwinStream] = []
        self._lost = threading.Event()
        self._idle = self.make_stream()

    def lose(self) -> None:
        """Fail all operations from now on; enqueued work never ends."""
        self._lost.set()

    def close(self) -> None:
        """Let the threads end."""
        for stream in self._streams:
            stream.close()

    def memory_bytes(self) -> tuple[int, int]:
        self._check()
        return super().memory_bytes()

    def make_stream(self) -> TwinStream:
        self._check()
        stream = TwinStream(f"{STREAM_THREAD}-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        return self._idle

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        self._check()
        self._give(stream, work)

    def record(self, stream: Stream) -> TwinEvent:
        self._check()
        event = TwinEvent()
        self._give(stream, event.happened.set)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._check()
        stream.enqueue(lambda: self._await(event))

    def query(self, event: Event) -> bool:
        self._check()
        return bool(event.happened.is_set())

    def synchronize(self, event: Event) -> None:
        while not event.happened.wait(_LOOK_S):
            self._check()

    def finish(self, stream: Stream) -> None:
        event = TwinEvent()
        self._give(stream, event.happened.set)
        self.synchronize(event)

    def _give(self, stream: Stream, work: Callable[[], Any]) -> None:
        """Enqueue work. A lost device does not run it."""
        stream.enqueue(lambda: None if self._lost.is_set() else work())

    def _await(self, event: TwinEvent) -> None:
        while not event.happened.wait(_LOOK_S) and not self._lost.is_set():
            pass

    def _check(self) -> None:
        if self._lost.is_set():
            raise DeviceError(f"{self.name}: the device is lost", lost=True)
