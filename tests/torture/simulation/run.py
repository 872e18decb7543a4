"""One seed from its beginning to its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.torture.simulation.happenings import Happenings
from tests.torture.simulation.node import Node
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.plan import Operation, Setting, operations_of, setting_of
from tests.torture.simulation.settling import settle
from tests.torture.simulation.stage import Stage
from tiercache.memory.slots import Lease

_AT_ONCE = 8
"""Callers of one process at a time."""
_TRACE_LINES = 4000
_COLLECTIONS = 10
"""At the most: what comes back to life while it is collected, as a coroutine with a `finally` does, needs another."""


@dataclass
class Outcome:
    """What became of a seed."""

    seed: int
    setting: Setting
    operations: list[Operation]
    """As planned."""
    begun: list[Operation]
    """Those that have begun: who comes to a cache that is not open, or has many callers, goes away again."""
    failure: BaseException | None
    """Without the frames in which it was raised: they would keep all of the run."""
    digest: str
    """Equal for equal runs."""
    steps: int
    virtual_s: float
    counts: Counter[str] = field(default_factory=Counter)
    """Operations by what became of them, and faults that were met."""
    trace: list[str] = field(default_factory=list)
    """The last lines of what happened."""
    said: str = ""
    """The failure, and the innermost lines where it was raised."""

    @property
    def chunks(self) -> int:
        """Operations that have begun, counted for each chunk."""
        return sum(max(1, len(operation.keys)) for operation in self.begun)


def run_seed(
    seed: int,
    operations: Sequence[Operation] | None = None,
    *,
    setting: Setting | None = None,
    count: int = 300,
    told: Sequence[Exception] = (),
) -> Outcome:
    """Run a seed, with its own operations or with others.

    `told` fills with what a signal raises in it while it runs: whatever comes of that, the first of them is its failure.
    """
    setting = setting or setting_of(seed)
    operations = operations_of(seed, setting, count) if operations is None else list(operations)
    with _quiet() as warned:
        stage = Stage(seed, setting)
        outcome = _outcome(stage, operations)
        nobody_died = not stage.somebody_died
        if told:
            outcome.failure = told[0]
        if outcome.failure is not None:
            outcome.said = _text_of(outcome.failure)
        for failure in (outcome.failure, *told):
            _let_go_of_frames(failure)
        del stage
        for _ in range(_COLLECTIONS):
            if not gc.collect():
                break
        if not nobody_died:
            _silence_leases()
    if warned and nobody_died and outcome.failure is None:
        said = "; ".join(dict.fromkeys(str(each.message) for each in warned))
        outcome.failure = Violation(f"nobody died, and when all was gone Python said: {said}")
        outcome.said = _text_of(outcome.failure)
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Only errors in logs, no garbage collected at a random moment, and warnings only for us: the dead leave leases.

    What was there before is no garbage, and is not looked at.
    """
    disabled = logging.root.manager.disable
    collected = gc.isenabled()
    logging.disable(logging.WARNING)
    gc.disable()
    gc.freeze()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield warned
    finally:
        gc.unfreeze()
        logging.disable(disabled)
        if collected:
            gc.enable()


def _silence_leases() -> None:
    """In some seeds Python keeps a killed world, whose leases would be reported in a later test."""
    for one in gc.get_objects():
        if type(one) is Lease:
            one._entry = None


def _text_of(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure, limit=-6)).rstrip()


def _let_go_of_frames(failure: BaseException | None) -> None:
    """Even one that is cleared keeps its function, and with that what the function has closed over."""
    errors: list[BaseException | None] = [failure]
    for error in errors:
        if error is not None:
            error.__traceback__ = None
            behind = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
            errors += [one for one in behind if one not in errors]


def _outcome(stage: Stage, operations: list[Operation]) -> Outcome:
    world = stage.world
    failure: BaseException | None = None
    with stage.installed():
        stage.director.run("director", functools.partial(_direct, stage, operations))
        try:
            world.run()
            failure = stage.failed() or stage.error_of_nobody()
        except Exception as error:
            failure = stage.failed() or error
        finally:
            stage.over = True
            world.end()
    counts = stage.counts
    for weather in stage.weathers.values():
        counts.update({f"fault {weather.name.rstrip('2')} {kind}": met for kind, met in weather.met.items()})
    for node in stage.all_nodes:
        counts.update(node.counts)
        stage.coverage.end(node.cache)
    counts.update({f"state {name}": count for name, count in stage.coverage.states.items()})
    return Outcome(
        world.seed, stage.setting, operations, stage.begun, failure, stage.hash.hexdigest(), world.steps, world.now_s,
        counts, stage.trace[-_TRACE_LINES:],
    )  # fmt: skip


async def _direct(stage: Stage, operations: Sequence[Operation]) -> None:
    """What the director does, a process of its own that never dies."""
    happenings = Happenings(stage)
    for number in range(stage.setting.processes):
        stage.start(number)
    for operation in operations:
        await asyncio.sleep(operation.after_s)
        happens = getattr(happenings, operation.kind, None)
        if happens is not None:
            stage.note(str(operation))
            stage.begun.append(operation)
            stage.counts[operation.kind] += 1
            await happens(operation)
        else:
            await _ask(stage.nodes[operation.process], operation)
    await settle(stage)
    stage.world.stop()


async def _ask(node: Node, operation: Operation) -> None:
    waited_s = 0.0
    while node.state == "starting" or node.expected.running >= _AT_ONCE:
        await asyncio.sleep(0.001 + waited_s)
        waited_s += 0.001
        if waited_s > 0.1:
            return
    if node.state == "open":
        node.ask(operation)
        await asyncio.sleep(0)
