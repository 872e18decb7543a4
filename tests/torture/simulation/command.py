"""Runs seeds; shows what they reached, and what is to be known of one that fails."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console

from tests.torture.simulation.seeds import OURS, Failure, Own, Report, failure_of, run_limited, run_seeds
from tiercache.tables import INDENT, Line, say

_TOLD_EVERY_S = 5.0
_LAST_LINES = 40


@dataclass
class Torture:
    """What is asked for."""

    seeds: int | None = None
    minutes: float | None = None
    seed: int | None = None
    """Only this one, and all that happens in it."""
    first: int = 0
    jobs: int = 0
    """0: one for each core."""
    own: Own = OURS
    as_json: bool = False


def torture_command(asked: Torture) -> int:
    """0, or 1 where a seed failed."""
    console = Console(highlight=False, markup=False)
    if asked.seed is not None:
        return _show_one(asked.seed, asked, console)
    seeds = 1000 if asked.seeds is None and asked.minutes is None else asked.seeds
    jobs = asked.jobs or len(os.sched_getaffinity(0))
    report = run_seeds(asked.first, seeds, asked.minutes, jobs, asked.own, _Teller(console, quiet=asked.as_json))
    failure = failure_of(report.failed[0], asked.own) if report.failed else None
    if asked.as_json:
        print(json.dumps(_as_dict(report, failure), indent=2))
    else:
        say(console, [(0, _speed(report)), *_covered(report.counts)])
        if report.failed and failure is None:
            say(
                console,
                [(0, f"seed {report.failed[0]} failed, and did not fail when it was run again: two runs differ")],
            )
        elif failure is not None:
            say(console, _failed(failure, asked.own))
    return 1 if report.failed else 0


def _show_one(seed: int, asked: Torture, console: Console) -> int:
    outcome = run_limited(seed, asked.own.setting_of(seed))
    failure = failure_of(seed, asked.own) if outcome.failure is not None else None
    if asked.as_json:
        found = {
            "seed": seed,
            "digest": outcome.digest,
            "steps": outcome.steps,
            "virtual_s": outcome.virtual_s,
            "counts": dict(outcome.counts),
            "trace": outcome.trace,
            "failure": None if failure is None else asdict(failure),
        }
        print(json.dumps(found, indent=2, default=str))
    else:
        say(console, [(0, line) for line in outcome.trace])
        say(console, _setting_lines(seed, asked.own))
        ended = f"{outcome.steps} steps, {outcome.virtual_s - 1000:.3f} s of its time, digest {outcome.digest}"
        say(console, [(0, f"seed {seed}: {ended}"), *_covered(outcome.counts)])
        if failure is not None:
            say(console, _failed(failure, asked.own))
    return 1 if outcome.failure is not None else 0


class _Teller:
    """Says how far it is, every few seconds."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._next_s = time.monotonic() + _TOLD_EVERY_S

    def __call__(self, report: Report) -> None:
        now_s = time.monotonic()
        if not self._quiet and now_s >= self._next_s:
            self._next_s = now_s + _TOLD_EVERY_S
            say(self._console, [(0, _speed(report))])


def _speed(report: Report) -> str:
    seconds = max(report.seconds, 1e-9)
    cpu_s = max(report.cpu_s, 1e-9)
    return (
        f"{report.seeds:,} seeds in {report.seconds:.0f} s, {report.seeds / seconds:.1f} a second; "
        f"{report.operations / seconds:,.0f} operations a second ({report.chunks / seconds:,.0f} of one chunk), "
        f"{report.operations / cpu_s:,.0f} ({report.chunks / cpu_s:,.0f}) a core; {len(report.failed)} failed"
    )


def _covered(counts: Counter[str]) -> Iterable[Line]:
    """What was met, a line for each kind of it."""
    groups: dict[str, Counter[str]] = {}
    for name, count in counts.items():
        kind, _, outcome = name.partition(" ")
        if kind in ("fault", "state"):
            heading = "faults met" if kind == "fault" else "states reached"
            groups.setdefault(heading, Counter())[outcome if kind == "state" or outcome else "turned on"] += count
        elif outcome:
            groups.setdefault(kind, Counter())[_plain(outcome)] += count
        else:
            groups.setdefault("events", Counter())[kind] += count
    for heading in sorted(groups, key=lambda each: (each in ("faults met", "states reached", "events"), each)):
        said = ", ".join(f"{name} {count:,}" for name, count in sorted(groups[heading].items()))
        yield 0, heading
        yield INDENT, said


def _plain(outcome: str) -> str:
    """Of numbers it matters whether they are 0."""
    if outcome.isdigit():
        return "some" if int(outcome) else "none"
    return {"True": "stored", "False": "not stored", "nothing": "died under way"}.get(outcome, outcome)


def _setting_lines(seed: int, own: Own) -> Iterable[Line]:
    setting = asdict(own.setting_of(seed))
    yield 0, "setting"
    yield INDENT, ", ".join(f"{name} {value}" for name, value in setting.items())


def _failed(failure: Failure, own: Own) -> Iterable[Line]:
    yield 0, ""
    yield 0, f"seed {failure.seed} fails: {failure.kind}"
    yield from _setting_lines(failure.seed, own)
    yield 0, f"{len(failure.operations)} of its {failure.of} operations are enough:"
    for operation in failure.operations:
        yield INDENT, str(operation)
    yield 0, "what happens then:"
    for line in failure.trace[-_LAST_LINES:]:
        yield INDENT, line
    for line in failure.error.splitlines():
        yield 0, line
    yield 0, f"once more: {_again(failure.seed, own)}"


def _again(seed: int, own: Own) -> str:
    words = ["python", "-m", "tests.torture", "--seed", str(seed)]
    if own.name:
        words += ["--tier", own.name]
        words += [word for name, value in own.options.items() for word in ("--option", f"{name}={value}")]
    return shlex.join(words)


def _as_dict(report: Report, failure: Failure | None) -> dict[str, object]:
    found: dict[str, object] = {**vars(report), "counts": dict(sorted(report.counts.items()))}
    found["failure"] = None if failure is None else json.loads(json.dumps(asdict(failure), default=str))
    return found
