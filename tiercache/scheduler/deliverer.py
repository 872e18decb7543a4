"""A batch of chunks to where they are wanted: hot ones in parts, others as they are read, up to the first gap."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from tiercache.core.keys import ChunkKey
from tiercache.scheduler.together import all_or_none
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease


class Landing(Protocol):
    """Where the chunks of one batch are wanted: host memory, or a device's."""

    def part_of(self, chunks: int) -> int:
        """How many are handed over at a time, of so many that are hot. At least 1."""

    async def take(self, part: Sequence[tuple[int, Lease]], delivered: bytearray) -> None:
        """Bring chunks where they are wanted, by position in the batch, and mark those that are in place. Releases the
        leases in any case, as soon as nothing reads their memory any more."""


class Cascade(Protocol):
    """Where they come from."""

    cpu: CpuTier
    lanes: int
    """How many chunks are fetched at a time."""

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        """The chunk if it is hot; `noted`: its use is counted already."""

    async def fetch(
        self, key: ChunkKey, deadline_s: float, parent: ChunkKey | None = None, time: int | None = None
    ) -> Lease | None:
        """The chunk from whichever tier has it; None on a miss or at the deadline. `time` is that of its access."""


class WithHeld:
    """A cascade that finds chunks also where they were removed after somebody got these leases."""

    def __init__(self, cascade: Cascade, held: Mapping[ChunkKey, Lease]) -> None:
        self.cpu, self.lanes, self.fetch = cascade.cpu, cascade.lanes, cascade.fetch
        self._lease_now = cascade.lease_now
        self._held = held

    def lease_now(self, key: ChunkKey, *, noted: bool = False) -> Lease | None:
        lease = self._lease_now(key, noted=noted)
        if lease is None and (held := self._held.get(key)) is not None:
            return held.reader()
        return lease


_PART = 512
"""Chunks that are looked up, or handed over, without a look at the clock and at what else the loop has to do."""
_PARTS_AT_ONCE = 4


async def deliver(cascade: Cascade, keys: Sequence[ChunkKey], landing: Landing, deadline_s: float) -> int:
    """Returns how many of the contiguous prefix are in place. What lies behind a gap may be as well. When this has returned
    or raised, nothing is under way to the landing any more (but for what that says of itself)."""
    loop = asyncio.get_running_loop()
    delivered = bytearray(len(keys))
    time = cascade.cpu.access(keys)
    hot: dict[int, Lease] = {}
    parts: dict[int, list[tuple[int, Lease]]] = {}
    try:
        gap = await _lease_hot(cascade, keys, hot, deadline_s)
        chunks, whole = list(hot.items()), landing.part_of(len(hot))
        size, at_once = min(_PART, whole), max(_PARTS_AT_ONCE, -(-len(hot) // whole))
        parts = {start: chunks[start : start + size] for start in range(0, len(chunks), size)}
        hot_parts = iter(range(0, len(chunks), size))
        cold = iter([position for position in range(gap) if position not in hot] if len(hot) < gap else ())

        async def hand_over() -> None:
            """One part after the other. Those that begin at once do so whatever the time is."""
            for start in hot_parts:
                if start >= at_once * size and loop.time() >= deadline_s:
                    return
                await landing.take(parts.pop(start), delivered)

        async def lane() -> None:
            """Take one position after the other until a gap makes the rest worthless."""
            nonlocal gap
            for position in cold:
                if position > gap:
                    return
                parent = keys[position - 1] if position else None
                lease = await cascade.fetch(keys[position], deadline_s, parent, time - position)
                if lease is not None:
                    await landing.take([(position, lease)], delivered)
                if not delivered[position]:
                    gap = min(gap, position)

        work = [asyncio.ensure_future(hand_over()) for _ in range(min(at_once, len(parts)))]
        work += [asyncio.ensure_future(lane()) for _ in range(min(cascade.lanes, gap - len(hot)))]
        hot = {}  # they belong to their parts now
        await all_or_none(work)
    finally:
        # A part that was cancelled before its first step, or never begun, never came to its own clean-up.
        for lease in (*hot.values(), *(lease for part in parts.values() for _, lease in part)):
            lease.release()
    cascade.cpu.link(keys, time)
    lost = delivered.find(0)
    return len(keys) if lost < 0 else lost


async def _lease_hot(
    cascade: Cascade, keys: Sequence[ChunkKey], hot: dict[int, Lease], deadline_s: float
) -> int:
    """Fills `hot`, by position, and returns how many keys there was time for."""
    loop = asyncio.get_running_loop()
    for start in range(0, len(keys), _PART):
        if start:
            await asyncio.sleep(0)
            if loop.time() >= deadline_s:
                return start
        for position in range(start, min(start + _PART, len(keys))):
            lease = cascade.lease_now(keys[position], noted=True)
            if lease is not None:
                hot[position] = lease
    return len(keys)
