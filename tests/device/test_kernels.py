"""The kernels compile for every GPU in use, and a GPU that is there has them."""

import pytest

from tiercache.device.cuda import CudaDriver
from tiercache.device.driver import DeviceError
from tiercache.device.nvrtc import compile_for_gpu

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
KERNELS = {"paged_16", "paged_8", "paged_4", "paged_2", "paged_1", "xxh3_blocks", "xxh3_fold"}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda found: f"sm_{found[0]}{found[1]}")
def test_kernels_compile(capability: tuple[int, int]) -> None:
    binary, names = compile_for_gpu(capability)
    assert binary.startswith(b"\x7fELF")
    assert set(names) == KERNELS


def test_unknown_gpus_are_refused() -> None:
    with pytest.raises(DeviceError, match="gpu-architecture|was not found"):
        compile_for_gpu((1, 0))


@pytest.mark.needs("GPU")
def test_a_gpu_has_kernels(gpu: CudaDriver) -> None:
    assert gpu.has_kernels
    assert gpu.compute_capability() >= (7, 5)
