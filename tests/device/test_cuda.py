"""CudaDriver as it calls the driver library, on a stub of it that is built here and refuses what a GPU's would refuse."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiercache.device.cuda import CudaDriver
from tiercache.device.driver import DeviceError
from tiercache.device.events import EventBridge
from tiercache.device.twin import compile_for_host, host_view

pytestmark = pytest.mark.needs("g++")

MIB = 1 << 20


class Stub:
    """The library, and what it says is alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"stub_{name}").value

    def fail(self, name: str, status: int) -> None:
        self.library.stub_fail(name.encode(), status)

    def alive(self) -> list[int]:
        return [self.count(name) for name in ("contexts", "streams", "events", "allocations", "registered")]


def build(directory: Path, name: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    library = directory / name
    source = Path(__file__).with_name("stub_libcuda.c")
    command = [compiler, "-w", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("stub"), "libstub.so")


@pytest.fixture
def stub(library: Path) -> Iterator[Stub]:
    stub = Stub(library)
    before = stub.alive()
    yield stub
    stub.fail("", 0)
    assert stub.alive() == before, "all is given back"


@pytest.fixture
def driver(stub: Stub) -> Iterator[CudaDriver]:
    driver = CudaDriver(library=str(stub.path))
    yield driver
    stub.fail("", 0)
    driver.close()
    driver.close()


def test_memory_begins_at_a_page(driver: CudaDriver, stub: Stub) -> None:
    assert driver.memory_bytes() == (3 << 32, 1 << 36)
    spans = [driver.allocate(length) for length in (1, 4096, MIB)]
    assert all(span.address % 4096 == 0 for span in spans)
    assert [span.length_bytes for span in spans] == [1, 4096, MIB]
    assert stub.count("allocations") == 3
    for span in spans:
        driver.free(span)


def test_what_does_not_fit(driver: CudaDriver) -> None:
    with pytest.raises(
        DeviceError, match=r"cuda:0: cuMemAlloc_v2: error 2 \(out of memory\): out of device memory"
    ) as caught:
        driver.allocate(1 << 33)
    assert not caught.value.lost


def test_copies_and_fills_between_any_addresses(driver: CudaDriver) -> None:
    stream = driver.make_stream()
    device, host = driver.allocate(MIB), np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    back = np.zeros_like(host)
    driver.copy(device.address, host.ctypes.data, MIB, stream)
    driver.fill(device.address + 100, 0xAB, 50, stream)
    driver.copy(back.ctypes.data, device.address, MIB, stream)
    event = driver.record(stream)
    driver.synchronize(event)
    driver.release(event)
    host[100:150] = 0xAB
    assert np.array_equal(back, host)
    driver.free(device)


def test_memory_is_pinned_once(driver: CudaDriver, stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    memory = np.zeros(MIB, np.uint8)
    assert driver.pin(memory)
    assert not driver.pin(memory), "pinned by somebody else: not ours to unpin"
    assert not caplog.records
    driver.unpin(memory)
    stub.fail("cuMemHostRegister_v2", 2)
    with caplog.at_level(logging.WARNING):
        assert not driver.pin(memory)
    assert "could not be pinned (error 2 (out of memory))" in caplog.text


def test_events_are_used_again(driver: CudaDriver, stub: Stub) -> None:
    stream, other = driver.make_stream(), driver.make_stream()
    for _ in range(5):
        event = driver.record(stream)
        driver.wait(other, event)
        assert driver.query(event)
        driver.release(event)
    assert stub.count("events") == 1
    with pytest.raises(DeviceError, match="cuEventRecord: error 400"):
        driver.record(ctypes.addressof(ctypes.create_string_buffer(8)))
    assert stub.count("events") == 1


def test_the_null_stream_is_a_stream(driver: CudaDriver) -> None:
    event = driver.record(0)
    driver.wait(driver.make_stream(), event)
    assert driver.query(event)
    driver.release(event)


def test_every_thread_may_call_and_whatever_context_it_had(driver: CudaDriver, stub: Stub) -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            driver.free(driver.allocate(10))
            stub.library.stub_use_another_context()
            driver.release(driver.record(driver.make_stream()))
        except Exception as error:
            failures.append(error)

    relaxed = stub.count("relaxed")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert stub.count("relaxed") == relaxed + 4, "no captured graph of another thread is spoilt"


@pytest.mark.parametrize(("status", "lost"), [(700, True), (719, True), (214, True), (400, False), (12345, False)])
def test_an_error_says_whether_the_device_is_lost(driver: CudaDriver, stub: Stub, status: int, lost: bool) -> None:
    event = driver.record(0)
    stub.fail("cuEventQuery", status)
    with pytest.raises(DeviceError, match=f"cuEventQuery: error {status}") as caught:
        driver.query(event)
    assert caught.value.lost == lost
    driver.release(event)


def test_close_after_the_device_was_lost(driver: CudaDriver, stub: Stub) -> None:
    driver.release(driver.record(driver.make_stream()))
    stub.fail("cuCtxSetCurrent", 700)
    driver.close()


async def test_events_are_awaited(driver: CudaDriver) -> None:
    bridge = EventBridge(driver)
    stream = driver.make_stream()
    await asyncio.wait_for(asyncio.gather(*(bridge.after(stream) for _ in range(100))), 20)
    bridge.close()
    for thread in threading.enumerate():
        if "cuda:0-events" in thread.name:
            thread.join(10)


async def test_a_failing_device_fails_who_waits(driver: CudaDriver, stub: Stub) -> None:
    bridge = EventBridge(driver)
    stub.fail("cuEventQuery", 719)
    with pytest.raises(DeviceError, match="cuEventQuery: error 719") as caught:
        await asyncio.wait_for(bridge.after(driver.make_stream()), 20)
    assert caught.value.lost
    stub.fail("", 0)
    stub.fail("cuLaunchHostFunc", 801)
    with pytest.raises(DeviceError, match="cuLaunchHostFunc: error 801"):
        bridge.after(driver.make_stream())
    bridge.close()


def test_no_driver_library() -> None:
    with pytest.raises(DeviceError, match="cuda:0: no NVIDIA driver: libnot-there.so"):
        CudaDriver(library="libnot-there.so")


def test_no_such_gpu(stub: Stub) -> None:
    with pytest.raises(DeviceError, match="cuda:1: cuDeviceGet: error 101"):
        CudaDriver(1, library=str(stub.path))


_WITH_KERNELS = """
import sys, ctypes
import numpy as np, torch, xxhash
ctypes.CDLL("libnvrtc.so.13")
from tiercache.device import checksum
from tiercache.device.cuda import CudaDriver
from tiercache.device.driver import Span
from tiercache.device.paged import PagedKv
from tiercache.testing.paged import gather_reference, scatter_reference

class OfHostTensors(CudaDriver):
    def owns(self, tensor):
        return True
    def current_stream(self):
        return 0

driver = OfHostTensors()
assert driver.compute_capability() == (9, 0)
assert driver.has_kernels
stream = driver.make_stream()
layers = [torch.randint(0, 256, (2, 24, 4, 16, 32), dtype=torch.uint8) for _ in range(3)]
kv = PagedKv(driver, layers, "HND")
chunk = torch.zeros(50 * kv.bytes_per_token, dtype=torch.uint8)
kv.gather([3, 1, 4, 15], 5, 50, Span(chunk.data_ptr(), chunk.numel()), stream, kernel=True)
assert torch.equal(chunk, gather_reference(kv, [3, 1, 4, 15], 5, 50).reshape(-1))
other = PagedKv(driver, [torch.zeros_like(layer) for layer in layers], "HND")
other.scatter(Span(chunk.data_ptr(), chunk.numel()), 50, 0, [9, 2, 6, 5], 0, 50, stream, kernel=True)
assert torch.equal(gather_reference(other, [9, 2, 6, 5], 0, 50).reshape(-1), chunk)
scratch = torch.zeros(checksum.scratch_bytes(chunk.numel()), dtype=torch.uint8)
result = checksum.begin(
    driver, Span(chunk.data_ptr(), chunk.numel()), Span(scratch.data_ptr(), scratch.numel()), stream
)
digest = checksum.finish(scratch[:64].numpy().view(np.uint64), chunk.numel())
assert digest == xxhash.xxh3_64_intdigest(chunk.numpy())
driver.close()
print("all equal")
"""


def test_kernels_are_loaded_and_launched(tmp_path: Path) -> None:
    """In a process that finds the stub under the names of the real libraries; its machine code is the twin's."""
    if torch.version.cuda:
        pytest.skip("torch for CUDA would find the stub too, and needs the real library")
    build(tmp_path, "libcuda.so.1")
    shutil.copy(tmp_path / "libcuda.so.1", tmp_path / "libnvrtc.so.13")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "STUB_KERNELS": _twin_library()}
    done = subprocess.run(
        [sys.executable, "-c", _WITH_KERNELS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "all equal", done.stderr


def _twin_library() -> str:
    library: Any = compile_for_host()
    return str(library._name)


def test_device_memory_reads_as_an_array(driver: CudaDriver) -> None:
    span = driver.allocate(4096)
    described = driver.array(span).__cuda_array_interface__
    assert described["data"] == (span.address, False) and described["shape"] == (4096,)
    assert host_view(span.address, 4096).nbytes == 4096
    driver.free(span)
