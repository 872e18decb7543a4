"""The CPU twin of a device: host memory, streams that are threads, and the same kernels compiled by the C++ compiler.

Tests run everything above the driver on it, signals from "device" threads through file descriptors included. Work on a
stream runs in order and at some later time, never in the call that enqueues it: code that forgets an event fails here too.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tiercache.device.driver import DeviceError, Driver, Event, Span, Stream
from tiercache.errors import ConfigError

logger = logging.getLogger("tiercache.device")

KERNELS = Path(__file__).with_name("kernels.cu")
_THREADS_A_BLOCK = 256
_BLOCKS = 16
_LOOK_S = 0.05


class TwinStream:
    """A daemon thread that runs what it is given, in order. `lose` breaks it as a GPU breaks."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
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
    """`memory_bytes` is what the twin pretends to have. `lost` makes every later call fail, as a GPU that fell off its bus
    does: what is enqueued never ends."""

    def __init__(self, total_bytes: int = 1 << 30, name: str = "twin") -> None:
        self.name = name
        self.total_bytes = total_bytes
        self._mappings: dict[int, mmap.mmap] = {}
        self._adopted: list[Span] = []
        self._streams: list[TwinStream] = []
        self.can_pin = True
        """What `pin` answers."""
        self._lost = threading.Event()
        self._kernels: ctypes.CDLL | None = None
        self._sought = False
        self._lock = threading.Lock()
        self._closed = False
        self._never_called: list[Callable[[], None]] | None = []
        self._idle = self.make_stream()

    # Faults, for tests

    def lose(self) -> None:
        """From now on nothing works and nothing ends."""
        self._lost.set()

    # Memory

    def memory_bytes(self) -> tuple[int, int]:
        self._check()
        return self.total_bytes - sum(len(mapping) for mapping in self._mappings.values()), self.total_bytes

    def allocate(self, length_bytes: int) -> Span:
        if length_bytes > self.memory_bytes()[0]:
            raise DeviceError(f"{self.name}: out of memory: {length_bytes} bytes asked, {self.memory_bytes()[0]} free")
        mapping = mmap.mmap(-1, length_bytes)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self._mappings[address] = mapping
        return Span(address, length_bytes)

    def free(self, span: Span) -> None:
        self._mappings.pop(span.address, None)

    def adopt(self, memory: Span) -> None:
        """Treat host memory that somebody else allocated, and keeps, as the device's own."""
        self._adopted.append(memory)

    def view(self, span: Span) -> np.ndarray:
        """The span's bytes, uint8[length]. Of the twin only: the memory of a GPU has no such view."""
        return host_view(span.address, span.length_bytes)

    def pin(self, memory: np.ndarray) -> bool:
        return self.can_pin

    def unpin(self, memory: np.ndarray) -> None: ...

    def owns(self, tensor: Any) -> bool:
        address = tensor.data_ptr()
        spans = [(start, len(mapping)) for start, mapping in list(self._mappings.items())]
        spans += [(span.address, span.length_bytes) for span in self._adopted]
        return any(start <= address < start + length for start, length in spans)

    # Streams and events

    def make_stream(self) -> TwinStream:
        stream = TwinStream(f"tiercache-{self.name}-stream-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def drop_stream(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            stream.close()

    def current_stream(self) -> Stream:
        return self._idle

    def record(self, stream: Stream) -> TwinEvent:
        self._check()
        event = TwinEvent()
        self._enqueue(stream, event.happened.set)
        return event

    def release(self, event: Event) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        self._check()
        stream.enqueue(lambda: self._await(event))

    def query(self, event: Event) -> bool:
        self._check()
        return bool(event.happened.is_set())

    def synchronize(self, event: Event) -> None:
        while not event.happened.wait(_LOOK_S):
            self._check()

    def call(self, stream: Stream, function: int, argument: int) -> None:
        self._check()
        native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)

        def work() -> None:
            native(argument)

        stream.enqueue(lambda: self._keep_from_being_called(work) if self._lost.is_set() else work())

    def copy(self, destination: int, source: int, length_bytes: int, stream: Stream) -> None:
        self._check()
        self._enqueue(
            stream, lambda: np.copyto(host_view(destination, length_bytes), host_view(source, length_bytes))
        )

    def fill(self, address: int, value: int, length_bytes: int, stream: Stream) -> None:
        self._check()
        self._enqueue(stream, lambda: host_view(address, length_bytes).fill(value))

    def array(self, span: Span) -> np.ndarray:
        return self.view(span)

    # Kernels

    @property
    def has_kernels(self) -> bool:
        return self._library() is not None

    def launch(self, kernel: str, threads: int, arguments: Sequence[np.ndarray], stream: Stream) -> None:
        self._check()
        library = self._library()
        if library is None:
            raise DeviceError(f"{self.name}: no C++ compiler was found, so there are no kernels")
        function = getattr(library, f"launch_{kernel}")
        values = [argument.copy() for argument in arguments]  # the caller may change its own at once
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        blocks = max(1, min(_BLOCKS, -(-threads // _THREADS_A_BLOCK)))

        def run(values: list[np.ndarray] = values) -> None:
            function(ctypes.c_uint(blocks), ctypes.c_uint(_THREADS_A_BLOCK), addresses)

        self._enqueue(stream, run)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for stream in self._streams:
                stream.close()
            with self._lock:
                never_called, self._never_called = self._never_called, None
            for work in never_called or ():
                work()

    def _keep_from_being_called(self, work: Callable[[], None]) -> None:
        """A lost device calls nobody; a driver that is unloaded lets go of what its callbacks own."""
        with self._lock:
            if self._never_called is not None:
                self._never_called.append(work)
                return
        work()

    def _await(self, event: TwinEvent) -> None:
        """A lost device waits for nothing: its events never happen."""
        while not event.happened.wait(_LOOK_S) and not self._lost.is_set():
            pass

    def _enqueue(self, stream: Stream, work: Callable[[], Any]) -> None:
        """A lost device does nothing with what it already has."""
        stream.enqueue(lambda: None if self._lost.is_set() else work())

    def _check(self) -> None:
        if self._lost.is_set():
            raise DeviceError(f"{self.name}: the device is lost", lost=True)

    def _library(self) -> ctypes.CDLL | None:
        with self._lock:
            if not self._sought:
                self._sought = True
                self._kernels = compile_for_host()
            return self._kernels


def host_view(address: int, length_bytes: int) -> np.ndarray:
    """uint8[length_bytes] over host memory at an address. The caller keeps the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def compile_for_host() -> ctypes.CDLL | None:
    """The kernels as a shared library, from a cache of compiled ones (by digest); None without a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    digest = hashlib.blake2b(KERNELS.read_bytes() + compiler.encode(), digest_size=12).hexdigest()
    library = Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}" / f"kernels-{digest}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        if library.parent.stat().st_uid != os.getuid():
            raise ConfigError(f"{library.parent}: belongs to another user; remove it")
        unfinished = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        command = [compiler, "-std=c++17", "-O3", "-shared", "-fPIC", "-x", "c++", "-DTIERCACHE_TWIN"]
        try:
            subprocess.run([*command, "-o", unfinished, KERNELS], check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the kernels could not be compiled for the host: %s", getattr(error, "stderr", None) or error)
            return None
        unfinished.rename(library)
    return ctypes.CDLL(str(library))
