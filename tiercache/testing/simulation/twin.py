"""The CPU twin in a simulated process: its streams are strands, its memory is real, and it fails as accelerators do.

`DeviceMemory` is what an engine has there: KV blocks, and memory in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiercache.device.driver import DeviceError, Event, Span, Stream
from tiercache.device.paged import PagedKv
from tiercache.device.payloads import PagedChunk
from tiercache.device.twin import TwinDriver, TwinEvent, TwinStream, host_view
from tiercache.testing.simulation.oracle import Violation
from tiercache.testing.simulation.process import Process
from tiercache.testing.simulation.weather import Weather
from tiercache.testing.simulation.world import SimulationError, World

_TOTAL_BYTES = 64 << 20
_ROW_BYTES = 4
_PLANES = 2
_BLOCK_TOKENS = 128
_BLOCKS = 64
_FENCE = 170


class DeviceWeather(Weather):
    """An accelerator's. "lost" is for good, for all who use it now."""

    def __init__(self, world: World, name: str, lose: Callable[[], None]) -> None:
        super().__init__(world, name)
        self._lose = lose

    def turn(self, kind: str, rate: float) -> None:
        if kind == "lost":
            self.last_fault_s = self.world.now_s
            self.met[kind] += 1
            self._lose()
        else:
            super().turn(kind, min(rate, 0.3))

    def before_work(self) -> None:
        """At the beginning of each piece of work, in its stream."""
        self.hold()


class SimulatedTwin(TwinDriver):
    """Of one process. Work on a stream takes its time, a copy is in two parts, and the weather strikes both."""

    def __init__(self, process: Process, weather: DeviceWeather, *, kernels: bool, pins: bool) -> None:
        self.process = process
        self.weather = weather
        self.pinned: list[int] = []
        self._has_kernels = kernels
        super().__init__(_TOTAL_BYTES)
        self.can_pin = pins

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def holds(self) -> dict[str, list[int]]:
        """What nobody has given back, by what it is: addresses."""
        return {"device memory": list(self._mappings), "pinned memory": list(self.pinned)}

    def make_stream(self) -> TwinStream:
        """An accelerator's, not the system's: there is always one."""
        before, self.process.no_threads = self.process.no_threads, False
        try:
            return super().make_stream()
        finally:
            self.process.no_threads = before

    def pin(self, memory: np.ndarray) -> bool:
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

    def copy(self, destination: int, source: int, length_bytes: int, stream: Stream) -> None:
        self._check()
        self._may_refuse()
        middle = length_bytes // 2
        for start, length in ((0, middle), (middle, length_bytes - middle)):
            if length:
                self._enqueue(stream, _move(destination + start, source + start, length))

    def launch(self, kernel: str, threads: int, arguments: Sequence[np.ndarray], stream: Stream) -> None:
        self._may_refuse()
        super().launch(kernel, threads, arguments, stream)

    def _enqueue(self, stream: Stream, work: Callable[[], Any]) -> None:
        def run() -> None:
            self.weather.before_work()
            if not self._lost.is_set():
                work()

        stream.enqueue(run)

    def _may_refuse(self) -> None:
        if self.weather.strikes("refuses"):
            raise DeviceError(f"{self.name}: it refuses")

    def _library(self) -> Any:
        if not self._has_kernels:
            return None
        library = super()._library()
        if library is None:
            raise SimulationError("this run needs a C++ compiler (c++, or CXX): its device runs kernels")
        return library


def _move(destination: int, source: int, length_bytes: int) -> Callable[[], None]:
    return lambda: np.copyto(host_view(destination, length_bytes), host_view(source, length_bytes))


class Tensor:
    """As much of a torch tensor as the cache asks of one."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = "torch.uint8"
        self.device = "twin"

    def dim(self) -> int:
        return self.values.ndim

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.values.itemsize for stride in self.values.strides)

    def element_size(self) -> int:
        return int(self.values.itemsize)

    def numel(self) -> int:
        return int(self.values.size)

    def data_ptr(self) -> int:
        return int(self.values.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.values.flags.c_contiguous)

    def __getitem__(self, place: Any) -> Tensor:
        return Tensor(self.values[place])


Tensor.__module__ = "torch.simulated"  # what is no tensor of torch's is taken for host memory


class Part:
    """What one caller puts from, or gets into: memory that is his alone until he has given it back."""

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
    """Of an engine. `fenced` parts are looked at again when they are used next: whoever wrote to one came too late."""

    def __init__(self, driver: SimulatedTwin, chunk_bytes: int) -> None:
        self.driver = driver
        self._chunk_bytes = chunk_bytes
        kv_bytes = _PLANES * _BLOCKS * _BLOCK_TOKENS * _ROW_BYTES
        self._kv_span = driver.allocate(kv_bytes)
        driver.view(self._kv_span).fill(_FENCE)
        shape = (_PLANES, _BLOCKS, _BLOCK_TOKENS, 1, _ROW_BYTES)
        self._tensor = Tensor(driver.view(self._kv_span).reshape(shape))
        try:
            self.kv = PagedKv(driver, [self._tensor], "NHD", planes_first=True)
        except DeviceError:
            driver.free(self._kv_span)
            raise
        self._free_blocks = list(range(_BLOCKS))
        self._pieces: list[Span] = []
        self._spare: list[Span] = []

    def part(self, length_bytes: int, *, paged: bool) -> Part | None:
        """Memory for a chunk of that length; None where there is none now. Raises Violation where it was written to since
        the last one had it."""
        return self._paged(length_bytes) if paged else self._flat(length_bytes)

    def close(self) -> None:
        self.kv.close()
        self.driver.free(self._kv_span)
        for piece in self._pieces:
            self.driver.free(piece)

    def _paged(self, length_bytes: int) -> Part | None:
        tokens = length_bytes // (_PLANES * _ROW_BYTES)
        count = -(-tokens // _BLOCK_TOKENS)
        if count > len(self._free_blocks):
            return None
        blocks = [self._free_blocks.pop(0) for _ in range(count)]
        values = self._tensor.values
        views = []
        for plane in range(_PLANES):
            left = tokens
            for block in blocks:
                whole = values[plane, block].reshape(-1)
                if (whole != _FENCE).any():
                    raise Violation(f"block {block} of the engine's KV was written to after its caller had it back")
                views.append(whole[: min(left, _BLOCK_TOKENS) * _ROW_BYTES])
                left -= min(left, _BLOCK_TOKENS)
        return Part(PagedChunk(self.kv, blocks, 0, tokens), views, lambda: self._free_blocks.extend(blocks))

    def _flat(self, length_bytes: int) -> Part | None:
        if not self._spare:
            span = self.driver.allocate(self._chunk_bytes)
            self.driver.view(span).fill(_FENCE)
            self._pieces.append(span)
            self._spare.append(span)
        span = self._spare.pop(0)
        view = self.driver.view(span)
        if (view != _FENCE).any():
            raise Violation("device memory was written to after its caller had it back")
        return Part(Tensor(view[:length_bytes]), [view[:length_bytes]], lambda: self._spare.append(span))
