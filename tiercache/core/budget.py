"""Slot budgets with floors, so that reads and writes cannot starve each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum


class Purpose(IntEnum):
    """The purpose that a slot is held for. Integers, since hashing an Enum is slow and budgets are counted per chunk."""

    READ = 0
    """A demand read: a caller waits for this chunk."""
    WRITE = 1
    """A chunk on its way into the cache."""
    PREFETCH = 2
    """A chunk that is read, or pinned, for a future reader."""


READ, WRITE, PREFETCH = Purpose
"""Module-level names for hot paths: an attribute look-up on the class costs as much as a call in Python 3.11."""


@dataclass
class SlotBudget:
    """Counts of held slots. `obtainable` slots are those free or evictable at this moment.

    A write leaves enough for reads to reach `read_floor`, a read leaves enough for writes to reach `write_floor`, and a
    prefetch leaves both. Each of several tiers has an equal part of the read floor to itself, so that a tier that hangs does
    not take the others' parts.
    """

    slots: int
    read_floor: int
    write_floor: int
    held: list[int] = field(default_factory=lambda: [0] * len(Purpose))
    """Held slots by purpose."""
    reading: dict[str, int] = field(default_factory=dict)
    """Slots held for reads that a tier is reading into, by tier."""

    @classmethod
    def for_arena(cls, slots: int) -> SlotBudget:
        """Return a budget with floors of an eighth of the arena each, at least one slot."""
        floor = max(1, slots // 8)
        return cls(slots, read_floor=floor, write_floor=floor)

    def divide(self, tiers: Iterable[str]) -> None:
        """Name the tiers that read into these slots."""
        self.reading |= dict.fromkeys(tiers, 0)

    @property
    def reads_at_once(self) -> int:
        """The most slots that the reads of one tier may hold, abandoned ones included; half of the slots for all tiers."""
        return max(1, self.slots // (2 * max(1, len(self.reading))))

    def writes_at_once(self, tiers: int) -> int:
        """Return the most slots that one of so many tiers may be writing from, abandoned writes included; a quarter of the
        slots for all tiers."""
        return max(1, self.slots // (4 * max(1, tiers)))

    def allows(self, purpose: Purpose, obtainable: int, tier: str | None = None) -> bool:
        """Return True if one more slot may be held; `tier` is the tier that would read into it."""
        if obtainable > self.read_floor + self.write_floor:
            return True  # no purpose has to leave more than that
        if purpose is READ:
            kept = self._for_writes + (self._for_other_reads(tier) if len(self.reading) > 1 else 0)
        elif purpose is WRITE:
            kept = self._for_reads
        else:
            kept = self._for_reads + self._for_writes
        return obtainable > kept

    def writes_allowed(self, obtainable: int) -> int:
        """Return how many more slots may be held for writes."""
        return max(0, obtainable - self._for_reads)

    def take(self, purpose: Purpose, tier: str | None = None) -> None:
        self.held[purpose] += 1
        if tier is not None and purpose is READ:
            self.reading[tier] = self.reading.get(tier, 0) + 1

    def arrived(self, tier: str) -> None:
        """Record that a read by `tier` has ended and its slot holds a chunk now, for the same purpose."""
        self.reading[tier] -= 1

    def give_back(self, purpose: Purpose, tier: str | None = None) -> None:
        self.held[purpose] -= 1
        assert self.held[purpose] >= 0, f"{purpose.name} slots given back twice"
        if tier is not None and purpose is READ:
            self.reading[tier] -= 1

    @property
    def _for_writes(self) -> int:
        return max(0, self.write_floor - self.held[WRITE])

    @property
    def _for_reads(self) -> int:
        """Return the slots that must be left to reads. A tier that hangs uses up only its own part of the floor."""
        counted = self.held[READ]
        part = self._part
        for filled in self.reading.values():
            if filled > part:
                counted -= filled - part
        return max(0, self.read_floor - counted)

    def _for_other_reads(self, tier: str | None) -> int:
        part = self._part
        return sum(part - filled for name, filled in self.reading.items() if name != tier and filled < part)

    @property
    def _part(self) -> int:
        return self.read_floor // max(1, len(self.reading))
