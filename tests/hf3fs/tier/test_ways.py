"""Everything that rings can move goes through rings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from tests.hf3fs.tier.conftest import Memory, Opened
from tests.hf3fs.tier.test_faults import put
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.testing.hf3fs import Hf3fsEmulator


async def test_prefetches_go_through_rings_as_reads_do(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    async with opened(place) as tier:
        await put(tier, memory, *range(1, 21))
        before = emulator.control.statistics().transferred_bytes
        for number in range(1, 21):
            key, payload = chunk(number)
            into = memory.make()
            assert await tier.prefetch(key, into) == CHUNK_BYTES
            assert np.array_equal(into, payload)
            memory.give_back(into)
        assert emulator.control.statistics().transferred_bytes - before >= 20 * CHUNK_BYTES


async def test_as_many_writes_as_reads_are_in_flight(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    """They wait for 3FS and not for threads."""
    async with opened(place) as tier:
        assert tier.traits.write_concurrency == tier.traits.read_concurrency >= 24
        emulator.control.hang()
        writes = []
        for number in range(1, 25):
            key, payload = chunk(number)
            writes.append(asyncio.create_task(tier.write(key, memory.make(payload), CHUNK_BYTES)))
        await asyncio.to_thread(emulator.control.until_hanging, 24)
        emulator.control.resume()
        assert await asyncio.gather(*writes) == [True] * 24
