"""The 3FS tier on the emulator, beside a bare ring and LMCache's connector."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import lags, p99
from tiercache.bench.peer import Peer
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys, size_name
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing.hf3fs import Hf3fsEmulator, install, why_no_fuse
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier
from tiercache.tiers.hf3fs.engine import PART_BYTES
from tiercache.tiers.hf3fs.library import load_library
from tiercache.tiers.hf3fs.ring import RingSettings, in_parts
from tiercache.tiers.hf3fs.segments import Segment, arena_segment

SIZES = (2 * MIB, 8 * MIB, 32 * MIB)
DEPTHS = (4, 16)
MODES = ("arena", "buffers")
_MOST_FILES = 120
"""As many as the tier keeps open."""
_CHILD = Path(__file__).with_name("peer_hf3fs.py")


async def measure_hf3fs(figures: Figures, plan: Plan) -> None:
    """GB/s with so many chunks in flight. The emulator's files lie in memory: what is measured is the way to them.

    `ceiling.ring_*`: one ring, one thread, registered memory and nothing around them: files are open and registered before,
    and new (for writes). `hf3fs.*`: the tier with its defaults: files are made, registered, verified, synced and named; for
    `reread` they are open since they were read before, which leaves what rings and threads do. By memory: `arena`, which
    rings read into and write from, and `buffers`, with one copy. `hf3fs.lag_p99_ms.*`: of a timer of one millisecond on the
    loop meanwhile.
    """
    install()
    place = Path(tempfile.mkdtemp(prefix="tiercache-bench-3fs-", dir="/dev/shm"))
    before = os.environ.get("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP")
    try:
        with Hf3fsEmulator(place, fuse=why_no_fuse() is None) as emulator:
            os.environ.update(emulator.environment.items() & {("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")})
            for chunk_bytes in SIZES:
                await _measure_size(figures, plan, emulator, chunk_bytes)
    finally:
        if before is None:
            os.environ.pop("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", None)
        shutil.rmtree(place, ignore_errors=True)


async def _measure_size(figures: Figures, plan: Plan, emulator: Hf3fsEmulator, chunk_bytes: int) -> None:
    size, count = size_name(chunk_bytes), min(_MOST_FILES, plan.count(chunk_bytes) // 2)
    with (
        _start_peer(plan, emulator, chunk_bytes, count) as peer,
        BareRing(emulator.mount, chunk_bytes, count) as bare,
        Bench(emulator.mount, chunk_bytes, "arena") as direct,
        Bench(emulator.mount, chunk_bytes, "buffers") as copying,
    ):
        benches = {"arena": direct, "buffers": copying}
        for bench in benches.values():
            await bench.tier.open()
        try:
            for pair in range(plan.pairs):
                plan.progress(f"3FS tier, {size}, pair {pair + 1} of {plan.pairs}")
                for depth in DEPTHS:
                    ours = _turns(figures, bare, benches, size, depth, new_keys(count))
                    await in_turn(pair, *ours, _peers_turn(figures, peer, size, depth))
        finally:
            for bench in benches.values():
                await bench.tier.close()
    for depth in DEPTHS:
        for mode in MODES:
            for way, bare_way in (("read", "read"), ("reread", "read"), ("write", "write")):
                figures.compare(
                    f"hf3fs.{way}_{mode}_gbps.{size}.d{depth}", f"ceiling.ring_{bare_way}_gbps.{size}.d{depth}"
                )


def _turns(
    figures: Figures, bare: BareRing, benches: dict[str, Bench], size: str, depth: int, keys: list[ChunkKey]
) -> list[Callable[[], Awaitable[None]]]:
    async def alone() -> None:
        for way, read in (("write", False), ("read", True)):
            gbps = await asyncio.to_thread(bare.run, depth, read=read)
            figures.add(f"ceiling.ring_{way}_gbps.{size}.d{depth}", gbps)

    def by_tier(mode: str) -> Callable[[], Awaitable[None]]:
        async def measure() -> None:
            bench = benches[mode]
            for way, run in (("write", bench.write), ("read", bench.read), ("reread", bench.reread)):
                gbps, lag_s = await run(keys, depth)
                figures.add(f"hf3fs.{way}_{mode}_gbps.{size}.d{depth}", gbps)
                figures.add(f"hf3fs.lag_p99_ms.{way}_{mode}", lag_s * 1e3)
            await benches[mode].remove(keys)

        return measure

    return [alone, *(by_tier(mode) for mode in MODES)]


def _peers_turn(figures: Figures, peer: Peer, size: str, depth: int) -> Callable[[], Awaitable[None]]:
    async def measure() -> None:
        if depth == DEPTHS[-1]:
            for way in ("write", "read"):
                peer.add(
                    figures, way, **{way: (f"hf3fs.{way}_gbps.{size}", f"hf3fs.{way}_buffers_gbps.{size}.d{depth}")}
                )

    return measure


def _start_peer(plan: Plan, emulator: Hf3fsEmulator, chunk_bytes: int, count: int) -> Peer:
    if plan.peer_python is None:
        return Peer(None)
    plan.progress("starting LMCache (3FS)")
    settings = [f"{name}={value}" for name, value in emulator.environment.items()]
    return Peer(
        ["env", *settings, str(plan.peer_python), str(_CHILD), str(emulator.mount), str(chunk_bytes), str(count)]
    )


class BareRing:
    """Files of one size through one ring in each direction, by one thread."""

    def __init__(self, mount: Path, chunk_bytes: int, count: int) -> None:
        self._library = load_library()
        self._mount = mount
        self._chunk_bytes = chunk_bytes
        self._paths = [mount / f"ceiling.{number}" for number in range(count)]
        self._arena = Arena(ArenaSettings(size_bytes=max(DEPTHS) * chunk_bytes, shm_name=f"bench-ring-{os.getpid()}"))
        self._arena.memory[:] = np.random.default_rng(1).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        segment = arena_segment(self._arena)
        assert segment is not None
        self._segment: Segment = segment

    def run(self, depth: int, *, read: bool) -> float:
        """GB/s of all files, with `depth` of them in flight. Writing makes them anew."""
        flags = os.O_RDONLY if read else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        ring = self._library.make_ioring(str(self._mount), 256, read)
        descriptors = [os.open(path, flags, 0o600) for path in self._paths]
        for descriptor in descriptors:
            self._library.register_fd(descriptor)
        began = time.perf_counter()
        _move_all(ring, self._segment.iov, descriptors, self._chunk_bytes, depth, read)
        took = time.perf_counter() - began
        for descriptor in descriptors:
            self._library.deregister_fd(descriptor)
            os.close(descriptor)
        return len(descriptors) * self._chunk_bytes / took / 1e9

    def __enter__(self) -> BareRing:
        self._segment.register(self._library, str(self._mount), -1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._segment.release()
        self._arena.close()


def _move_all(ring: Any, iov: Any, descriptors: Sequence[int], chunk_bytes: int, depth: int, read: bool) -> None:
    waiting = list(descriptors)
    free = list(range(depth))
    missing: dict[int, int] = {}
    place_of: dict[int, tuple[Any, int]] = {}
    while waiting or missing:
        while waiting and free:
            place, descriptor = free.pop(), waiting.pop()
            parts = in_parts(iov, place * chunk_bytes, chunk_bytes, 0, PART_BYTES)
            missing[place] = len(parts)
            for piece, offset in parts:
                place_of[id(piece)] = piece, place
                ring.prepare(piece, read, descriptor, offset)
        ring.submit()
        for piece in ring.wait(max_results=256, min_results=1, timeout=30.0):
            _, place = place_of.pop(id(piece))
            assert piece.result > 0, piece.result
            missing[place] -= 1
            if not missing[place]:
                del missing[place]
                free.append(place)


class Bench:
    """A tier, and slots of an arena to move chunks from and to."""

    def __init__(self, mount: Path, chunk_bytes: int, mode: str) -> None:
        self._chunk_bytes = chunk_bytes
        shm_name = f"bench-3fs-{os.getpid()}" if mode == "arena" else None
        self._arena = Arena(ArenaSettings(size_bytes=max(DEPTHS) * chunk_bytes, shm_name=shm_name))
        self._arena.memory[:] = np.random.default_rng(2).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        self._slots = [
            self._arena.memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(max(DEPTHS))
        ]
        iov_bytes = 2 * max(DEPTHS) * (chunk_bytes + 4096)
        settings = Hf3fsSettings(
            (mount / mode,), 64 << 30, iov_bytes=iov_bytes, chunk_bytes=chunk_bytes, rings=RingSettings()
        )
        self.tier = Hf3fsTier(settings, bytes(16))
        self.tier.use_arena(self._arena)

    async def write(self, keys: Sequence[ChunkKey], depth: int) -> tuple[float, float]:
        """GB/s, and the loop's lag in seconds meanwhile (p99)."""

        async def one(key: ChunkKey, slot: np.ndarray) -> None:
            assert await self.tier.write(key, slot, self._chunk_bytes)

        return await self._run(keys, depth, one)

    async def read(self, keys: Sequence[ChunkKey], depth: int) -> tuple[float, float]:
        """As `write`. No file is open before."""
        await asyncio.to_thread(self.tier.files.forget_all)
        return await self.reread(keys, depth)

    async def reread(self, keys: Sequence[ChunkKey], depth: int) -> tuple[float, float]:
        """As `read`, of files that are open since they were read before."""

        async def one(key: ChunkKey, slot: np.ndarray) -> None:
            assert await self.tier.read(key, slot) == self._chunk_bytes

        return await self._run(keys, depth, one)

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            await self.tier.remove(key)

    async def _run(
        self, keys: Sequence[ChunkKey], depth: int, one: Callable[[ChunkKey, np.ndarray], Awaitable[None]]
    ) -> tuple[float, float]:
        left = iter(keys)

        async def lane(slot: np.ndarray) -> None:
            for key in left:
                await one(key, slot)

        async def all_lanes() -> None:
            await asyncio.gather(*(lane(slot) for slot in self._slots[:depth]))

        began = time.perf_counter()
        late_s = await lags(all_lanes())
        took = time.perf_counter() - began
        return len(keys) * self._chunk_bytes / took / 1e9, p99(late_s)

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.clear()
        self._arena.close()
