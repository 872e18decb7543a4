"""Many seeds, in as many processes as there are cores; and what is to be said of one that fails."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.torture.simulation.plan import Operation, Setting, setting_of
from tests.torture.simulation.run import Outcome, run_seed
from tests.torture.simulation.shrink import shrunk
from tests.torture.simulation.world import SimulationError

_BATCH = 8
"""Seeds that a process takes at a time."""
_LONGEST_CPU_S = 60.0
"""Of one seed: a loop without a wait in it stops the simulated clock, and only a real one ends it."""
_AGAIN_S = 5.0
"""After so much more it is told once more: what spins may have caught it."""
_SHRINK_S = 60.0
_SHRINK_TIMES = 5.0
"""So many times what the whole seed took, and a second, a part of it may take."""
_NUMBER = re.compile(r"\b[0-9a-f]*[0-9][0-9a-f.]*\b")
_KIND_LENGTH = 48


@dataclass(frozen=True)
class Own:
    """A third party's tier that takes part in every seed: module:Class, and its settings. Without a name, there is none."""

    name: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def problem(self) -> str:
        """Why there is no such tier; empty where there is."""
        module_name, _, class_name = self.name.partition(":")
        if not self.name:
            return ""
        if not module_name or not class_name:
            return f"expected module:Class, found {self.name!r}"
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            return f"{module_name}: {error}"
        return "" if hasattr(module, class_name) else f"{module_name} has no {class_name}"

    def setting_of(self, seed: int) -> Setting:
        return setting_of(seed, own=self.name, own_options=self.options)


OURS = Own()


class Spins(SimulationError):
    """A run that took more CPU time than any takes."""


@dataclass
class Batch:
    """What some seeds came to."""

    seeds: int = 0
    operations: int = 0
    chunks: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, other: Batch) -> None:
        self.seeds += other.seeds
        self.operations += other.operations
        self.chunks += other.chunks
        self.cpu_s += other.cpu_s
        self.counts.update(other.counts)
        self.failed += other.failed


@dataclass
class Report(Batch):
    """Of all seeds that ran. They end with the first batch in which one failed."""

    seconds: float = 0.0
    jobs: int = 1


@dataclass
class Failure:
    """A seed that fails, with the shortest part of its operations that was found to fail in the same way."""

    seed: int
    setting: Setting
    kind: str
    error: str
    operations: list[Operation]
    of: int
    """How many operations the seed had."""
    trace: list[str]


def run_seeds(
    first: int,
    seeds: int | None,
    minutes: float | None,
    jobs: int,
    own: Own = OURS,
    told: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run `seeds` seeds from `first` on, or for so long; whichever ends first. `told` hears of it after each batch."""
    report = Report(jobs=jobs)
    began_s = time.monotonic()
    end_s = None if minutes is None else began_s + minutes * 60
    batches = _batches(first, seeds)

    def more() -> Sequence[int] | None:
        if report.failed or (end_s is not None and time.monotonic() >= end_s):
            return None
        return next(batches, None)

    for batch in _alone(more, own) if jobs == 1 else _together(more, own, jobs):
        report.add(batch)
        report.seconds = time.monotonic() - began_s
        told(report)
    report.failed.sort()
    return report


def failure_of(seed: int, own: Own = OURS) -> Failure | None:
    """Run it again, and look for less that fails. None where it does not fail."""
    setting = own.setting_of(seed)
    began_s = time.process_time()
    outcome = run_limited(seed, setting)
    if outcome.failure is None:
        return None
    longest_s = 1.0 + _SHRINK_TIMES * (time.process_time() - began_s)
    kind = kind_of(outcome.failure)
    shortest = outcome
    until_s = time.monotonic() + _SHRINK_S

    def fails(operations: Sequence[Operation]) -> bool:
        nonlocal shortest
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return False
        again = run_limited(seed, setting, operations, min(longest_s, left_s))
        if again.failure is None or kind_of(again.failure) != kind:
            return False
        shortest = again
        return True

    if not isinstance(outcome.failure, Spins):  # each part that spins would take as long
        shrunk(outcome.operations, fails)
    return Failure(
        seed, setting, kind, shortest.said, shortest.operations, len(outcome.operations), shortest.trace
    )  # fmt: skip


def run_limited(
    seed: int, setting: Setting, operations: Sequence[Operation] | None = None, cpu_s: float | None = None
) -> Outcome:
    """A seed that fails with `Spins` where it takes more CPU time than that; without it, more than any seed takes."""
    with _limited(_LONGEST_CPU_S if cpu_s is None else cpu_s) as told:
        return run_seed(seed, operations, setting=setting, told=told)


def kind_of(error: BaseException) -> str:
    """Equal for two failures that look alike: numbers do not count."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {_NUMBER.sub('#', lines[0] if lines else '')[:_KIND_LENGTH]}"


def run_batch(seeds: Sequence[int], own: Own = OURS) -> Batch:
    batch = Batch()
    for seed in seeds:
        began_s = time.process_time()
        outcome = run_limited(seed, own.setting_of(seed))
        batch.seeds += 1
        batch.operations += len(outcome.begun)
        batch.chunks += outcome.chunks
        batch.cpu_s += time.process_time() - began_s
        batch.counts.update(outcome.counts)
        if outcome.failure is not None:
            batch.failed.append(seed)
            break
    return batch


def _batches(first: int, seeds: int | None) -> Iterator[Sequence[int]]:
    start = first
    while seeds is None or start < first + seeds:
        end = start + _BATCH
        yield range(start, end if seeds is None else min(end, first + seeds))
        start = end


def _alone(more: Callable[[], Sequence[int] | None], own: Own) -> Iterator[Batch]:
    while (seeds := more()) is not None:
        yield run_batch(seeds, own)


def _together(more: Callable[[], Sequence[int] | None], own: Own, jobs: int) -> Iterator[Batch]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin) as pool:
        running: set[Future[Batch]] = set()
        while True:
            while len(running) < jobs and (seeds := more()) is not None:
                running.add(pool.submit(run_batch, seeds, own))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                yield each.result()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us ends us


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[list[Spins]]:
    """What runs for too long gets an error; in the main thread, the one that can be told. Yields what it was told."""
    told: list[Spins] = []

    def ends(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, _AGAIN_S)
        told.append(Spins(f"{cpu_s:.0f} s of CPU time, and no end: something spins without a wait"))
        raise told[-1]

    try:
        before = signal.signal(signal.SIGVTALRM, ends)
    except ValueError:
        yield told
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield told
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
