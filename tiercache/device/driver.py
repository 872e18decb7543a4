"""What the cache asks of an accelerator's driver, and nothing more.

Addresses are integers and streams and events are opaque, so that everything above this interface - the event bridge,
the pool, paged copies, the tiers - is the same code on CUDA (`cuda.py`) and on its CPU twin (`twin.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercache.errors import TierCacheError

Stream = Any
Event = Any


class DeviceError(TierCacheError):
    """The device or its driver failed. `lost` says that nothing will work on it any more (its context is corrupt)."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True, slots=True)
class Span:
    """A run of device memory."""

    address: int
    length_bytes: int

    def part(self, start: int, length_bytes: int | None = None) -> Span:
        """A run inside this one; ValueError when it does not lie inside."""
        if length_bytes is None:
            length_bytes = self.length_bytes - start
        if start < 0 or length_bytes < 0 or start + length_bytes > self.length_bytes:
            raise ValueError(f"span of {self.length_bytes} bytes: {length_bytes} bytes at {start} do not lie inside")
        return Span(self.address + start, length_bytes)


class Driver(ABC):
    """One device. Every method may be called from any thread; none but `synchronize` and `allocate` waits.

    Work on one stream runs in order. All methods raise DeviceError when the driver says no.
    """

    name: str
    """`cuda:0`, `twin`."""

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int]:
        """Free and total memory of the device."""

    @abstractmethod
    def allocate(self, length_bytes: int) -> Span:
        """Memory of the device, aligned to 4096 bytes or better. Belongs to the driver until `free`."""

    @abstractmethod
    def free(self, span: Span) -> None: ...

    @abstractmethod
    def pin(self, memory: np.ndarray) -> bool:
        """Lock host memory for transfers; False (and slower copies) where that cannot be done."""

    @abstractmethod
    def unpin(self, memory: np.ndarray) -> None: ...

    @abstractmethod
    def owns(self, tensor: Any) -> bool:
        """Whether a torch tensor lies in this device's memory."""

    @abstractmethod
    def make_stream(self) -> Stream: ...

    @abstractmethod
    def drop_stream(self, stream: Stream) -> None:
        """Give a stream back; what is enqueued on it still ends."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which the calling thread's own work (torch's) is enqueued."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that happens when all that is enqueued on `stream` by now has ended."""

    @abstractmethod
    def release(self, event: Event) -> None:
        """Give the event back; it must not be used afterwards."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on `stream` begin only after `event`. The calling thread does not wait."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Whether `event` has happened."""

    @abstractmethod
    def synchronize(self, event: Event) -> None:
        """Block the calling thread until `event` has happened; sleeps, and holds no GIL."""

    def finish(self, stream: Stream) -> None:
        """Block the calling thread until all that is enqueued on `stream` by now has ended."""
        event = self.record(stream)
        self.synchronize(event)
        self.release(event)

    @abstractmethod
    def call(self, stream: Stream, function: int, argument: int) -> None:
        """Call the native function at address `function` (`void (*)(void *)`) when `stream` gets here. It must not use the
        device. It is never called when the device fails before."""

    @abstractmethod
    def copy(self, destination: int, source: int, length_bytes: int, stream: Stream) -> None:
        """Copy between any two addresses of host (pinned) and device memory."""

    @abstractmethod
    def fill(self, address: int, value: int, length_bytes: int, stream: Stream) -> None:
        """Set bytes of device memory."""

    @abstractmethod
    def array(self, span: Span) -> Any:
        """The span as an object that array libraries accept (`__cuda_array_interface__`, or numpy's)."""

    @property
    @abstractmethod
    def has_kernels(self) -> bool:
        """Whether `launch` works here (a compiler was found). Slow when asked first: it compiles."""

    @abstractmethod
    def launch(self, kernel: str, threads: int, arguments: Sequence[np.ndarray], stream: Stream) -> None:
        """Run a kernel of `kernels.cu` with at least `threads` threads. Each argument is an array whose bytes are the
        value of one parameter."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
