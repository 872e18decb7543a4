"""The 3FS tier on the emulator, beside a bare ring and LMCache's connector."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.lanes import timed_in_lanes
from tests.bench.peer import Peer, peer_of
from tests.hf3fs_emulator import Hf3fsEmulator, Pace, install, why_no_fuse
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import p99
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys, size_name
from tiercache.core.keys import ChunkKey
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.files.directory import TOP_LEVELS
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier
from tiercache.tiers.hf3fs.engine import PART_BYTES, load_library
from tiercache.tiers.hf3fs.ring import RegisteredMemory, RingSettings, in_parts, registered_arena

SIZES = (2 * MIB, 8 * MIB, 32 * MIB)
DEPTHS = (4, 16)
MODES = ("arena", "buffers")
_SLOTS = 32
_MOST_FILES = 120


async def measure_hf3fs(figures: Figures, plan: Plan, peer_python: Path | None) -> None:
    """GB/s with so many chunks in flight, in two ways.

    Unpaced, the emulator answers as fast as memory is copied: what is measured is what each way costs the CPUs, which the
    emulator's own daemon needs as well. `paced` (see `Pace` for the values) its rings have a
    link's bandwidth and its calls a metadata service's latency, as a cluster has: what counts is whether calls and transfers
    overlap. There the ring has as many chunks in flight as the tier, which has its default.

    `ceiling.ring_*`: one ring, one thread, registered memory and nothing around them: files are open and registered before,
    and new (for writes). `hf3fs.*`: the tier with its defaults: files are made, registered, verified, synced and named.
    By memory: `arena`, which
    rings read into and write from, and `buffers`, with one copy. Directories are there before, as in a cache that has run
    for a while. `hf3fs.lag_*_ms.*`: of a timer of one millisecond on the loop meanwhile, over all runs.
    """
    install()
    place = Path(tempfile.mkdtemp(prefix="tiercache-bench-3fs-", dir="/dev/shm"))
    before = os.environ.get("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP")
    late_s: dict[str, list[float]] = {}
    try:
        _touch_memory(place, 4 * plan.sizes.total_bytes)
        with Hf3fsEmulator(place, fuse=why_no_fuse() is None) as emulator:
            os.environ.update(emulator.environment.items() & {("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")})
            for chunk_bytes in SIZES:
                await _measure_size(figures, plan, peer_python, emulator, chunk_bytes, late_s)
    finally:
        if before is None:
            os.environ.pop("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", None)
        shutil.rmtree(place, ignore_errors=True)
    for name, found in late_s.items():
        figures.add(f"hf3fs.lag_p99_ms.{name}", p99(sorted(found)) * 1e3)
        figures.add(f"hf3fs.lag_max_ms.{name}", max(found) * 1e3)


async def _measure_size(
    figures: Figures,
    plan: Plan,
    peer_python: Path | None,
    emulator: Hf3fsEmulator,
    chunk_bytes: int,
    late_s: dict[str, list[float]],
) -> None:
    size, count = size_name(chunk_bytes), min(_MOST_FILES, plan.count(chunk_bytes) // 2)
    slots = min(_SLOTS, count)
    with (
        _start_peer(peer_python, plan, emulator, chunk_bytes, count) as peer,
        BareRing(emulator.mount, chunk_bytes, count, slots) as bare,
        Bench(emulator.mount, chunk_bytes, "arena", slots) as direct,
        Bench(emulator.mount, chunk_bytes, "buffers", slots) as copying,
    ):
        benches = {"arena": direct, "buffers": copying}
        for bench in benches.values():
            await bench.tier.open()
            await bench.tier.scanned()
        try:
            for pair in range(plan.pairs):
                plan.progress(f"3FS tier, {size}, pair {pair + 1} of {plan.pairs}")
                for depth in DEPTHS:
                    run = Run(figures, "", size, f".d{depth}", depth, late_s)
                    by_peer = [run.by_peer(peer)] if depth == DEPTHS[-1] else []
                    await in_turn(pair, *run.ours(bare, benches, new_keys(count)), *by_peer)
                emulator.control.pace(Pace())
                run = Run(figures, "paced.", size, "", slots, late_s)
                await in_turn(pair, *run.ours(bare, benches, new_keys(count)), run.by_peer(peer))
                emulator.control.pace(None)
        finally:
            emulator.control.pace(None)
            for bench in benches.values():
                await bench.tier.close()


@dataclass
class Run:
    """What is measured at one depth, and how its figures are called."""

    figures: Figures
    kind: str
    size: str
    suffix: str
    depth: int
    late_s: dict[str, list[float]]

    def ours(
        self, bare: BareRing, benches: dict[str, Bench], keys: list[ChunkKey]
    ) -> list[Callable[[], Awaitable[None]]]:
        async def alone() -> None:
            for way, read in (("write", False), ("read", True)):
                gbps = await asyncio.to_thread(bare.run, self.depth, read=read)
                self.figures.add(self._name("ceiling", f"ring_{way}"), gbps)

        def by_tier(mode: str) -> Callable[[], Awaitable[None]]:
            async def measure() -> None:
                bench = benches[mode]
                for way, run in (("write", bench.write), ("read", bench.read)):
                    gbps, late_s = await run(keys, self.depth)
                    name = self._name("hf3fs", f"{way}_{mode}")
                    self.figures.add(name, gbps)
                    self.figures.compare(name, self._name("ceiling", f"ring_{way}"))
                    self.late_s.setdefault(f"{self.kind}{way}_{mode}", []).extend(late_s)
                await benches[mode].remove(keys)

            return measure

        return [alone, *(by_tier(mode) for mode in MODES)]

    def by_peer(self, peer: Peer) -> Callable[[], Awaitable[None]]:
        async def measure() -> None:
            for way in ("write", "read"):
                theirs = f"hf3fs.{self.kind}{way}_gbps.{self.size}"
                peer.add(self.figures, way, **{way: (theirs, self._name("hf3fs", f"{way}_buffers"))})

        return measure

    def _name(self, whose: str, what: str) -> str:
        return f"{whose}.{self.kind}{what}_gbps.{self.size}{self.suffix}"


def _touch_memory(place: Path, size_bytes: int) -> None:
    """A virtual machine pays for memory when it is first used, and keeps it."""
    with (place / "touched").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    (place / "touched").unlink()


def _start_peer(
    peer_python: Path | None, plan: Plan, emulator: Hf3fsEmulator, chunk_bytes: int, count: int
) -> AbstractContextManager[Peer]:
    variables = [f"{name}={value}" for name, value in emulator.environment.items()]
    return peer_of(peer_python, plan, "hf3fs", chunk_bytes, count, emulator.mount, variables)


class BareRing:
    """Files of one size through one ring in each direction, by one thread."""

    def __init__(self, mount: Path, chunk_bytes: int, count: int, slots: int) -> None:
        self._library = load_library()
        self._mount = mount
        self._chunk_bytes = chunk_bytes
        self._paths = [mount / f"ceiling.{number}" for number in range(count)]
        self._slots = slots
        self._arena = Arena(ArenaSettings(size_bytes=slots * chunk_bytes, shm_name=f"bench-ring-{os.getpid()}"))
        self._arena.memory[:] = np.random.default_rng(1).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        registered = registered_arena(self._arena)
        assert registered is not None
        self._registered: RegisteredMemory = registered

    def run(self, depth: int, *, read: bool) -> float:
        """GB/s of all files, with `depth` of them in flight. Writing makes them anew."""
        flags = os.O_RDONLY if read else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        ring = self._library.make_ioring(str(self._mount), 256, read)
        descriptors = [os.open(path, flags, 0o600) for path in self._paths]
        for descriptor in descriptors:
            self._library.register_fd(descriptor)
        began = time.perf_counter()
        _move_all(ring, self._registered.iov, descriptors, self._chunk_bytes, min(depth, self._slots), read)
        took = time.perf_counter() - began
        for descriptor in descriptors:
            self._library.deregister_fd(descriptor)
            os.close(descriptor)
        return len(descriptors) * self._chunk_bytes / took / 1e9

    def __enter__(self) -> BareRing:
        self._registered.register(self._library, str(self._mount), -1)
        return self

    def __exit__(self, *exception: object) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._registered.release()
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

    def __init__(self, mount: Path, chunk_bytes: int, mode: str, slots: int) -> None:
        self._chunk_bytes = chunk_bytes
        shm_name = f"bench-3fs-{os.getpid()}" if mode == "arena" else None
        self._arena = Arena(ArenaSettings(size_bytes=slots * chunk_bytes, shm_name=shm_name))
        self._arena.memory[:] = np.random.default_rng(2).integers(0, 256, self._arena.memory.nbytes, dtype=np.uint8)
        self._slots = [self._arena.memory[number * chunk_bytes : (number + 1) * chunk_bytes] for number in range(slots)]
        iov_bytes = 2 * slots * (chunk_bytes + 4096)
        settings = Hf3fsSettings(
            (mount / mode,), 64 << 30, iov_bytes=iov_bytes, chunk_bytes=chunk_bytes, rings=RingSettings()
        )
        self.tier = Hf3fsTier(settings, bytes(16))
        self.tier.use_arena(self._arena)
        for top in TOP_LEVELS:
            (mount / mode / "tiercache-chunks" / top).mkdir(parents=True, exist_ok=True)

    async def write(self, keys: Sequence[ChunkKey], depth: int) -> tuple[float, list[float]]:
        """GB/s, and the loop's lags in seconds meanwhile."""

        async def one(key: ChunkKey, slot: np.ndarray) -> None:
            assert await self.tier.write(key, slot, self._chunk_bytes)

        return await self._run(keys, depth, one)

    async def read(self, keys: Sequence[ChunkKey], depth: int) -> tuple[float, list[float]]:
        """As `write`."""

        async def one(key: ChunkKey, slot: np.ndarray) -> None:
            assert await self.tier.read(key, slot) == self._chunk_bytes

        return await self._run(keys, depth, one)

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            await self.tier.remove(key)

    async def _run(
        self, keys: Sequence[ChunkKey], depth: int, one: Callable[[ChunkKey, np.ndarray], Awaitable[None]]
    ) -> tuple[float, list[float]]:
        took, late_s = await timed_in_lanes(keys, self._slots[:depth], one)
        return len(keys) * self._chunk_bytes / took / 1e9, late_s

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._slots.clear()
        self._arena.close()
