"""What device files have taken is given back once, and not before the last call that uses it has ended."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device.twin import TwinDriver
from tests.gds.conftest import FINGERPRINT, Slots
from tiercache.device.driver import Stream
from tiercache.errors import DeviceError, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.gds import DeviceFiles


@pytest.fixture
def pinned(driver: TwinDriver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of what is pinned at the moment."""
    addresses: list[int] = []
    pin = driver.pin

    def watched(memory: np.ndarray, slot_bytes: int) -> bool:
        addresses.append(memory.ctypes.data)
        return pin(memory, slot_bytes)

    monkeypatch.setattr(driver, "pin", watched)
    monkeypatch.setattr(driver, "unpin", lambda memory: addresses.remove(memory.ctypes.data))
    return addresses


async def test_what_a_call_under_way_uses_is_given_back_when_it_ends(
    files: DeviceFiles,
    driver: TwinDriver,
    pinned: list[int],
    slots: Slots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, payload = chunk(1)
    slot = slots.filled(payload)
    copying, go_on = threading.Event(), threading.Event()
    finish = driver.finish

    def slowly(stream: Stream) -> None:
        copying.set()
        go_on.wait(30)
        finish(stream)

    def write(name: str) -> int:
        path = str(tmp_path / name)
        return files.write(path, key, FINGERPRINT, slot, CHUNK_BYTES, direct=False, durable=False)

    monkeypatch.setattr(driver, "finish", slowly)
    files.open()
    writing = asyncio.ensure_future(asyncio.to_thread(write, "one"))
    assert await asyncio.to_thread(copying.wait, 30)
    files.close()
    assert pinned, "the copy goes there"
    go_on.set()
    assert await writing
    assert not pinned
    with pytest.raises(TierUnavailable):
        write("two")
    files.close()


def test_a_copy_that_fails_midway_has_ended_when_the_call_has(
    files: DeviceFiles, driver: TwinDriver, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rest of it would write to a slot, or read from a buffer, that the next chunk has by then."""
    key, payload = chunk(1)
    path = str(tmp_path / "one")
    into = slots.filled(payload)
    files.open()
    files.write(path, key, FINGERPRINT, into, CHUNK_BYTES, direct=False, durable=False)
    copied, go_on, copy, finish = threading.Event(), threading.Event(), driver.copy, driver.finish

    def half(destination: Any, source: Any, stream: Stream) -> None:
        driver.enqueue(stream, lambda: go_on.wait(30))
        copy(destination[:4096], source[:4096], stream)
        driver.enqueue(stream, copied.set)
        raise DeviceError("it refuses the second half")

    def waited_for(stream: Stream) -> None:
        go_on.set()
        finish(stream)

    monkeypatch.setattr(driver, "copy", half)
    monkeypatch.setattr(driver, "finish", waited_for)
    with pytest.raises(DeviceError, match="second half"):
        files.read(path, key, FINGERPRINT, into, direct=False)
    assert copied.is_set()
    copied.clear()
    go_on.clear()
    with pytest.raises(DeviceError, match="second half"):
        files.write(str(tmp_path / "two"), key, FINGERPRINT, into, CHUNK_BYTES, direct=False, durable=False)
    assert copied.is_set()
    files.close()


async def test_an_opening_that_is_cancelled_keeps_nothing(
    opened: Callable[..., Any],
    driver: TwinDriver,
    pinned: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: DeviceFiles,
) -> None:
    opening, go_on = threading.Event(), threading.Event()
    open_files = type(files).open

    def slowly(files: DeviceFiles) -> None:
        open_files(files)
        opening.set()
        go_on.wait(30)

    monkeypatch.setattr(type(files), "open", slowly)
    tier = asyncio.ensure_future(opened(tmp_path).__aenter__())
    assert await asyncio.to_thread(opening.wait, 30)
    tier.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await tier
    assert not pinned
