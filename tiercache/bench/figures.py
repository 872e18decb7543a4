"""Samples under stable names, and what is printed and saved of them."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Figures:
    samples: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, tuple[str, str]] = field(default_factory=dict)
    """ours -> (ceiling, which must be measured just before or after it)"""

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def compare(self, ours: str, ceiling: str) -> None:
        self.ratios[ours] = (ours, ceiling)

    def ratio(self, ours: str) -> float | None:
        """Median of the ratios pair by pair."""
        if ours not in self.ratios:
            return None
        _, ceiling = self.ratios[ours]
        pairs = list(zip(self.samples.get(ours, ()), self.samples.get(ceiling, ()), strict=False))
        return statistics.median(mine / theirs for mine, theirs in pairs) if pairs else None

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, values in self.samples.items():
            row: dict[str, Any] = {
                "median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)
            }  # fmt: skip
            ratio = self.ratio(name)
            if ratio is not None:
                row |= {"ceiling": self.ratios[name][1], "ratio": ratio}
            found[name] = row
        return found


def machine(directory: Path) -> dict[str, Any]:
    """What the figures depend on."""
    import numpy
    import xxhash

    from tiercache import __version__

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "tiercache": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "xxhash": xxhash.VERSION,
        "kernel": platform.release(),
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 2**30, 1),
        "device": os.stat(directory).st_dev,
        "load": os.getloadavg(),
    }
