"""GDS tiers on tensors in host memory, over pinned memory and over the real kvikio in its compatibility mode."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.device.twin import TwinDriver
from tests.tiers.test_disk import FINGERPRINT
from tiercache.core.header import aligned
from tiercache.device.device import Device
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers import gds
from tiercache.tiers.gds import DeviceFiles, GdsSettings, GdsTier, KvikioFiles, import_kvikio
from tiercache.tiers.weka import WekaSettings, WekaTier

THREADS = 2


@pytest.fixture
def driver() -> Iterator[TwinDriver]:
    driver = TwinDriver(256 << 20)
    yield driver
    driver.close()


@pytest.fixture
async def device(driver: TwinDriver) -> AsyncIterator[Device]:
    device = Device(driver, CHUNK_BYTES, 4 << 20)
    yield device
    device.close()


@pytest.fixture(scope="session")
def kvikio(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The real kvikio, on a machine without a driver over a stub of its library."""
    os.environ["KVIKIO_COMPAT_MODE"] = "ON"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None
        library = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
        source = Path(__file__).with_name("stub_libcuda.c")
        command = [compiler, "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=60)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # found by its name from now on
    return import_kvikio()


@pytest.fixture(params=["posix", pytest.param("cufile", marks=pytest.mark.needs("g++"))])
def files(request: pytest.FixtureRequest, driver: TwinDriver, device: Device) -> DeviceFiles:
    if request.param == "posix":
        return DeviceFiles(driver, CHUNK_BYTES, 2 * THREADS)
    request.getfixturevalue("kvikio")
    return KvikioFiles(driver, device.pool.memory, CHUNK_BYTES, 2 * THREADS)


@pytest.fixture(params=["gds", "weka"])
def opened(
    request: pytest.FixtureRequest, device: Device, files: DeviceFiles, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Opens a tier on a directory; its files move as those of `files` do."""

    async def works(directories: object, driver: object) -> str:
        return ""

    monkeypatch.setattr(gds, "probe_gds", works)

    @asynccontextmanager
    async def make(
        directory: Path, cap_bytes: int = 64 << 20, fingerprint: bytes = FINGERPRINT
    ) -> AsyncIterator[GdsTier]:
        common = {"threads": THREADS, "chunk_bytes": CHUNK_BYTES, "way": files.name}
        if request.param == "gds":
            tier = GdsTier(GdsSettings((directory,), cap_bytes, **common), fingerprint, device)
        else:
            settings = WekaSettings((directory,), cap_bytes, direct=None, **common)
            tier = WekaTier(settings, fingerprint, device)
        await tier.open()
        try:
            yield tier
        finally:
            await tier.close()

    return make


class Slots:
    """Slots of the pool as a test uses them: filled, and looked at."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def filled(self, payload: np.ndarray) -> Any:
        """A slot that holds `payload`, padded with zeroes."""
        slot = self.empty()
        slot[: payload.nbytes] = torch.from_numpy(payload.copy())
        slot[payload.nbytes : aligned(payload.nbytes)] = 0
        return slot

    def empty(self) -> Any:
        slot = self.device.pool.take()
        assert slot is not None
        return self.device.pool.view(slot).fill_(0xEE)

    def content(self, slot: Any, length: int) -> np.ndarray:
        return slot[:length].numpy().copy()


@pytest.fixture
def slots(device: Device) -> Slots:
    return Slots(device)
