"""What the figures should be, beside what they are."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tiercache.bench.figures import Figures


@dataclass(frozen=True)
class Goal:
    name: str
    most: float
    beside: str = ""
    """`most` is of the ratio to this figure; without one, of the figure's median."""


GOALS = (
    *(Goal(f"vllm.new.{what}", 1.02, f"alone.vllm.new.{what}") for what in ("total_s", "ttft_mean_ms", "ttft_p99_ms")),
    *(
        Goal(f"vllm.engine_hits.{what}", 1.01, f"alone.vllm.engine_hits.{what}")
        for what in ("total_s", "ttft_mean_ms", "ttft_p99_ms")
    ),
    Goal("vllm.documents.total_s", 1.05, "ceiling.vllm.documents.total_s"),
    Goal("vllm.documents.ttft_mean_ms", 1.3, "ceiling.vllm.documents.ttft_mean_ms"),
    Goal("vllm.step_median_ms", 0.2),
    Goal("vllm.step_p99_ms", 1.0),
)


def compared_with_goals(figures: Figures) -> list[str]:
    """A line for each goal whose figures were measured."""
    found = []
    for goal in GOALS:
        samples = figures.samples.get(goal.name)
        if not samples:
            continue
        value = figures.ratio(goal.name, goal.beside) if goal.beside else statistics.median(samples)
        if value is None:
            continue
        of = f" / {goal.beside}" if goal.beside else ""
        met = "reached" if value <= goal.most else "missed"
        found.append(f"{met}: {goal.name}{of} is {value:.3f}, the goal is at most {goal.most:g}")
    return found
