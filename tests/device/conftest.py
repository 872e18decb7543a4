"""The CPU twin, and tensors in its memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tiercache.device.twin import TwinDriver


@pytest.fixture
def driver() -> Iterator[TwinDriver]:
    driver = TwinDriver(256 << 20)
    yield driver
    driver.close()


@pytest.fixture
def tensor(driver: TwinDriver) -> Callable[..., Any]:
    """Makes a tensor of random bytes in the twin's memory."""
    import torch

    def make(shape: tuple[int, ...], dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
        count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        span = driver.allocate(-(-count // 4096) * 4096)
        memory = torch.from_numpy(driver.view(span))[:count]
        memory.copy_(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
        return memory.view(dtype).reshape(shape)

    return make
