"""Parts of a simulated machine besides a disk: an accelerator, a mount of Weka, 3FS or tmpfs, a third party's tier."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.torture.simulation.weather import KINDS_OF_SERVERS

KINDS_OF_DEVICES = ("refuses", "slow", "hung", "lost")
KINDS_OF_RINGS = ("eio", "slow", "hung", "full", "dead", "ring-error", "ring-short", "late", "silent", "stuck")
KINDS_OF_OWN = ("refused", "unavailable", "lost-answer", "slow", "hung")
KINDS_OF_MEMORY = ("full", "no-memory", "slow", "hung")
MEMORY = "shared_memory"
"""The tier, and the place where its tmpfs is mounted."""
KINDS_BY_PLACE = {
    "remote": KINDS_OF_SERVERS, "gpu": KINDS_OF_DEVICES, "hf3fs": KINDS_OF_RINGS, "own": KINDS_OF_OWN,
    MEMORY: KINDS_OF_MEMORY,
}  # fmt: skip

_TIERS = (
    ("weka",),
    ("weka",),
    ("gds",),
    ("gds",),
    ("disk", "gds"),
    ("gds", "remote"),
    ("hf3fs",),
    ("hf3fs",),
    ("disk", "hf3fs"),
)
_MEMORY_TIERS = ((MEMORY,), (MEMORY,), (MEMORY, "disk"), (MEMORY, "remote"))
_WITH_MEMORY = frozenset({4, 16, 17, 20})
"""Seeds with these remainders by 31 have a shared memory tier. None of seeds.txt had one when it came."""
SHARED = frozenset({"weka", "gds", "hf3fs", MEMORY})
"""Of which several processes may use one directory."""


@dataclass(frozen=True)
class Fittings:
    device_slots: int = 0
    """Of the device's pool; 0: there is no device."""
    way: str = "posix"
    """How files get to device memory: posix, or cufile."""
    pins: bool = True
    """Whether host memory can be locked for the device; where it cannot, copies block."""
    shared_arena: bool = False
    """Whether the arena lies in shared memory, where a ring's daemon writes into it."""
    ring_places: int = 8
    """Of the transfer buffers."""
    ring_entries: int = 8
    own: str = ""
    """module:Class of a third party's tier, for a setting whose tiers have "own"."""
    own_options: dict[str, str] = field(default_factory=dict)
    """Its settings; {place} in a value is a directory on a simulated disk."""


def tiers_of(chance: random.Random) -> tuple[str, ...]:
    """The tiers of a setting in which something of all this takes part."""
    return chance.choice(_TIERS)


def memory_tiers_of(seed: int) -> tuple[str, ...] | None:
    """The tiers of a setting with shared memory, for the seeds that have it."""
    return random.Random(f"shared memory {seed}").choice(_MEMORY_TIERS) if seed % 31 in _WITH_MEMORY else None


def fittings_of(chance: random.Random, tiers: tuple[str, ...]) -> Fittings:
    files_of_device = bool({"weka", "gds"} & set(tiers))
    device = chance.random() < 0.6 if files_of_device else chance.random() < 0.1
    way = chance.choice(["posix", "posix", "cufile"]) if device and files_of_device else "posix"
    device_slots = chance.choice([4, 6, 12, 32]) if device else 0
    chance.randrange(3)  # of what is no more: a seed that has found something keeps its setting
    return Fittings(
        device_slots=device_slots,
        way=way,
        pins=chance.random() < 0.8,
        shared_arena="hf3fs" in tiers and chance.random() < 0.5,
        ring_places=chance.choice([2, 4, 16]),
        ring_entries=chance.choice([4, 8, 32]),
    )
