"""Check the demo's results, and show them as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiercache.demo.question import Answer
from tiercache.tables import show_figures

LABELS = {
    "cold": "cold",
    "cpu": "warm, CPU tier",
    "disk_restart": "warm, disk after restart",
    "prefix_cache": "vLLM's own prefix cache",
}


@dataclass(frozen=True)
class Run:
    name: str
    tier: str
    answer: Answer

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ttft_s": round(self.answer.ttft_s, 4),
            "prompt_tokens": self.answer.prompt_tokens,
            "hit_tokens": self.answer.hit_tokens,
            "tier": self.tier,
            "text_sha256": self.answer.text_sha256,
        }


def problems(runs: dict[str, Run]) -> list[str]:
    """Return a sentence for each expected result that does not hold."""
    found = []
    reference = runs["prefix_cache"]
    if runs["cold"].answer.hit_tokens:
        found.append(f"the cold run was not cold: {runs['cold'].answer.hit_tokens} tokens hit")
    if not reference.answer.hit_tokens:
        found.append("vLLM's own prefix cache did not hit, so there is no reference")
    if reference.tier != "vllm":
        found.append(f"{LABELS['prefix_cache']}: the hit came from {reference.tier or 'nowhere'}")
    for name, tier in (("cpu", "cpu"), ("disk_restart", "disk")):
        run = runs[name]
        if run.answer.hit_tokens != reference.answer.hit_tokens:
            found.append(
                f"{LABELS[name]}: expected {reference.answer.hit_tokens} tokens hit, found {run.answer.hit_tokens}"
            )
        if run.tier != tier:
            found.append(f"{LABELS[name]}: expected a hit in {tier}, found {run.tier or 'none'}")
        if run.answer.text_sha256 != reference.answer.text_sha256:
            found.append(
                f"{LABELS[name]}: answered {run.answer.text!r}, vLLM's prefix cache answers {reference.answer.text!r}"
            )
    return found


def same_text(runs: dict[str, Run]) -> bool:
    """Return True if every cached answer equals the answer from vLLM's own prefix cache."""
    return len({runs[name].answer.text_sha256 for name in ("cpu", "disk_restart", "prefix_cache")}) == 1


def show(runs: dict[str, Run], console: Console) -> None:
    cold_s = runs["cold"].answer.ttft_s
    table = Table(title="Time to first token of the same long question")
    table.add_column("run")
    for column in ("TTFT", "tokens hit", "tier", "speed-up"):
        table.add_column(column, justify="right")
    for run in runs.values():
        answer = run.answer
        speed_up = "" if run.name == "cold" else f"{cold_s / answer.ttft_s:.0f}x"
        hit = f"{answer.hit_tokens:,} of {answer.prompt_tokens:,}"
        table.add_row(LABELS[run.name], f"{answer.ttft_s:.3f} s", hit, run.tier or "-", speed_up)
    show_figures(table, console)


def write_json(runs: dict[str, Run], path: Path) -> None:
    report = {"same_text": same_text(runs), "runs": [run.to_dict() for run in runs.values()]}
    path.write_text(json.dumps(report, indent=2) + "\n")


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw a bar per run on a logarithmic scale, since 60-fold differences are invisible on a linear scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"cold": "#9aa0a6", "cpu": "#1a73e8", "disk_restart": "#12a4af", "prefix_cache": "#c6dafc"}
    cold_s = runs["cold"].answer.ttft_s
    figure, axes = pyplot.subplots(figsize=(8.4, 3.5), layout="constrained")
    for position, run in enumerate(reversed(runs.values())):
        ttft_s = run.answer.ttft_s
        axes.barh(position, ttft_s, color=colours[run.name], height=0.62)
        times = "" if run.name == "cold" else f"   {cold_s / ttft_s:.0f}x faster"
        axes.text(ttft_s * 1.07, position, f"{ttft_s:.2f} s{times}", va="center", fontsize=10)
    axes.set_yticks(range(len(runs)), [LABELS[run.name] for run in reversed(runs.values())])
    axes.set_xscale("log")
    axes.set_xlim(min(run.answer.ttft_s for run in runs.values()) / 2.2, cold_s * 3.2)
    axes.set_xlabel("time to first token in seconds (logarithmic)")
    answer = runs["cpu"].answer
    axes.set_title(
        f"SmolLM2-135M on vLLM (CPU): {answer.prompt_tokens:,} tokens asked, {answer.hit_tokens:,} from the cache",
        fontsize=11,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
