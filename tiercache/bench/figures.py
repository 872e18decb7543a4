"""Store samples under stable names, and print and save them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table


@dataclass
class Figures:
    """Samples by name. Higher is better, except for names that end in `_us`, `_ms`, `_s` or `bytes_per_entry`."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    compared: dict[str, list[str]] = field(default_factory=dict)
    """Ceilings and peers measured beside each figure, sample by sample."""

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def compare(self, ours: str, other: str) -> None:
        others = self.compared.setdefault(ours, [])
        if other not in others:
            others.append(other)

    def ratio(self, ours: str, other: str) -> float | None:
        """Return the median of ours / other, pair by pair: both values of a pair drift with the machine."""
        pairs = list(zip(self.samples.get(ours, ()), self.samples.get(other, ()), strict=False))
        return statistics.median(mine / theirs for mine, theirs in pairs) if pairs else None

    def to_dict(self) -> dict[str, Any]:
        """Return median, min, max, count, and `ratios` to other figures, by name."""
        found: dict[str, Any] = {}
        for name, values in self.samples.items():
            found[name] = {
                "median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)
            }  # fmt: skip
            ratios = {other: self.ratio(name, other) for other in self.compared.get(name, ())}
            if ratios:
                found[name]["ratios"] = ratios
        return found

    def table(self) -> Table:
        """Return a table with a row per figure. Rows of ceilings and peers have the ratio of our figure to theirs."""
        table = Table()
        table.add_column("figure", no_wrap=True)
        for column in ("median", "min", "max", "count"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("ours / it", justify="right")
        beside = {other: ours for ours, others in self.compared.items() for other in others}
        for name, row in sorted(self.to_dict().items()):
            ratio = self.ratio(beside[name], name) if name in beside else None
            table.add_row(
                name,
                *(f"{row[key]:,.4g}" if row[key] < 1e5 else f"{row[key]:.3g}" for key in ("median", "min", "max")),
                str(row["count"]),
                "" if ratio is None else f"{ratio:.2f} ({beside[name].partition('.')[0]})",
            )
        return table
