"""An accelerator through torch: its memory, its streams and events, and page-locked host memory for its copies.

Memory consists of torch tensors, so the same code runs on a GPU (`CudaDriver`) and on tensors in host memory (`Driver`,
for tests). torch is imported when the first driver is made.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from tiercache.errors import DeviceError

logger = logging.getLogger("tiercache.device")

Stream = Any
Event = Any
Tensor = Any
T = TypeVar("T")

PAGE_BYTES = 4096
_PIN_BYTES = 64 << 30
"""Largest registration in bytes; 512 GiB fails. A copy must not cross two registrations, so they end where slots do."""
_REGISTER_PORTABLE = 1
_SUCCESS, _ALREADY_REGISTERED = 0, 712
_CAPTURE_RELAXED = 2
# Errors after which the context is lost: driver shut down, ECC, NVLink, illegal address, launch failed, assertion, ...
_LOST = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class Driver:
    """A device. This base class uses host memory instead, for tests and debugging, and `enqueue` runs the work at once.

    `CudaDriver` is a GPU. Methods may be called from any thread, and raise DeviceError on errors of the device. Work on
    a stream runs in order. Only `empty`, `pin`, `unpin`, `synchronize` and `finish` block.
    """

    name = "cpu"
    """The device's name in torch, such as `cuda:0`."""

    def __init__(self, total_bytes: int = 1 << 40) -> None:
        self.total_bytes = total_bytes

    def memory_bytes(self) -> tuple[int, int]:
        """Return free and total memory of the device."""
        return self.total_bytes, self.total_bytes

    def empty(self, length_bytes: int) -> Tensor:
        """Return an uninitialized tensor uint8[length_bytes] in the device's memory, aligned to 4096 bytes."""
        import torch

        return _from_page(torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8), length_bytes)

    def owns(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in the device's memory."""
        return bool(tensor.device.type == "cpu")

    def pin(self, memory: np.ndarray, slot_bytes: int) -> bool:
        """Page-lock host memory, so that copies from and to it do not block the caller.

        Returns False if that fails; copies still work then, but are slower. No copy may cross a multiple of `slot_bytes`.
        """
        return True

    def unpin(self, memory: np.ndarray) -> None:
        """Undo `pin`. No copy of the memory may be running."""

    def make_stream(self) -> Stream:
        """Return a new stream, independent of all others."""

    def current_stream(self) -> Stream:
        """Return torch's current stream of the calling thread."""

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueue the torch operations of `work` on a stream."""
        work()

    def record(self, stream: Stream) -> Event:
        """Return an event that happens when all work given to `stream` so far has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on `stream` begin after `event`. The calling thread does not wait."""

    def query(self, event: Event) -> bool:
        """Return True if `event` has happened."""
        return True

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until `event` has happened; it sleeps and does not hold the GIL."""

    def finish(self, stream: Stream) -> None:
        """Block the calling thread, as `synchronize` does, until all work given to `stream` so far has ended."""

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy between uint8[n] tensors in device or host memory.

        Blocks until it has ended if host memory is not pinned.
        """
        self.enqueue(stream, lambda: destination.copy_(source, non_blocking=True))


class CudaDriver(Driver):
    """A GPU. Raises DeviceError if torch finds none.

    A thread that does device work here keeps this GPU as its current device, and may go on while another thread
    captures a CUDA graph.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.name = f"cuda:{ordinal}"
        try:
            import torch
        except ImportError as error:
            raise DeviceError(f"{self.name}: torch is not installed") from error
        if not torch.cuda.is_available() or ordinal >= torch.cuda.device_count():
            raise DeviceError(f"{self.name}: torch {torch.__version__} finds no NVIDIA driver, or no such GPU")
        self._torch = torch
        self.device = torch.device("cuda", ordinal)
        self._thread = threading.local()
        self._registered: dict[int, list[int]] = {}
        """Start addresses of the registrations that cover a block of memory, by the address of that block."""

    def memory_bytes(self) -> tuple[int, int]:
        with self._reported():
            free_bytes, total_bytes = self._torch.cuda.mem_get_info(self.device)
        return free_bytes, total_bytes

    def empty(self, length_bytes: int) -> Tensor:
        self._attach()
        with self._reported():
            memory = self._torch.empty(length_bytes + PAGE_BYTES, dtype=self._torch.uint8, device=self.device)
        return _from_page(memory, length_bytes)

    def owns(self, tensor: Tensor) -> bool:
        return bool(tensor.device == self.device)

    def pin(self, memory: np.ndarray, slot_bytes: int) -> bool:
        status = in_own_thread(lambda: self._register(memory, max(1, _PIN_BYTES // slot_bytes) * slot_bytes))
        if status != _SUCCESS:
            logger.warning(
                "%s: %.2f GB of host memory could not be pinned (cudaHostRegister: error %s); copies will be slower",
                self.name,
                memory.nbytes / 2**30,
                status,
            )
        return bool(status == _SUCCESS)

    def unpin(self, memory: np.ndarray) -> None:
        in_own_thread(lambda: self._unregister(memory.ctypes.data))

    def _register(self, memory: np.ndarray, piece_bytes: int) -> int:
        """Register all of the memory or none; return the status.

        Call it in a thread of its own: a failure leaves an error on the thread, which torch would report for its next
        kernel.
        """
        self._attach()
        cudart = self._torch.cuda.cudart()
        registered = self._registered.setdefault(memory.ctypes.data, [])
        for start in range(0, memory.nbytes, piece_bytes):
            address = memory.ctypes.data + start
            length_bytes = min(piece_bytes, memory.nbytes - start)
            status = int(
                getattr(found := cudart.cudaHostRegister(address, length_bytes, _REGISTER_PORTABLE), "value", found)
            )
            if status == _SUCCESS:
                registered.append(address)
            elif status != _ALREADY_REGISTERED:
                self._unregister(memory.ctypes.data)
                return status
        return _SUCCESS

    def _unregister(self, address: int) -> None:
        self._attach()
        for registered in self._registered.pop(address, []):
            self._torch.cuda.cudart().cudaHostUnregister(registered)

    def make_stream(self) -> Stream:
        self._attach()
        with self._reported():
            return self._torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        return self._torch.cuda.current_stream(self.device)

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        self._attach()
        with self._reported(), self._torch.cuda.stream(stream):
            work()

    def record(self, stream: Stream) -> Event:
        with self._reported():
            event = self._torch.cuda.Event(blocking=True)  # `torch.Event(blocking=True)` would spin
            event.record(stream)
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self._reported():
            stream.wait_event(event)

    def query(self, event: Event) -> bool:
        self._relax()
        with self._reported():
            return bool(event.query())

    def synchronize(self, event: Event) -> None:
        self._attach()
        with self._reported():
            event.synchronize()

    def finish(self, stream: Stream) -> None:
        self._attach()
        with self._reported():
            stream.synchronize()

    def _attach(self) -> None:
        """Make the calling thread, which belongs to the cache, use this GPU."""
        if not getattr(self._thread, "attached", False):
            self._relax()
            self._torch.cuda.set_device(self.device)
            self._thread.attached = True

    def _relax(self) -> None:
        """Let the calling thread query events while another thread captures a CUDA graph; CUDA forbids it by default."""
        if not getattr(self._thread, "relaxed", False):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))
            self._thread.relaxed = True

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            code = getattr(error, "error_code", None)
            unknown = code is None and isinstance(error, getattr(self._torch, "AcceleratorError", ()))
            lines = str(error).splitlines() or [repr(error)]
            raise DeviceError(f"{self.name}: {lines[0]}", lost=unknown or code in _LOST) from error


def gpu_in_use() -> int | None:
    """Return the GPU that the calling thread uses through torch; None if this process uses none yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def host_tensor(memory: np.ndarray) -> Tensor:
    """Return a tensor uint8[n] over host memory, which may be read-only. It keeps the memory mapped."""
    import torch

    buffer = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    buffer.memory = memory  # type: ignore[attr-defined]
    return torch.from_numpy(np.ctypeslib.as_array(buffer))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of any dtype as uint8[n]."""
    import torch

    size = tensor.element_size()
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))


def _from_page(memory: Tensor, length_bytes: int) -> Tensor:
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + length_bytes]


def in_own_thread(call: Callable[[], T]) -> T:
    """Run `call` in a new thread, free of CUDA errors and memory pools of other code. Return its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tiercache-device", daemon=True).start()
    return future.result()
