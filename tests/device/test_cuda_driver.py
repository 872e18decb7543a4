"""CudaDriver as it calls torch.cuda, over a stand-in for that module: a cache puts and gets through it without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tiercache import Config, Layout, TierCache
from tiercache.device import driver as driver_module
from tiercache.device.driver import CudaDriver, host_tensor
from tiercache.device.paged import PagedChunk, PagedKv
from tiercache.errors import DeviceError

LAYOUT = Layout("m", chunk_tokens=4, bytes_per_token=256)
SLOT = 5 << 10


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking, "it would spin"

    def record(self, stream: Any) -> None:
        stream.check()

    def query(self) -> bool:
        return False  # so that the thread has to wait

    def synchronize(self) -> None: ...


class Stream:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def check(self) -> None:
        if self._cuda.error is not None:
            raise self._cuda.error

    def wait_event(self, event: Event) -> None:
        self.check()

    def synchronize(self) -> None:
        self.check()


class Cuda:
    """As much of `torch.cuda` as the driver uses. Work is done when it is enqueued; `error` is what everything raises."""

    Event = Event

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.within: list[Stream] = []
        self.devices: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        """Bytes of the registrations, by address."""
        self.statuses: list[int] = []
        """What the next registrations return. Those after them succeed."""
        self.registering: set[int] = set()
        """Threads that have registered memory."""
        self.own = Stream(self)

    def Stream(self, device: Any) -> Stream:
        return Stream(self)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def set_device(self, device: Any) -> None:
        self.devices[threading.get_ident()] = device

    def current_stream(self, device: Any) -> Stream:
        return self.own

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        stream.check()
        assert threading.get_ident() in self.devices, "a thread of the cache's uses its GPU"
        self.within.append(stream)
        yield

    def cudart(self) -> Any:
        def register(address: int, length_bytes: int, flags: int) -> Any:
            self.registering.add(threading.get_ident())
            status = self.statuses.pop(0) if self.statuses else 0
            if not status:
                self.registered[address] = length_bytes
            return SimpleNamespace(value=status)

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.registered.pop)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    relaxed = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 0)
    names = {name: getattr(ctypes, name) for name in ("byref", "c_int", "c_uint8")}
    stand_in = SimpleNamespace(**names, CDLL=lambda name: relaxed)
    monkeypatch.setattr(driver_module, "ctypes", stand_in)
    return cuda


@pytest.fixture
def driver(cuda: Cuda) -> CudaDriver:
    driver = CudaDriver(0)
    assert driver.device == torch.device("cuda:0")
    driver.device = torch.device("cpu")
    return driver


async def test_paged_blocks_and_tensors_come_back(driver: CudaDriver, cuda: Cuda) -> None:
    planes = [torch.randn(16, 32, 4) for _ in range(2)]
    kv = PagedKv(driver, planes)
    kv.warm_up()
    keys = [bytes([number]) * 24 for number in range(3)]
    async with TierCache.open(Config(max_local_cpu_size=0.01), LAYOUT, device=driver) as cache:
        assert cuda.registered, "the arena is pinned"
        tensor = torch.randn(256)
        assert await cache.put_many(keys, [PagedChunk(kv, [1]), PagedChunk(kv, [2]), tensor]) == 3
        back = torch.empty(256)
        expected = [plane[[1, 2]].clone() for plane in planes]
        assert await cache.get_into(keys, [PagedChunk(kv, [8]), PagedChunk(kv, [9]), back]) == 3
        assert torch.equal(back, tensor)
        assert all(torch.equal(plane[[8, 9]], old) for plane, old in zip(planes, expected, strict=True))
    assert cuda.own not in cuda.within, "an engine's stream is not the cache's"
    assert not cuda.registered


@pytest.mark.parametrize(("code", "lost"), [(700, True), (2, False), (None, False)])
def test_an_error_says_whether_the_device_is_lost(driver: CudaDriver, cuda: Cuda, code: int | None, lost: bool) -> None:
    stream = driver.make_stream()
    cuda.error = RuntimeError("CUDA error: something\nand advice")
    if code is not None:
        cuda.error.error_code = code  # type: ignore[attr-defined]
    for call in (lambda: driver.record(stream), lambda: driver.enqueue(stream, lambda: None)):
        with pytest.raises(DeviceError, match="^cuda:0: CUDA error: something$") as caught:
            call()
        assert caught.value.lost is lost


def test_a_gpu_that_is_not_there_is_refused(cuda: Cuda) -> None:
    with pytest.raises(DeviceError, match="cuda:1: torch .* finds no NVIDIA driver, or no such GPU"):
        CudaDriver(1)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Three times as much as is registered at a time."""
    monkeypatch.setattr(driver_module, "_PIN_BYTES", 32 << 10)
    return np.zeros(96 << 10, dtype=np.uint8)


def test_memory_is_registered_in_pieces_that_end_at_slots(driver: CudaDriver, cuda: Cuda, memory: np.ndarray) -> None:
    assert driver.pin(memory, SLOT)
    assert sum(cuda.registered.values()) == memory.nbytes
    assert len(cuda.registered) > 1
    assert all((address - memory.ctypes.data) % SLOT == 0 for address in cuda.registered)
    assert threading.get_ident() not in cuda.registering, "it would be left with the error of a failure"
    driver.unpin(memory)
    assert not cuda.registered


def test_a_piece_that_is_refused_leaves_none(
    driver: CudaDriver, cuda: Cuda, memory: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.statuses = [0, 0, 2]
    assert not driver.pin(memory, SLOT)
    assert not cuda.registered
    assert "could not be pinned (cudaHostRegister: error 2)" in caplog.text


def test_memory_that_is_registered_already_is_pinned_and_stays_so(
    driver: CudaDriver, cuda: Cuda, memory: np.ndarray
) -> None:
    cuda.statuses = [712] * 4
    assert driver.pin(memory, SLOT)
    driver.unpin(memory)
    assert not cuda.registered


def test_tensor_over_host_memory_keeps_it_mapped() -> None:
    mapping = mmap.mmap(-1, 8192)
    tensor = host_tensor(np.frombuffer(mapping, dtype=np.uint8)[4096:])[10:20]
    with pytest.raises(BufferError):
        mapping.close()
    tensor.fill_(7)
    assert mapping[4106:4116] == bytes([7]) * 10
    del tensor
    mapping.close()
