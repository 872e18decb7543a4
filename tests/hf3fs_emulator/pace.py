"""How slow calls on the mount are, for an emulator that otherwise answers at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Calls on the mount that only look take `look_s`, those that change something `change_s`."""

    look_s: float
    change_s: float
