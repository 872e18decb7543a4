"""The kernels compile for every GPU in use, and a GPU that is there has them."""

import re
import subprocess
import sys

import pytest

from tiercache.device.cuda import CudaDriver

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
KERNELS = {"paged_16", "paged_8", "paged_4", "paged_2", "paged_1", "xxh3_blocks", "xxh3_fold"}


def compiled_for(capability: tuple[int, int]) -> str:
    """Compile in a process of its own: NVRTC crashes in one that has loaded kvikio."""
    code = f"""
from tiercache.device.driver import DeviceError
from tiercache.device.nvrtc import compile_for_gpu
try:
    binary, names = compile_for_gpu({capability})
    print(binary[:4], *sorted(names))
except DeviceError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda found: f"sm_{found[0]}{found[1]}")
def test_kernels_compile(capability: tuple[int, int]) -> None:
    assert compiled_for(capability) == " ".join([r"b'\x7fELF'", *sorted(KERNELS)])


def test_unknown_gpus_are_refused() -> None:
    assert re.search("gpu-architecture|was not found", compiled_for((1, 0)))


@pytest.mark.needs("GPU")
def test_a_gpu_has_kernels(gpu: CudaDriver) -> None:
    assert gpu.has_kernels
    assert gpu.compute_capability() >= (7, 5)
