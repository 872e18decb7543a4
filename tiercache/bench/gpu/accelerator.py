"""The device that is measured: a GPU through torch and our driver, or the CPU twin, which proves the measurements right."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.device.cuda import CudaDriver
from tiercache.device.driver import Driver, Span, Stream
from tiercache.device.twin import KERNELS, TwinDriver

_ROUNDS = 200


@dataclass(frozen=True)
class Moment:
    """The same moment on two clocks, in nanoseconds: the one that writes stamps, and `time.perf_counter_ns`."""

    device_ns: int
    host_ns: int
    error_ns: int
    """By how much they may not be the same."""

    def to_host(self, stamp: int, later: Moment) -> float:
        """A stamp between this moment and a later one, on the host's clock. Their speeds differ by a few millionths."""
        passed = later.device_ns - self.device_ns
        speed = (later.host_ns - self.host_ns) / passed if passed else 1.0
        return self.host_ns + (stamp - self.device_ns) * speed


class Accelerator(ABC):
    name: str
    driver: Driver
    torch_device: str

    def random(self, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
        """A tensor of random bytes (of random normal numbers, where the dtype has 16 bits or more) in device memory."""
        import torch

        tensor = self.empty(shape, dtype)
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        if dtype.is_floating_point and dtype.itemsize >= 2:
            tensor.normal_(generator=generator)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        return tensor

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An unset tensor in device memory."""

    @abstractmethod
    def pinned(self, length_bytes: int) -> np.ndarray:
        """uint8[length_bytes] of page-locked host memory that the device can write to."""

    @abstractmethod
    def synchronize(self) -> None:
        """Until all work of all streams has ended."""

    @abstractmethod
    def work(self, stream: Stream, duration_s: float, stamps: np.ndarray, position: int) -> None:
        """Enqueue work of that length which writes to stamps[position] (int64, pinned) when it ended."""

    @abstractmethod
    def clock(self) -> Moment:
        """Now, on the clock that writes stamps and on the host's. The device must be idle."""

    def seconds(self, work: Callable[[], None]) -> float:
        """From an idle device until all that `work` enqueued has ended."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        return {"device": self.name}


class Twin(Accelerator):
    torch_device = "cpu"

    def __init__(self) -> None:
        self.driver: TwinDriver = TwinDriver(1 << 30)
        self.name = self.driver.name

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        length = torch.Size(shape).numel() * dtype.itemsize
        memory = self.driver.view(self.driver.allocate(max(1, -(-length // 4096)) * 4096))
        return torch.from_numpy(memory)[:length].view(dtype).reshape(shape)

    def pinned(self, length_bytes: int) -> np.ndarray:
        return np.zeros(length_bytes, dtype=np.uint8)

    def synchronize(self) -> None:
        for stream in list(self.driver._streams):
            self.driver.synchronize(self.driver.record(stream))

    def work(self, stream: Stream, duration_s: float, stamps: np.ndarray, position: int) -> None:
        def sleep_and_stamp() -> None:
            time.sleep(duration_s)
            stamps[position] = time.perf_counter_ns()

        stream.enqueue(sleep_and_stamp)

    def clock(self) -> Moment:
        now = time.perf_counter_ns()
        return Moment(now, now, 0)


class _StampingDriver(CudaDriver):
    sources = (KERNELS, Path(__file__).with_name("stamp.cu"))


class Cuda(Accelerator):
    torch_device = "cuda:0"

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        self.driver = _StampingDriver(0)
        self.name = torch.cuda.get_device_name(0)
        self._pinned: list[Any] = []
        self._flag, self._answers = self.pinned(8).view(np.uint64), self.pinned(_ROUNDS * 8).view(np.int64)
        self._asking = self.driver.make_stream()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, length_bytes: int) -> np.ndarray:
        import torch

        memory = torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)
        memory.zero_()
        self._pinned.append(memory)
        view: np.ndarray = memory.numpy()
        return view

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def work(self, stream: Stream, duration_s: float, stamps: np.ndarray, position: int) -> None:
        arguments = [
            np.array([round(duration_s * 1e9)], dtype=np.uint64),
            np.array([stamps.ctypes.data + position * stamps.itemsize], dtype=np.uint64),
        ]
        self.driver.launch("spin_and_stamp", 1, arguments, stream)

    def facts(self) -> dict[str, Any]:
        import torch

        properties = torch.cuda.get_device_properties(0)
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return {
            "device": self.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "device_memory_gb": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver_version(),
            "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "kernels": self.driver.has_kernels,
        }

    def clock(self) -> Moment:
        """A kernel is asked for the time, many times; the answer that took the shortest is the nearest to both clocks."""
        self._flag[0] = 0
        self._answers[:] = 0
        arguments = [self._flag.ctypes.data, self._answers.ctypes.data, _ROUNDS]
        self.driver.launch("answer", 1, [np.array([each], dtype=np.uint64) for each in arguments], self._asking)
        best: Moment | None = None
        limit_ns = time.perf_counter_ns() + 2_000_000_000
        for number in range(1, _ROUNDS + 1):
            asked = time.perf_counter_ns()
            self._flag[0] = number
            while not self._answers[number - 1]:
                if time.perf_counter_ns() > limit_ns:
                    raise RuntimeError("the GPU's clock does not answer")
            answered = time.perf_counter_ns()
            if best is None or answered - asked < 2 * best.error_ns:
                best = Moment(int(self._answers[number - 1]), (asked + answered) // 2, (answered - asked) // 2)
        self.synchronize()
        assert best is not None
        return best


def open_accelerator(*, twin: bool) -> Accelerator:
    return Twin() if twin else Cuda()


def span_of(tensor: Any) -> Span:
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    words = text.split()
    found = next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
    if found is None:
        import subprocess

        try:
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
        except (OSError, subprocess.SubprocessError):
            return None
    return found or None
