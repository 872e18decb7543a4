"""How long to leave a mount alone after it was looked through."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

_LONGEST_SHARE = 10


def usual_s(calls_s: Sequence[float]) -> float:
    """What calls that took so long take together when none of them hangs."""
    return median_low(calls_s) * len(calls_s) if calls_s else 0.0


def pause_s(calls_s: Sequence[float]) -> float:
    """So that looking takes a tenth of the time: a slow mount is looked through less often, but one that hung for a while is
    not left alone for ten times as long."""
    return usual_s(calls_s) * _LONGEST_SHARE
