"""The pinned page and the device memory that each thread has for headers and digests."""

import numpy as np
import pytest

from tiercache.device.device import Device
from tiercache.device.driver import DeviceError
from tiercache.device.twin import TwinDriver
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.cufile import CuFileFiles


async def test_a_page_that_could_not_be_pinned_is_not_unpinned(
    driver: TwinDriver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpin(memory: np.ndarray) -> None:
        raise DeviceError("cuMemHostUnregister: it is not registered")

    monkeypatch.setattr(driver, "unpin", unpin)
    driver.can_pin = False
    free_bytes, _ = driver.memory_bytes()
    files = CuFileFiles(driver, device.pool.memory, CHUNK_BYTES, 2)

    files._scratch()
    files.close()

    assert driver.memory_bytes()[0] == free_bytes


async def test_memory_that_the_device_does_not_have_leaves_no_page_pinned(
    driver: TwinDriver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = []
    monkeypatch.setattr(driver, "pin", pinned.append)
    monkeypatch.setattr(driver, "total_bytes", driver.total_bytes - driver.memory_bytes()[0])
    files = CuFileFiles(driver, device.pool.memory, CHUNK_BYTES, 2)

    with pytest.raises(DeviceError, match="out of memory"):
        files._scratch()

    files.close()
    assert not pinned
