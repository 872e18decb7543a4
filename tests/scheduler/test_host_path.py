"""Puts from host memory that compete for slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tests.scheduler.conftest import SLOTS, Bench
from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.payloads import Source
from tiercache.scheduler.fan_out import FanOut
from tiercache.scheduler.host_path import HostPath
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES


def items(numbers: Sequence[int]) -> list[tuple[ChunkKey, int, Source]]:
    found = []
    for number in numbers:
        key, payload = chunk(number)
        found.append((key, CHUNK_BYTES, lambda slot, payload=payload: np.copyto(slot, payload)))
    return found


async def test_puts_that_overlap_do_not_wait_for_one_another(bench: Bench) -> None:
    """Slots come free one at a time, and all together are fewer than the puts need: whoever waits for one holds none."""
    path = HostPath(bench.cpu, FanOut([]))
    leases = [bench.make_hot(1000 + number) for number in range(SLOTS - bench.cpu.budget.read_floor)]
    puts = [asyncio.create_task(path.put(items(range(start, start + 8)), 10.0)) for start in range(0, 32, 8)]
    while len(bench.cpu._waiting[Purpose.WRITE]) < len(puts):
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for lease in leases:
        lease.release()
        for _ in range(5):
            await asyncio.sleep(0)
    assert await asyncio.gather(*puts) == [8] * 4
    assert path.skipped == 0
    assert loop.time() - began_s < 5.0, "the clock jumps when everybody waits"
    assert bench.is_whole()


async def test_the_deadline_is_of_the_whole_put(bench: Bench) -> None:
    path = HostPath(bench.cpu, FanOut([]))
    leases = [bench.make_hot(1000 + number) for number in range(SLOTS - bench.cpu.budget.read_floor)]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await path.put(items(range(20)), 3.0) == 0
    assert loop.time() - began_s < 4.0
    assert path.skipped == 20
    for lease in leases:
        lease.release()
    assert bench.is_whole()


async def test_chunk_that_somebody_else_stored_while_one_waited_is_stored(bench: Bench) -> None:
    path = HostPath(bench.cpu, FanOut([]))
    leases = [bench.make_hot(1000 + number) for number in range(SLOTS - bench.cpu.budget.read_floor)]
    puts = [asyncio.create_task(path.put(items([1]), 10.0)) for _ in range(3)]
    while len(bench.cpu._waiting[Purpose.WRITE]) < 3:
        await asyncio.sleep(0)
    for lease in leases:
        lease.release()
    assert await asyncio.gather(*puts) == [1, 1, 1]
    assert bench.is_whole()
