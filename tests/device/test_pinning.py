"""How CudaDriver locks host memory, over a stand-in for the CUDA runtime: no GPU is needed for its arithmetic."""

from __future__ import annotations

import logging
import mmap
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiercache.device import driver as driver_module
from tiercache.device.driver import CudaDriver, host_tensor
from tiercache.errors import DeviceError

SLOT = 5 << 10


class Runtime:
    """Registers what it is given, but for the `refused`-th call, which has that status."""

    def __init__(self, refused: int = 0, status: int = 2) -> None:
        self.registered: dict[int, int] = {}
        self.threads: set[threading.Thread] = set()
        self._refused, self._status, self._calls = refused, status, 0

    def cudaHostRegister(self, address: int, length_bytes: int, flags: int) -> Any:
        self.threads.add(threading.current_thread())
        self._calls += 1
        if self._calls == self._refused:
            return SimpleNamespace(value=self._status)
        self.registered[address] = length_bytes
        return SimpleNamespace(value=0)

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def made(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(driver_module, "_PIN_BYTES", 32 << 10)
    monkeypatch.setattr(CudaDriver, "_attach", lambda self: None)
    driver = CudaDriver.__new__(CudaDriver)
    driver.name = "cuda:0"
    driver._registered = {}
    driver._torch = SimpleNamespace(cuda=SimpleNamespace(cudart=lambda: runtime))  # type: ignore[assignment]
    return driver


def test_memory_is_registered_in_pieces_that_end_at_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = Runtime(), np.zeros(96 << 10, dtype=np.uint8)
    driver = made(runtime, monkeypatch)
    assert driver.pin(memory, SLOT)
    assert sum(runtime.registered.values()) == memory.nbytes
    assert len(runtime.registered) > 1
    assert all((address - memory.ctypes.data) % SLOT == 0 for address in runtime.registered)
    assert threading.current_thread() not in runtime.threads, "it would be left with the error of a failure"
    driver.unpin(memory)
    assert not runtime.registered


def test_a_piece_that_is_refused_leaves_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime, memory = Runtime(refused=3), np.zeros(96 << 10, dtype=np.uint8)
    with caplog.at_level(logging.WARNING):
        assert not made(runtime, monkeypatch).pin(memory, SLOT)
    assert not runtime.registered
    assert "could not be pinned (cudaHostRegister: error 2)" in caplog.text


def test_memory_that_is_registered_already_is_pinned_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = Runtime(refused=1, status=712), np.zeros(20 << 10, dtype=np.uint8)
    driver = made(runtime, monkeypatch)
    assert driver.pin(memory, SLOT)
    driver.unpin(memory)
    assert not runtime.registered


@pytest.mark.needs("no GPU")
def test_a_machine_without_a_gpu_gets_one_sentence() -> None:
    with pytest.raises(DeviceError, match="cuda:3: torch .* finds no NVIDIA driver, or no such GPU"):
        CudaDriver(3)


def test_tensor_over_host_memory_keeps_it_mapped() -> None:
    mapping = mmap.mmap(-1, 8192)
    tensor = host_tensor(np.frombuffer(mapping, dtype=np.uint8)[4096:])[10:20]
    with pytest.raises(BufferError):
        mapping.close()
    tensor.fill_(7)
    assert mapping[4106:4116] == bytes([7]) * 10
    del tensor
    mapping.close()
