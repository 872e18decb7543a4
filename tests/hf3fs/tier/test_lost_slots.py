"""Slots of an arena whose reads are never answered come back, but not while the daemon may still write to them."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import HASTY, PATIENCE_S, Memory, Opened, get, put, until
from tests.hf3fs_emulator import Hf3fsEmulator
from tiercache.errors import TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.hf3fs import Hf3fsTier

pytestmark = pytest.mark.parametrize("memory", ["arena"], indirect=True)

LOST = 16

Reads = dict["asyncio.Task[int | None]", np.ndarray]


def start(tier: Hf3fsTier, memory: Memory) -> Reads:
    slots = [memory.make() for _ in range(LOST)]
    return {asyncio.create_task(tier.read(chunk(number)[0], slot)): slot for number, slot in enumerate(slots, start=1)}


async def serve_until(tier: Hf3fsTier, memory: Memory, condition: Callable[[], object]) -> set[asyncio.Task[None]]:
    """Others ask meanwhile, and get what is right or nothing. Returns those whose answer is late, too."""

    async def ask() -> None:
        slot = memory.make()
        with contextlib.suppress(TierUnavailable):
            assert await tier.read(chunk(99)[0], slot) == CHUNK_BYTES
            assert np.array_equal(slot, chunk(99)[1])
        memory.give_back(slot)

    asking: set[asyncio.Task[None]] = set()
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await until(lambda: tier.io.engine.serves or bool(condition()))
            asking.add(asyncio.create_task(ask()))
            await asyncio.wait(asking, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in asking if task.done()]:
                asking.remove(task)
                task.result()
    return asking


@pytest.mark.parametrize("entries", [64, 16], ids=["others are served", "the rings are full"])
async def test_slots_come_back_from_lost_answers_time_and_again(
    opened: Opened, mortal: Hf3fsEmulator, memory: Memory, entries: int
) -> None:
    """The daemon is the same all the time."""
    async with opened(mortal.mount / "chunks", rings=replace(HASTY, entries=entries, timeout_s=1.0)) as tier:
        await put(tier, memory, 99, *range(1, LOST + 1))
        for incident in (1, 2):
            struck = mortal.control.statistics().faults_struck
            mortal.control.lose(2 * LOST, direction="read")  # a header and a payload each
            reads = start(tier, memory)
            await asyncio.to_thread(mortal.control.until_struck, struck + 2 * LOST)
            left = await serve_until(tier, memory, lambda reads=reads: all(read.done() for read in reads))
            await asyncio.gather(*left)
            assert all(isinstance(read.exception(), TierUnavailable) for read in reads)
            await until(lambda incident=incident: tier.io.engine.restarts >= incident)
            for slot in reads.values():
                memory.give_back(slot)
        assert tier.io.engine.in_flight == 0
        for number in range(1, LOST + 1):
            await get(tier, memory, number)


async def test_a_slot_that_the_daemon_still_has_is_not_given_back(
    opened: Opened, mortal: Hf3fsEmulator, memory: Memory
) -> None:
    """The answers are late, not lost: what the daemon writes at last lands in memory that is still reserved for it."""
    async with opened(mortal.mount / "chunks", rings=replace(HASTY, entries=64)) as tier:
        await put(tier, memory, 99, *range(1, LOST + 1))
        struck = mortal.control.statistics().faults_struck
        mortal.control.hold(2 * LOST, direction="read")
        reads = start(tier, memory)
        await asyncio.to_thread(mortal.control.until_struck, struck + 2 * LOST)
        await until(lambda: not tier.io.engine.serves)
        with pytest.raises(TierUnavailable):
            await get(tier, memory, 99)
        assert not any(read.done() for read in reads), "the daemon may still write there"
        assert all((slot == 0xEE).all() for slot in reads.values())
        mortal.control.resume()
        await asyncio.wait(reads, timeout=PATIENCE_S)
        assert all(isinstance(read.exception(), TierUnavailable) for read in reads)
        for slot in reads.values():
            assert not (slot == 0xEE).all(), "given back before it was written to"
        await until(lambda: tier.io.engine.serves)
        await get(tier, memory, 99)
        assert tier.io.engine.in_flight == 0
