"""What a part found: figures, checks that passed or failed, and facts. Saved after each step, so that a part which is
stopped loses only the step it was at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.bench.figures import Figures


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    cpu: bool
    quick: bool

    @property
    def pairs(self) -> int:
        return 2 if self.cpu else 3 if self.quick else 7

    def of(self, full: int, quick: int, cpu: int) -> int:
        return cpu if self.cpu else quick if self.quick else full


class Report:
    def __init__(self, path: Path, amount: Amount, directory: Path) -> None:
        self.path = path
        self.amount = amount
        self.directory = directory
        """For files that are measured."""
        self.figures = Figures()
        self.checks: dict[str, str] = {}
        self.facts: dict[str, Any] = {}

    def save(self) -> None:
        found = {"figures": self.figures.to_dict(), "checks": self.checks, "facts": self.facts}
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found, indent=1))
        os.replace(unfinished, self.path)

    def check(self, name: str, passed: bool, otherwise: str = "failed") -> None:
        """A name that is checked several times stays failed."""
        if not passed or name not in self.checks:
            self.checks[name] = "passed" if passed else otherwise

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What raises in it is noted, and does not keep the next step from running."""
        print(name, flush=True)
        try:
            yield
        except Exception as error:
            import traceback

            traceback.print_exc()
            self.checks[name] = f"{type(error).__name__}: {error}"
        finally:
            self.save()


@dataclass(frozen=True)
class Target:
    figure: str
    at_least: bool
    limit: float
    beside: str | None = None
    """The figure that it is a ratio to; None: the median itself."""

    def found(self, figures: dict[str, Any]) -> float | None:
        row = figures.get(self.figure, {})
        value = row.get("median") if self.beside is None else row.get("ratios", {}).get(self.beside)
        return None if value is None else float(value)

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("paged.LBNHC.offload_gbps", True, 0.9, "paged.LBNHC.ceiling_d2h_gbps"),
    Target("paged.LBNHC.load_gbps", True, 0.9, "paged.LBNHC.ceiling_h2d_gbps"),
    Target("paged.BLNHC.offload_gbps", True, 0.9, "paged.BLNHC.ceiling_d2h_gbps"),
    Target("paged.BLNHC.load_gbps", True, 0.9, "paged.BLNHC.ceiling_h2d_gbps"),
    Target("paged.MLA.offload_gbps", True, 0.9, "paged.MLA.ceiling_d2h_gbps"),
    Target("paged.MLA.load_gbps", True, 0.9, "paged.MLA.ceiling_h2d_gbps"),
    Target("cache.offload_gbps", True, 0.9, "cache.ceiling_d2h_gbps"),
    Target("cache.load_gbps", True, 0.9, "cache.ceiling_h2d_gbps"),
    Target("events.asyncio.p50_us", False, 200.0),
    Target("events.uvloop.p50_us", False, 200.0),
    Target("events.asyncio.cpu_us", False, 200.0),
    Target("ttft.cpu_s", False, 1.5, "ttft.floor_s"),
    Target("overlap.slowdown_percent", False, 2.0),
)
