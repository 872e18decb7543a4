"""An accelerator in a simulated process: its streams are strands, its memory is real, and it fails as accelerators do.

`DeviceMemory` is what an engine has there: KV blocks, and memory in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.device.twin import TwinDriver, TwinEvent, TwinStream
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.process import Process
from tests.torture.simulation.weather import Weather
from tests.torture.simulation.world import World
from tiercache.device.driver import Event, Stream, Tensor
from tiercache.device.paged import PagedChunk, PagedKv
from tiercache.errors import DeviceError

_TOTAL_BYTES = 64 << 20
_PLANES = 2
_PLANE_BYTES = 512
_BLOCKS = 64
_FENCE = 170


class DeviceWeather(Weather):
    """An accelerator's. "lost" is for good, for all who use it now."""

    def __init__(self, world: World, name: str, lose: Callable[[], None]) -> None:
        super().__init__(world, name)
        self._lose = lose

    def turn(self, kind: str, rate: float) -> None:
        if kind == "lost":
            self.last_fault_s = self.last_failure_s = self.world.now_s
            self.met[kind] += 1
            self._lose()
        else:
            super().turn(kind, min(rate, 0.3))

    def before_work(self) -> None:
        """At the beginning of each piece of work, in its stream."""
        self.hold()


class SimulatedTwin(TwinDriver):
    """The accelerator of one process. Work takes its time, a copy is in two parts, and the weather strikes both."""

    def __init__(self, process: Process, weather: DeviceWeather, *, pins: bool) -> None:
        self.process = process
        self.weather = weather
        self.pinned: list[int] = []
        super().__init__(_TOTAL_BYTES)
        self.can_pin = pins

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def make_stream(self) -> TwinStream:
        """An accelerator's, not the system's: there is always one."""
        before, self.process.no_threads = self.process.no_threads, False
        try:
            return super().make_stream()
        finally:
            self.process.no_threads = before

    def pin(self, memory: np.ndarray, slot_bytes: int) -> bool:
        if self.can_pin:
            self.pinned.append(memory.ctypes.data)
        return self.can_pin

    def unpin(self, memory: np.ndarray) -> None:
        if memory.ctypes.data not in self.pinned:
            raise DeviceError(f"{self.name}: this memory is not pinned")
        self.pinned.remove(memory.ctypes.data)

    def record(self, stream: Stream) -> TwinEvent:
        self._may_refuse()
        return super().record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._may_refuse()
        super().wait(stream, event)

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        self._may_refuse()
        super().enqueue(stream, work)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        middle = source.numel() // 2
        for part in (slice(0, middle), slice(middle, None)):
            super().copy(destination[part], source[part], stream)

    def _give(self, stream: Stream, work: Callable[[], Any]) -> None:
        def run() -> None:
            self.weather.before_work()
            if not self._lost.is_set():
                work()

        stream.enqueue(run)

    def _may_refuse(self) -> None:
        if self.weather.strikes("refuses"):
            raise DeviceError(f"{self.name}: it refuses")


class Part:
    """The memory of one caller's put or get, which is the caller's alone until it is given back."""

    def __init__(self, payload: Any, views: list[np.ndarray], give_back: Callable[[], None]) -> None:
        self.payload = payload
        self._views = views
        self._give_back = give_back

    def fill(self, content: np.ndarray) -> None:
        done = 0
        for view in self._views:
            view[:] = content[done : done + view.nbytes]
            done += view.nbytes

    def content(self) -> np.ndarray:
        return np.concatenate(self._views)

    def fence(self) -> None:
        """Nobody may read it from now on, or write to it."""
        for view in self._views:
            view.fill(_FENCE)

    def end(self) -> None:
        self._give_back()


class DeviceMemory:
    """The device memory of an engine. `fenced` parts are checked at their next use: a write to one came too late."""

    def __init__(self, driver: SimulatedTwin, chunk_bytes: int) -> None:
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        memory = driver.empty(_PLANES * _BLOCKS * _PLANE_BYTES).fill_(_FENCE)
        self._planes = memory.view(_PLANES, _BLOCKS, _PLANE_BYTES)
        self.kv = PagedKv(driver, list(self._planes))
        self._free_blocks = list(range(_BLOCKS))
        self._spare: list[Tensor] = []

    def part(self, length_bytes: int, *, paged: bool) -> Part | None:
        """Memory for a chunk of that length, in one piece where it is no whole blocks; None where there is none now. Raises
        Violation where it was written to since the last one had it."""
        if paged and length_bytes % self.kv.block_bytes == 0:
            return self._paged(length_bytes // self.kv.block_bytes)
        return self._flat(length_bytes)

    def _paged(self, count: int) -> Part | None:
        if count > len(self._free_blocks):
            return None
        blocks = [self._free_blocks.pop(0) for _ in range(count)]
        views = [self._planes[plane, block].numpy() for block in blocks for plane in range(_PLANES)]
        if any((view != _FENCE).any() for view in views):
            raise Violation(f"blocks {blocks} of the engine's KV were written to after their caller had them back")
        return Part(PagedChunk(self.kv, blocks), views, lambda: self._free_blocks.extend(blocks))

    def _flat(self, length_bytes: int) -> Part | None:
        if not self._spare:
            self._spare.append(self._driver.empty(self._chunk_bytes).fill_(_FENCE))
        memory = self._spare.pop(0)
        if bool((memory != _FENCE).any()):
            raise Violation("device memory was written to after its caller had it back")
        part = memory[:length_bytes]
        return Part(part, [part.numpy()], lambda: self._spare.append(memory))
