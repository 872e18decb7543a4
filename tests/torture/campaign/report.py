"""What a campaign did, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.campaign.usage import Growth

_SHOWN = 20


@dataclass
class Findings:
    """Whatever must not be, by kind; the first of each kind in words."""

    counts: Counter[str] = field(default_factory=Counter)
    sentences: list[str] = field(default_factory=list)

    def add(self, kind: str, sentence: str) -> None:
        self.counts[kind] += 1
        if len(self.sentences) < _SHOWN:
            self.sentences.append(f"{kind}: {sentence}")


KINDS = (
    "wrong bytes",
    "lost",
    "not forgotten",
    "cap exceeded",
    "not audited",
    "evicted though there was room",
    "corrupt",
    "not working again",
    "process broke",
    "process hangs",
    "leak",
    "left behind",
    "campaign broke",
)
"""All that can be found; a table of noughts says what was looked for."""


@dataclass
class Report:
    seed: int
    parts: tuple[str, ...]
    directory: Path
    seconds: float = 0.0
    rounds: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """kill, freeze, hang, fill of something: how many of each."""
    verified: int = 0
    """Chunks that were promised, and asked for in a process that began later."""
    looked_twice: int = 0
    """Of those, missed by a deadline or otherwise at the first look."""
    damage_found: int = 0
    """Chunks that were damaged at rest, and found to be."""
    promises: int = 0
    audits: Counter[str] = field(default_factory=Counter)
    """By place: how often its files were counted while all workers stood still."""
    audits_skipped: Counter[str] = field(default_factory=Counter)
    """By place: how often a worker did not stop in time for that."""
    occupied: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By place: the most that its files occupied at an audit, and its cap, in bytes."""
    openings_s: list[float] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)
    """By operation."""
    recoveries_s: dict[str, float] = field(default_factory=dict)
    """By place: the longest from the end of a fault to a chunk that was stored and found."""
    growths: dict[str, Growth] = field(default_factory=dict)
    """Of the process that lives longest in each place."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Places that this machine cannot have, and why."""
    findings: Findings = field(default_factory=Findings)
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.findings.counts)

    @property
    def kills(self) -> int:
        return self.faults["worker killed"]

    def lines(self) -> list[str]:
        """For people."""
        minutes = max(self.seconds / 60, 1e-9)
        said = [
            f"seed {self.seed}, {', '.join(self.parts)}: {self.seconds:.0f} s, {self.rounds} rounds"
            + (", interrupted" if self.interrupted else ""),
            "",
            f"{sum(self.operations.values()):>10,}  operations ({_counts(self.operations)})",
            f"{self.kills:>10,}  kill -9 ({self.kills / minutes:.0f} a minute; a cache opens in "
            f"{_median_ms(self.openings_s):.0f} ms)",
            *(f"{count:>10,}  {name}" for name, count in sorted(self.faults.items()) if name != "worker killed"),
            f"{self.promises:>10,}  chunks flushed, {self.verified:,} times looked for by a process that began later"
            f" ({self.looked_twice} of them twice)",
            f"{self.damage_found:>10,}  damaged chunks found to be",
            f"{self.audits.total():>10,}  audits of what the files occupy, {self.audits_skipped.total()} skipped"
            f" ({_counts(self.audits_skipped) or '-'}); the most: {self._most_occupied()}",
            f"            the longest until a place worked again: {_seconds(self.recoveries_s)}",
            f"            the longest operations: {_seconds(dict(_largest(self.longest_s, 4)))}",
            "",
            *(f"{self.findings.counts[kind]:>10,}  {kind}" for kind in KINDS),
        ]
        if self.growths:
            said += ["", "            what processes that lived from the first round to the last hold:"]
            said += [f"            {name}: {_grown(growth)}" for name, growth in self.growths.items()]
        said += ["", *(f"not done: {name}: {why}" for name, why in self.skipped.items())] if self.skipped else []
        if self.failed:
            said += ["", *self.findings.sentences, "", f"kept: {self.directory}"]
        return said

    def _most_occupied(self) -> str:
        return ", ".join(
            f"{name} {most / 2**20:.2f} of {cap / 2**20:.2f} MiB" for name, (most, cap) in self.occupied.items()
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


def _median_ms(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] * 1000 if values else 0.0


def _seconds(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in values.items()) or "-"


def _largest(values: dict[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:count]


def _grown(growth: Growth) -> str:
    first, last = growth.first, growth.last
    percent = 100 * (last.rss_bytes / first.rss_bytes - 1)
    return (
        f"{first.rss_bytes / 2**20:.1f} MiB after {first.at_s:.0f} s, {last.rss_bytes / 2**20:.1f} after {last.at_s:.0f} "
        f"({percent:+.1f} %); descriptors {first.descriptors}, {last.descriptors}; threads {first.threads}, {last.threads}"
        + ("; by sixths " + ", ".join(f"{part / 2**20:.1f}" for part in growth.course) if growth.course else "")
    )
