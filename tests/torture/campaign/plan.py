"""Which fault strikes when: pure functions of the seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

PARTS = ("disk", "fs", "full", "redis", "hf3fs")
"""What can be asked for."""

PLACES = {
    "disk": ("disk", "disk-roomy"),
    "fs": ("fs", "fs-roomy"),
    "full": ("full",),
    "redis": ("redis",),
    "hf3fs": ("hf3fs",),
}
"""A crowded place evicts all the time; in a roomy one nothing may be lost."""

AUDIT_EVERY_S = 1.0


@dataclass(frozen=True)
class Temper:
    """How often what strikes in a place, in mean seconds, and how long it lasts."""

    kill_every_s: float
    strike_every_s: float = 0.0
    """Something happens to the place itself: its device fills up, its server freezes."""
    kinds: tuple[str, ...] = ()
    longest_s: float = 0.0


TEMPERS = {
    "disk": Temper(0.15),
    "fs": Temper(0.25),
    "full": Temper(0.4, strike_every_s=1.5, kinds=("fill",), longest_s=1.5),
    "redis": Temper(0.5, strike_every_s=3.0, kinds=("freeze", "die"), longest_s=3.0),
    "hf3fs": Temper(1.0, strike_every_s=3.0, kinds=("freeze", "hang", "die"), longest_s=3.0),
}


@dataclass(frozen=True)
class Fault:
    at_s: float
    """Since the round's beginning."""
    kind: str
    """kill: a worker, with -9; audit: all stand still and are counted; else what happens to the place itself, until heal."""
    choice: float = 0.0
    """0 .. 1: which of the workers."""


@dataclass(frozen=True)
class Round:
    number: int
    place: str
    seconds: float
    writers: int
    """Processes that work side by side, the one that is never killed among them."""
    faults: tuple[Fault, ...]


def rounds(seed: int, parts: tuple[str, ...], seconds: float) -> Iterator[Round]:
    """Round after round without an end, each part in its turn and each place of a part in its turn."""
    number = 0
    while True:
        for part in parts:
            place = PLACES[part][number // len(parts) % len(PLACES[part])]
            random = Random(f"{seed}/round/{number}")
            writers = random.randint(2, 4)
            yield Round(number, place, seconds, writers, _faults(random, TEMPERS[part], seconds))
            number += 1


def _faults(random: Random, temper: Temper, seconds: float) -> tuple[Fault, ...]:
    """Kills at random instants, but not while a server or a mount is struck: what a killed process had sent there would be
    carried out after its successor's orders, and nobody could say any more what must be there."""
    strikes = _strikes(random, temper, seconds)
    faults = [fault for kind, from_s, to_s in strikes for fault in (Fault(from_s, kind), Fault(to_s, "heal"))]
    spared = [(from_s, to_s) for kind, from_s, to_s in strikes if kind != "fill"]
    at_s = random.expovariate(1 / temper.kill_every_s)
    while at_s < seconds:
        if not any(from_s <= at_s < to_s for from_s, to_s in spared):
            faults.append(Fault(at_s, "kill", random.random()))
        at_s += random.expovariate(1 / temper.kill_every_s)
    faults += [Fault(number * AUDIT_EVERY_S, "audit") for number in range(1, int(seconds / AUDIT_EVERY_S) + 1)]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _strikes(random: Random, temper: Temper, seconds: float) -> list[tuple[str, float, float]]:
    """Kind, beginning and end. A round has one kind of them."""
    found: list[tuple[str, float, float]] = []
    if not temper.kinds:
        return found
    kind = random.choice(temper.kinds)
    at_s = random.uniform(0.2, min(temper.strike_every_s, seconds / 2))
    while at_s < seconds:
        end_s = min(seconds, at_s + random.uniform(0.05, temper.longest_s))
        found.append((kind, at_s, end_s))
        at_s = end_s + random.uniform(0.3, temper.strike_every_s)
    return found
