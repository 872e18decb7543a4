"""The scheduler of a simulation: strands, of which one runs at a time, and a clock that jumps when none can.

After FoundationDB's simulator (Zhou et al., SIGMOD 2021): everything that runs is interleaved by one seed, in one thread.
"""

from __future__ import annotations

import heapq
import itertools
import random
from asyncio import events
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tests.torture.simulation.loop import SimulatedLoop
    from tests.torture.simulation.process import Process

MOST_TURNS = 500_000
"""Steps and callbacks at one instant after which a run is said to spin."""
_THROWS = 100
"""How often a strand is told to end: one that keeps what a call raised, as a worker does, waits once more."""


class SimulationError(AssertionError):
    """What no run may do: wait for ever, or spin."""


class Strand:
    """Something that runs: an event loop's thread, or a worker's. It belongs to a process and ends with it."""

    __slots__ = (
        "greenlet", "is_ready", "joined", "local", "loop", "name", "number", "process", "scheduled_s", "until_s",
    )  # fmt: skip

    def __init__(self, name: str, number: int, process: Process) -> None:
        self.name = name
        self.number = number
        self.process = process
        self.greenlet: greenlet
        self.loop: SimulatedLoop | None = None
        """That which runs in it."""
        self.is_ready = False
        self.until_s: float | None = None
        """When the wait in which it is ends by itself; a timer of an earlier one wakes nobody."""
        self.scheduled_s = 0.0
        """The last time for which it has a timer."""
        self.joined: list[Strand] = []
        """Who waits for its end."""
        self.local: dict[int, dict[str, Any]] = {}

    @property
    def ended(self) -> bool:
        return bool(self.greenlet.dead)


