"""Rings: many transfers at a time, exact about each whatever the order of answers, and made anew when the library fails."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import hf3fs_py_usrbio
import numpy as np
import pytest

from tests.hf3fs.tier.conftest import HASTY, RINGS, Memory, Opened, get, gets, make_tier, put, works_again
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.opened import open_tier, until
from tiercache.core.header import aligned
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.hf3fs.engine import PART_BYTES
from tiercache.tiers.hf3fs.ring import RingSettings

PAGE = 4096


async def test_slow_operation_holds_back_room_and_loses_nothing(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    """EAGAIN although entries are free: submissions are given back in order only."""
    async with opened(place, rings=RingSettings(entries=4, rings=1, io_depth=1, timeout_s=20.0)) as tier:
        for operation in (put, get):
            emulator.control.delay(0.2)
            await asyncio.gather(*(operation(tier, memory, number) for number in range(1, 25)))
        assert tier.io.engine.in_flight == tier.io.engine.restarts == 0


@pytest.mark.parametrize("kind", ["buffers", "arena"])
async def test_large_chunk_goes_in_parts_at_once(emulator: Hf3fsEmulator, place: Path, kind: str) -> None:
    """Cut at multiples of a part's size in the memory, wherever the chunk begins."""
    length = 2 * PART_BYTES + 3 * PAGE
    key, source = chunk(1, length)
    into, content = page_aligned(length), source[:length].copy()
    tier = make_tier(place, chunk_bytes=length, iov_bytes=32 << 20)
    arena = Arena(ArenaSettings(size_bytes=32 << 20, shm_name=f"test-parts-{os.getpid()}")) if kind == "arena" else None
    if arena is not None:
        tier.use_arena(arena)
        places = [arena.memory[start:][: aligned(length)] for start in (5 * PAGE, 5 * PAGE + aligned(length))]
        places[0][:] = source
        source, into = places
        del places
    async with open_tier(tier):
        before = emulator.control.statistics().operations
        assert await tier.write(key, source, length)
        assert emulator.control.statistics().operations - before == (3 if arena is None else 4)
        assert await tier.read(key, into) == length
        assert np.array_equal(into[:length], content)
    del source, into
    if arena is not None:
        arena.close()


async def test_an_unexpected_exception_of_the_library_makes_new_rings(
    opened: Opened, place: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(place, rings=HASTY) as tier:
        await put(tier, memory, 1)
        with monkeypatch.context() as patch:
            patch.setattr(hf3fs_py_usrbio.ioring, "wait", MagicMock(side_effect=RuntimeError("a rule is broken")))
            with pytest.raises(TierUnavailable):
                await get(tier, memory, 1)
        await until(lambda: tier.io.engine.restarts >= 1)
        await works_again(tier, memory, 2)
        await gets(tier, memory, 1)


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
