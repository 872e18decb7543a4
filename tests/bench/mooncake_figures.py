"""The Mooncake tier beside Mooncake's own blocking client, on a real store on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from tests.bench.lanes import in_lanes
from tests.servers.mooncake import Master, missing, plain_client, running
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import lags, p99
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys, size_name
from tiercache.config.remote_options import options_of
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.mooncake import MooncakeTier

SIZES = (2 * MIB, 32 * MIB)
DEPTH = 4
_SHARE = 2
_NAMES = 1000


async def measure_mooncake(figures: Figures, plan: Plan) -> None:
    """GB/s over TCP on the loopback, four chunks at a time; the process that holds the memory has the same cores.

    `mooncake.tier_*`: the tier, from and into a registered arena, with checksums made and verified. `mooncake.client_*`:
    `put_from` and `get_into` in as many threads as the tier has, from and into registered memory, nothing verified.
    `mooncake.tier_lag_*`: of a timer of one millisecond on the loop meanwhile; `mooncake.client_lag_*`: the same for a loop
    that only waits for those threads. `mooncake.exist_1000_ms`: which of 1,000 unknown chunks the store has.
    """
    if reason := missing():
        raise ConfigError(f"--only mooncake: {reason}")
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    # Twice what is moved in one go: the master evicts from nine tenths on.
    held_bytes = 2 * max(_count(plan, size) * size for size in SIZES)
    with running(plan.directory / "mooncake", size_bytes=held_bytes) as (master, _):
        for chunk_bytes in SIZES:
            await _measure_size(figures, plan, master, chunk_bytes)
        await _measure_existence(figures, plan, master)


def _count(plan: Plan, chunk_bytes: int) -> int:
    return max(DEPTH, plan.count(chunk_bytes) // _SHARE)


async def _measure_size(figures: Figures, plan: Plan, master: Master, chunk_bytes: int) -> None:
    size, count = size_name(chunk_bytes), _count(plan, chunk_bytes)
    arena = Arena(ArenaSettings(size_bytes=2 * DEPTH * chunk_bytes))
    arena.memory[:] = np.random.default_rng(3).integers(0, 256, arena.memory.nbytes, dtype=np.uint8)
    slots = [arena.memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(2 * DEPTH)]
    tier = _tier(master, chunk_bytes)
    tier.use_arena(arena)
    await tier.open()
    with plain_client(master) as client:
        assert client.register_buffer(arena.address, arena.memory.nbytes) == 0

        async def of_tier() -> None:
            keys = new_keys(count)

            async def write(key: ChunkKey, lane: int) -> None:
                assert await tier.write(key, slots[lane], chunk_bytes)

            async def read(key: ChunkKey, lane: int) -> None:
                assert await tier.read(key, slots[DEPTH + lane]) == chunk_bytes

            await note("tier_put", in_lanes(keys, range(DEPTH), write))
            await note("tier_get", in_lanes(keys, range(DEPTH), read))
            client.remove_all(True)

        async def of_client() -> None:
            keys = new_keys(count)

            def write(key: ChunkKey, lane: int) -> None:
                assert client.put_from(key.hex(), int(slots[lane].ctypes.data), chunk_bytes) == 0

            def read(key: ChunkKey, lane: int) -> None:
                assert client.get_into(key.hex(), int(slots[DEPTH + lane].ctypes.data), chunk_bytes) == chunk_bytes

            await note("client_put", asyncio.to_thread(_threads, keys, write))
            await note("client_get", asyncio.to_thread(_threads, keys, read))
            client.remove_all(True)

        async def note(what: str, work: Awaitable[None]) -> None:
            async def run() -> None:
                await work

            began = time.perf_counter()
            late_s = await lags(run())
            if warming:
                return
            figures.add(f"mooncake.{what}_gbps.{size}", count * chunk_bytes / (time.perf_counter() - began) / 1e9)
            figures.add(f"mooncake.{what}_lag_p99_ms.{size}", p99(late_s) * 1e3)
            figures.add(f"mooncake.{what}_lag_max_ms.{size}", late_s[-1] * 1e3)

        try:
            # The first transfers open connections and touch the holder's memory.
            warming = True
            await in_turn(0, of_client, of_tier)
            warming = False
            for pair in range(plan.pairs):
                plan.progress(f"Mooncake tier, {size}, pair {pair + 1} of {plan.pairs}")
                await in_turn(pair, of_tier, of_client)
        finally:
            client.unregister_buffer(arena.address)
            await tier.close()
            slots.clear()
            arena.close()
    for way in ("put", "get"):
        figures.compare(f"mooncake.tier_{way}_gbps.{size}", f"mooncake.client_{way}_gbps.{size}")


def _threads(keys: Sequence[ChunkKey], move: Callable[[ChunkKey, int], None]) -> None:
    left = iter(keys)
    problems: list[BaseException] = []

    def lane(number: int) -> None:
        try:
            for key in left:
                move(key, number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


async def _measure_existence(figures: Figures, plan: Plan, master: Master) -> None:
    tier = _tier(master, MIB)
    await tier.open()
    try:
        for _ in range(plan.pairs):
            keys = new_keys(_NAMES)
            began = time.perf_counter()
            await tier.probe(keys)
            figures.add(f"mooncake.exist_{_NAMES}_ms", (time.perf_counter() - began) * 1e3)
    finally:
        await tier.close()


def _tier(master: Master, chunk_bytes: int) -> MooncakeTier:
    options = {option.name: option.default for option in options_of("mooncake").values()}
    return MooncakeTier(
        RemoteSettings(
            *("mooncake", "mooncake", bytes(16), chunk_bytes, master.url, options | {"local_hostname": "127.0.0.1"}),
            timeout_s=30.0,
            concurrency=DEPTH,
        )
    )
