"""Who may take a slot of the arena: budgets with floors, so that reads and writes cannot starve each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Purpose(IntEnum):
    """Integers, since budgets are counted several times a chunk and hashing an Enum is slow."""

    READ = 0
    """A demand read: somebody waits for this chunk."""
    WRITE = 1
    """A chunk on its way into the cache."""
    PREFETCH = 2
    """A chunk that somebody may ask for, while it is read and while it is kept for them."""


@dataclass
class SlotBudget:
    """Counts of held slots. `obtainable` slots are those free or evictable at this moment.

    A write leaves enough for reads to reach `read_floor`, a read leaves enough for writes to reach `write_floor`, and a
    prefetch leaves both.
    """

    slots: int
    read_floor: int
    write_floor: int
    held: list[int] = field(default_factory=lambda: [0] * len(Purpose))
    """Held slots by purpose."""

    @classmethod
    def for_arena(cls, slots: int) -> SlotBudget:
        """Floors of an eighth of the arena each, at least one slot."""
        floor = max(1, slots // 8)
        return cls(slots, read_floor=floor, write_floor=floor)

    def allows(self, purpose: Purpose, obtainable: int) -> bool:
        for_reads = max(0, self.read_floor - self.held[Purpose.READ])
        for_writes = max(0, self.write_floor - self.held[Purpose.WRITE])
        if purpose is Purpose.WRITE:
            kept = for_reads
        elif purpose is Purpose.READ:
            kept = for_writes
        else:
            kept = for_reads + for_writes
        return obtainable > kept

    def take(self, purpose: Purpose) -> None:
        self.held[purpose] += 1

    def give_back(self, purpose: Purpose) -> None:
        self.held[purpose] -= 1
        assert self.held[purpose] >= 0, f"{purpose.name} slots given back twice"
