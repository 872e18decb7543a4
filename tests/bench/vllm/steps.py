"""What a connector in a server writes about the scheduler's steps."""

from __future__ import annotations

STEPS_FILE = "BENCH_STEPS_FILE"
"""The environment's name for the file."""


def steps_s(lines: str, at_least: int) -> list[float]:
    """Of steps with so many requests waiting: the seconds of each, in rising order."""
    found = (line.split() for line in lines.splitlines())
    return sorted(float(seconds) for waiting, seconds in found if int(waiting) >= at_least)