class World:
    """Time and strands of one run. All of it happens in the thread that calls `run`.

    A strand that cannot go on switches to the next itself; only where one ends, and where the run does, `run` goes on.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now_s = 1_000.0
        self.ends_s = float("inf")
        """When a run that goes on is said never to end: timers that are set again and again keep the clock going."""
        self.clock_error_s = 0.0
        """By how much wall clocks are fast."""
        self.steps = 0
        self.turns = 0
        """Steps at this instant, and callbacks of event loops."""
        self.current: Strand | None = None
        self.processes: list[Process] = []
        self.strands: list[Strand] = []
        """All that have not ended, those of dead processes included: their frames are kept until the end."""
        self.ready: list[Strand] = []
        """Those that can run, but for the current one."""
        self._random = self.chance.random
        self._timers: list[tuple[float, int, Strand | Callable[[], None]]] = []
        self._order = itertools.count()
        self._hub: greenlet | None = None
        self._process: Process | None = None
        self._loop: SimulatedLoop | None = None
        self._stopped = False
        self._failure: BaseException | None = None

    # Running

    def run(self) -> None:
        """Let strands run until `stop`. Raises what a strand raised, or SimulationError where none can go on."""
        self._hub = getcurrent()
        try:
            while not self._stopped:
                strand = self._next()
                if strand is None:
                    break
                self._enter(strand)
                strand.greenlet.switch()
                ended, self.current = self.current, None
                if ended is not None and ended.greenlet.dead:
                    self.strands.remove(ended)
                    for waiting in ended.joined:
                        self.wake(waiting)
        finally:
            self.current = None
            self._set_loop(None)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def stop(self) -> None:
        """Run nothing more, from the next wait of the current strand on."""
        self._stopped = True

    def spins(self) -> SimulationError:
        """What to raise where `turns` is above `MOST_TURNS`."""
        return SimulationError(f"{self.turns} steps at {self.now_s:.6f} s: something spins")

    def end(self) -> None:
        """Take all frames down that are still there. Nothing of it reaches the outside: no process lives any more."""
        self._stopped = True
        self._hub = getcurrent()
        for strand in self.strands:
            strand.process.die()
        for strand in self.strands:
            for _ in range(_THROWS):
                if strand.greenlet.dead:
                    break
                self.current = strand
                strand.greenlet.throw(GreenletExit)
        for process in self.processes:
            process.end()
        self.current = None
        self.strands.clear()
        self.ready.clear()
        self._timers.clear()

    def _next(self) -> Strand | None:
        """Whose turn it is; None where the run has ended or failed."""
        ready = self.ready
        while not self._stopped:
            count = len(ready)
            if not count:
                try:
                    self._jump()
                except BaseException as error:
                    self._fail(error)
                continue
            if count == 1:
                strand = ready.pop()
            else:
                place = int(self._random() * count)
                strand = ready[place]
                ready[place] = ready[-1]
                ready.pop()
            strand.is_ready = False
            if strand.process.alive:
                self.steps += 1
                self.turns += 1
                if self.turns > MOST_TURNS:
                    self._fail(self.spins())
                    return None
                return strand
        return None

    def _enter(self, strand: Strand) -> None:
        self.current = strand
        if strand.loop is not self._loop:
            self._set_loop(strand.loop)
        if strand.process is not self._process:
            self._process = strand.process
            strand.process.entered()

    def _set_loop(self, loop: SimulatedLoop | None) -> None:
        self._loop = loop
        events._set_running_loop(loop)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopped = True

    def _jump(self) -> None:
        while self._timers:
            at_s, _, what = heapq.heappop(self._timers)
            if isinstance(what, Strand):
                if at_s == what.scheduled_s:
                    what.scheduled_s = 0.0
                if what.until_s != at_s or what.is_ready or not what.process.alive:
                    continue  # it was woken by something else
                self._set_time(at_s)
                self.wake(what)
            else:
                self._set_time(at_s)
                waiting, self.current = self.current, None
                what()
                self.current = waiting
            return
        raise SimulationError("every strand waits, and nothing is left to wake one")

    def _set_time(self, at_s: float) -> None:
        if at_s > self.now_s:
            self.now_s = at_s
            self.turns = 0
            if at_s > self.ends_s:
                waiting = ", ".join(f"{strand.name} of {strand.process.number}" for strand in self.strands)
                self._fail(SimulationError(f"no end at {at_s:.0f} s; what has not ended: {waiting}"))

    # For strands

    def start(self, process: Process, name: str, call: Callable[[], None]) -> Strand:
        """A new strand of a process that begins with `call`."""
        strand = Strand(name, next(self._order), process)

        def run() -> None:
            try:
                call()
            except GreenletExit:
                pass
            except BaseException as error:
                if process.alive:
                    self._fail(error)

        strand.greenlet = greenlet(run, parent=self._hub)
        self.strands.append(strand)
        self.wake(strand)
        return strand

    def wake(self, strand: Strand) -> None:
        """It goes on from its wait, in its turn."""
        if not strand.is_ready and not strand.greenlet.dead:
            strand.is_ready = True
            strand.until_s = None
            self.ready.append(strand)

    def wait(self, until_s: float | None = None) -> None:
        """Stop the current strand until it is woken, or until `until_s`."""
        strand = self.current
        assert strand is not None and self._hub is not None, "only a strand can wait"
        if until_s is not None:
            strand.until_s = until_s
            if until_s != strand.scheduled_s:
                strand.scheduled_s = until_s
                heapq.heappush(self._timers, (until_s, next(self._order), strand))
        following = self._next()
        if following is strand:
            return
        if following is None:
            self._hub.switch()
            return
        self.current = following
        if following.loop is not self._loop:
            self._set_loop(following.loop)
        if following.process is not self._process:
            self._process = following.process
            following.process.entered()
        following.greenlet.switch()

    def pause(self, duration_s: float = 0.0) -> None:
        """The current strand lets others run: for that long, or just once."""
        if duration_s > 0:
            until_s = self.now_s + duration_s
            if self.ready or self._stopped or (self._timers and self._timers[0][0] <= until_s):
                self.wait(until_s)
            else:
                self._set_time(until_s)
        elif self.ready:
            strand = self.current
            assert strand is not None
            self.wake(strand)
            self.wait()

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call this at that time, from no strand."""
        heapq.heappush(self._timers, (at_s, next(self._order), call))
