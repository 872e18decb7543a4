"""CUDA through its driver library, by ctypes: no build step, and no call here holds the GIL while it waits.

Memory comes from `cuMemAlloc` and not from torch's allocator, so that the pool can be registered for GPUDirect Storage as
one allocation. Streams, events and addresses are the driver's own, which torch's can be handed in as.

Not cuda-python: what is wanted is some 30 functions, called a few times a batch, and one package for every
version of the driver. What a call costs either way has not been compared: no GPU was at hand.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.device.driver import DeviceError, Driver, Event, Span, Stream
from tiercache.device.nvrtc import compile_for_gpu
from tiercache.device.twin import KERNELS

logger = logging.getLogger("tiercache.device")

_SUCCESS, _OUT_OF_MEMORY, _NOT_READY = 0, 2, 600
_ALREADY_REGISTERED = 712
_EVENT_BLOCKING_SYNC_WITHOUT_TIMING = 0x1 | 0x2
_STREAM_NON_BLOCKING = 0x1
_HOST_REGISTER_PORTABLE = 0x1
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_CAPTURE_MODE_RELAXED = 2
_PAGE_BYTES = 4096
_THREADS_A_BLOCK = 256
_MOST_BLOCKS = 1024
# What says that the context is gone for good: driver shut down, ECC, NVLink, illegal address, launch failed, assertion, ...
_LOST = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class _CudaArray:
    """uint8[length] in device memory, for libraries that know the CUDA array interface (version 3)."""

    def __init__(self, span: Span) -> None:
        self.__cuda_array_interface__ = {
            "shape": (span.length_bytes,),
            "typestr": "|u1",
            "data": (span.address, False),
            "strides": None,
            "version": 3,
        }


class CudaDriver(Driver):
    """One GPU, in its primary context (the one that torch uses). Raises DeviceError when there is none.

    A thread that calls a method works on this GPU from then on, as after `torch.cuda.set_device`.
    """

    sources: tuple[Path, ...] = (KERNELS,)
    """What `launch` finds its kernels in."""

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None:
        self.name = f"cuda:{ordinal}"
        self.ordinal = ordinal
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"{self.name}: no NVIDIA driver: {error}") from error
        self._thread = threading.local()
        self._streams: list[int] = []
        self._events: list[int] = []
        self._allocated: dict[int, int] = {}
        self._kernels: dict[str, ctypes.c_void_p] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.attach()

    def attach(self) -> None:
        # Each time: whoever else uses the thread may have chosen another GPU.
        self._call("cuCtxSetCurrent", self._context)
        if not getattr(self._thread, "relaxed", False):
            # Or a question about an event would spoil a graph that an engine captures meanwhile in another thread.
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
            self._thread.relaxed = True

    # Memory

    def memory_bytes(self) -> tuple[int, int]:
        self.attach()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, length_bytes: int) -> Span:
        origin = self._allocate(length_bytes)
        if origin % _PAGE_BYTES:  # small ones are aligned to 256 bytes only
            self._call("cuMemFree_v2", ctypes.c_uint64(origin))
            origin = self._allocate(length_bytes + _PAGE_BYTES)
        address = -(-origin // _PAGE_BYTES) * _PAGE_BYTES
        self._allocated[address] = origin
        return Span(address, length_bytes)

    def _allocate(self, length_bytes: int) -> int:
        self.attach()
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length_bytes))
        return address.value

    def free(self, span: Span) -> None:
        self.attach()
        self._call("cuMemFree_v2", ctypes.c_uint64(self._allocated.pop(span.address)))

    def pin(self, memory: np.ndarray) -> bool:
        self.attach()
        status = self._cuda.cuMemHostRegister_v2(
            ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), _HOST_REGISTER_PORTABLE
        )
        if status not in (_SUCCESS, _ALREADY_REGISTERED):
            logger.warning(
                "%s: %.2f GB of host memory could not be pinned (%s); copies will be slower",
                self.name,
                memory.nbytes / 2**30,
                self._message(status),
            )
        return bool(status == _SUCCESS)

    def unpin(self, memory: np.ndarray) -> None:
        self.attach()
        self._call("cuMemHostUnregister", ctypes.c_void_p(memory.ctypes.data))

    def owns(self, tensor: Any) -> bool:
        return tensor.device.type == "cuda" and (tensor.device.index or 0) == self.ordinal

    # Streams and events

    def make_stream(self) -> Stream:
        self.attach()
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        assert stream.value is not None
        self._streams.append(stream.value)
        return stream.value

    def drop_stream(self, stream: Stream) -> None:
        self.attach()
        if stream in self._streams:
            self._streams.remove(stream)
            self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def current_stream(self) -> Stream:
        import torch

        return torch.cuda.current_stream(self.ordinal).cuda_stream

    def record(self, stream: Stream) -> Event:
        self.attach()
        event = self._event()
        try:
            self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))
        except DeviceError:
            self._events.append(event)
            raise
        return event

    def release(self, event: Event) -> None:
        self._events.append(event)

    def wait(self, stream: Stream, event: Event) -> None:
        self.attach()
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def query(self, event: Event) -> bool:
        self.attach()
        status = self._cuda.cuEventQuery(ctypes.c_void_p(event))
        if status == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def synchronize(self, event: Event) -> None:
        self.attach()
        self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def call(self, stream: Stream, function: int, argument: int) -> None:
        self.attach()
        self._call("cuLaunchHostFunc", ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument))

    def copy(self, destination: int, source: int, length_bytes: int, stream: Stream) -> None:
        self.attach()
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(destination),
            ctypes.c_uint64(source),
            ctypes.c_size_t(length_bytes),
            ctypes.c_void_p(stream),
        )

    def fill(self, address: int, value: int, length_bytes: int, stream: Stream) -> None:
        self.attach()
        self._call(
            "cuMemsetD8Async",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(length_bytes),
            ctypes.c_void_p(stream),
        )

    def array(self, span: Span) -> _CudaArray:
        return _CudaArray(span)

    # Kernels

    @property
    def has_kernels(self) -> bool:
        return bool(self._functions())

    def launch(self, kernel: str, threads: int, arguments: Sequence[np.ndarray], stream: Stream) -> None:
        self.attach()
        functions = self._functions()
        if kernel not in functions:
            raise DeviceError(f"{self.name}: there is no kernel {kernel}: NVRTC was not found or failed")
        # The driver copies the parameters before it returns.
        addresses = (ctypes.c_void_p * len(arguments))(*(argument.ctypes.data for argument in arguments))
        blocks = max(1, min(_MOST_BLOCKS, -(-threads // _THREADS_A_BLOCK)))
        width = min(_THREADS_A_BLOCK, threads)
        self._call(
            "cuLaunchKernel", functions[kernel], blocks, 1, 1, width, 1, 1, 0, ctypes.c_void_p(stream), addresses, None
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # The context may be lost by now; what cannot be given back goes with the process.
        self._cuda.cuCtxSetCurrent(self._context)
        for event in self._events:
            self._cuda.cuEventDestroy_v2(ctypes.c_void_p(event))
        self._events.clear()
        for stream in self._streams:
            self._cuda.cuStreamDestroy_v2(ctypes.c_void_p(stream))
        self._streams.clear()
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    def compute_capability(self) -> tuple[int, int]:
        values = []
        for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            values.append(value.value)
        return values[0], values[1]

    def _functions(self) -> dict[str, ctypes.c_void_p]:
        with self._lock:
            if self._kernels is None:
                self._kernels = self._load_kernels()
            return self._kernels

    def _load_kernels(self) -> dict[str, ctypes.c_void_p]:
        self.attach()
        functions = {}
        for source in self.sources:
            try:
                binary, names = compile_for_gpu(self.compute_capability(), source)
            except DeviceError as error:
                logger.warning("%s: no kernels, so paged copies go block by block: %s", self.name, error)
                return {}
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary))
            for name in names:
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
                functions[name] = function
        return functions

    def _event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            event = ctypes.c_void_p()
            self._call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING_SYNC_WITHOUT_TIMING)
            assert event.value is not None
            return event.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status == _SUCCESS:
            return
        advice = ": out of device memory" if status == _OUT_OF_MEMORY else ""
        raise DeviceError(f"{self.name}: {name}: {self._message(status)}{advice}", lost=status in _LOST)

    def _message(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return f"error {status} ({(text.value or b'unknown').decode()})"
