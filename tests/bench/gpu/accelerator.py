"""The device that is measured: a GPU, or tensors in host memory, which prove the measurements right and say nothing else."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.device.driver import CudaDriver, Driver


class Accelerator:
    def __init__(self, *, cpu: bool) -> None:
        import torch

        self.is_gpu = not cpu
        self.driver: Driver = Driver() if cpu else CudaDriver(0)
        self.torch_device = "cpu" if cpu else "cuda:0"
        self.name = "cpu" if cpu else torch.cuda.get_device_name(0)
        self._pinned: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an unset tensor in device memory."""
        import torch

        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def random(self, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
        """Return a tensor of random bytes (of random normal numbers, where the dtype has 16 bits or more)."""
        import torch

        tensor = self.empty(shape, dtype)
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        if dtype.is_floating_point and dtype.itemsize >= 2:
            tensor.normal_(generator=generator)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        return tensor

    def pinned(self, length_bytes: int) -> Any:
        """Return page-locked host memory as a tensor uint8[length_bytes]."""
        import torch

        memory = torch.empty(length_bytes, dtype=torch.uint8)
        memory.zero_()
        view: np.ndarray = memory.numpy()
        self.driver.pin(view, length_bytes)
        self._pinned.append(memory)
        return memory

    def synchronize(self) -> None:
        """Wait until all work of all streams has ended."""
        import torch

        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the time from an idle device until all that `work` enqueued has ended."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        import torch

        if not self.is_gpu:
            return {"device": self.name, "torch": torch.__version__}
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
        }


def _driver_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if "." in word and word.replace(".", "").isdigit()), None)
