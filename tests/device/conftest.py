"""The devices at hand - the CPU twin, and a GPU where there is one - and tensors in their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.needs import has_gpu
from tiercache.device.cuda import CudaDriver
from tiercache.device.driver import Driver
from tiercache.device.twin import TwinDriver


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    """The first GPU, once for all tests: its kernels take half a second to compile."""
    driver = CudaDriver(0)
    yield driver
    driver.close()


@pytest.fixture(params=["twin", "cuda"] if has_gpu() else ["twin"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "cuda":
        yield request.getfixturevalue("gpu")
        return
    driver = TwinDriver(256 << 20)
    yield driver
    driver.close()


@pytest.fixture
def tensor(driver: Driver) -> Callable[..., Any]:
    """Makes a tensor of random bytes in the device's memory, complete when it is returned."""
    import torch

    def make(shape: tuple[int, ...], dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        values = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        if isinstance(driver, TwinDriver):
            memory = torch.from_numpy(driver.view(driver.allocate(-(-count // 4096) * 4096)))[:count]
        else:
            memory = torch.empty(count, dtype=torch.uint8, device="cuda:0")
        memory.copy_(values)
        settle(driver)
        return memory.view(dtype).reshape(shape)

    return make


def settle(driver: Driver) -> None:
    """Wait for what torch has enqueued: streams of ours do not wait for torch's by themselves."""
    driver.synchronize(driver.record(driver.current_stream()))
