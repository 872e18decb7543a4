"""What goes through rings, and how much of it at a time."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hf3fs.tier.conftest import RINGS, Memory, Opened, get, put
from tests.hf3fs_emulator import Hf3fsEmulator
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES


async def test_32_writes_are_in_flight(opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator) -> None:
    """They wait for 3FS and not for the two threads that the tier has."""
    async with opened(place, rings=replace(RINGS, entries=64), iov_bytes=8 << 20) as tier:
        assert tier.traits.write_concurrency == tier.traits.read_concurrency == 32
        emulator.control.hang()
        writes = []
        for number in range(1, 33):
            key, payload = chunk(number)
            writes.append(asyncio.create_task(tier.write(key, memory.make(payload), CHUNK_BYTES)))
        operations = 1 if memory.arena is None else 2
        await asyncio.to_thread(emulator.control.until_hanging, 32 * operations)
        emulator.control.resume()
        assert await asyncio.gather(*writes) == [True] * 32


async def test_io_depth_above_one_leaves_no_operation_waiting(
    opened: Opened, place: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    """3FS would issue whole batches of this number only."""
    async with opened(place, rings=replace(RINGS, io_depth=8)) as tier:
        await put(tier, memory, 1)
        await get(tier, memory, 1)
    assert "hf3fs_io_depth" in caplog.text
