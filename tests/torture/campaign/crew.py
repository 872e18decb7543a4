"""Who works on a place: started, watched, stopped for an instant, sent away."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from tests.torture.campaign.messages import Command, End, Order, Report, Work, now_s
from tests.torture.campaign.payloads import SLOTS
from tests.torture.campaign.places.base import Place
from tests.torture.campaign.processes import Nursery, Process

R = TypeVar("R")

RESIDENT = 0
"""The slot of the process that is never killed."""
VISITOR = SLOTS + 1
"""The slot of one that begins when all others have stopped, and looks at what they left."""
ANSWER_S = 60.0
"""For what may take several deadlines of the cache's own."""
SILENCE_S = 30.0
"""A worker gives a sign of life twice a second."""
_STACKS_S = 0.5
"""Time for all workers to write their stacks."""
_TEND_EVERY_S = 0.5


class Crew:
    """One process a slot. `hear` gets what they say, `found` what is wrong with them, as kind and sentence."""

    def __init__(
        self,
        place: Place,
        nursery: Nursery,
        log: Path,
        hear: Callable[[Process, Report], None],
        found: Callable[[str, str], None],
    ) -> None:
        self.place = place
        self.seed = ""
        """Of the round."""
        self.log = log
        self._nursery = nursery
        self._hear = hear
        self._found = found
        self._workers: dict[int, Process] = {}
        self._numbers = itertools.count()

    def __getitem__(self, slot: int) -> Process:
        return self._workers[slot]

    @property
    def living(self) -> list[Process]:
        return [process for process in self._workers.values() if process.is_alive]

    def start(self, slot: int) -> Process:
        number = next(self._numbers)
        order = Order(
            f"{self.place.name}-{slot}.{number}",
            self.place.name,
            slot,
            f"{self.seed}/{slot}/{number}",
            self.place.overrides(slot),
            str(self.log),
        )
        process = self._nursery.start(order)
        process.hear = self._hear
        process.judge = self._judge_end
        self._workers[slot] = process
        return process

    def tend(self, slots: range, *, patient: bool) -> None:
        """Start a worker in each empty slot. `patient`: a silent worker has a reason."""
        for slot in slots:
            process = self._workers.get(slot)
            if process is not None and process.is_alive:
                process.drain()
                if not (patient or process.may_end_with) and now_s() - process.heard_s > SILENCE_S:
                    self._hangs(process, f"has said nothing for {SILENCE_S:.0f} s")
                continue
            self.start(slot).tell(Work())

    async def tend_until(self, at_s: float, slots: range, *, patient: bool) -> None:
        while (left_s := at_s - now_s()) > 0:
            await asyncio.sleep(min(left_s, _TEND_EVERY_S))
            self.tend(slots, patient=patient)

    async def kill(self, slot: int) -> None:
        process = self._workers[slot]
        if not await process.kill():
            self._found("process hangs", f"{process.name} did not die of kill -9")

    async def end(self, slot: int) -> None:
        """A close as it should be."""
        process = self._workers.pop(slot)
        process.may_end_with.add(0)
        process.tell(End())
        if not await process.is_gone(ANSWER_S):
            self._hangs(process, f"did not close within {ANSWER_S:.0f} s")
            await process.is_gone(ANSWER_S)

    async def ask(self, process: Process, command: Command, kind: type[R]) -> R | None:
        """Its answer. None: there was none in time, or it has ended; that was told."""
        answer = await process.ask(command, kind, ANSWER_S)
        if answer is None and process.is_alive:
            self._hangs(process, f"did not answer {type(command).__name__} within {ANSWER_S:.0f} s")
        return answer

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[bool]:
        """Stop all workers for the duration of the block. Yields True if all have stopped."""
        living = self.living
        stopped = await asyncio.gather(*(process.stop() for process in living))
        try:
            yield all(stopped)
        finally:
            for process in living:
                process.go_on()

    async def kill_all(self) -> None:
        await asyncio.gather(*(process.kill() for process in self.living))

    def hear_all(self) -> None:
        for process in self._workers.values():
            process.drain()

    def _judge_end(self, process: Process) -> None:
        if process.status is None or process.status in process.may_end_with:
            return
        when = "was to end, and ended" if process.may_end_with else "ended by itself"
        how = signal.Signals(-process.status).name if process.status < 0 else f"status {process.status}"
        self._found("process broke", f"{process.name} {when} with {how}; see {self.log}; {self._nursery.news()}")

    def _hangs(self, process: Process, sentence: str) -> None:
        """Where it hangs is written down before it is killed."""
        self._found("process hangs", f"{process.name} {sentence}; its stacks are in {self.log}")
        process.may_end_with |= {-signal.SIGKILL, -signal.SIGUSR1}  # the latter before it has a handler
        process.send(signal.SIGUSR1)
        asyncio.get_running_loop().call_later(_STACKS_S, process.send, signal.SIGKILL)
