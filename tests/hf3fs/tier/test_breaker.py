"""The tier below a reader: what hangs opens its breaker, which closes again when that is over, and every slot comes back."""

import asyncio
import os

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import HASTY, make_tier, until
from tests.hf3fs_emulator import Hf3fsEmulator
from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import Workers
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.cpu import CpuTier


async def is_hit(reader: Reader, number: int) -> bool:
    """From the tier, and right."""
    key, payload = chunk(number)
    reader.cpu.forget(key)
    lease = await reader.fetch(key, asyncio.get_running_loop().time() + 0.8)
    if lease is None:
        return False
    with lease:
        assert np.array_equal(lease.view, payload)
    return True


@pytest.mark.parametrize("shm_name", [None, f"test-breaker-{os.getpid()}"], ids=["buffers", "arena"])
async def test_hanging_daemon_opens_the_readers_breaker(mortal: Hf3fsEmulator, shm_name: str | None) -> None:
    arena, copiers = Arena(ArenaSettings(size_bytes=24 * CHUNK_BYTES, shm_name=shm_name)), Workers("copy", 1)
    cpu = CpuTier(SlotPool(arena, CHUNK_BYTES), copiers)
    tier = make_tier(mortal.mount / "chunks", rings=HASTY)
    tier.use_arena(arena)
    await cpu.open()
    await tier.open()
    reader = Reader(cpu, [tier], ReaderSettings(deadline_s=0.5))
    reader.tiers[0].breaker = Breaker(BreakerSettings(slow_s=0.5, first_pause_s=0.1))
    for number in (1, 2, 3, 4):
        key, payload = chunk(number)
        cpu.pool.view(0)[:] = payload
        assert await tier.write(key, cpu.pool.view(0), CHUNK_BYTES)
    assert await is_hit(reader, 1)
    mortal.control.hang()
    assert not any(await asyncio.gather(*(is_hit(reader, number) for number in (1, 2, 3, 4))))
    assert reader.breakers() == {"hf3fs": "open"}
    mortal.control.resume()
    async with asyncio.timeout(20):
        while not await is_hit(reader, 1):  # until the breaker lets one through, which it does by the clock
            await asyncio.sleep(0.02)
        while reader.abandoned:
            await asyncio.wait({*reader.abandoned})
    await until(lambda: tier.io.engine.in_flight == 0)
    for number in (1, 2, 3, 4):
        assert await is_hit(reader, number)
    assert reader.breakers() == {"hf3fs": "closed"}
    cpu.clear()
    assert cpu.obtainable == cpu.pool.count, "every slot is back"
    await reader.close()
    await tier.close()
    copiers.close()
    arena.close()
