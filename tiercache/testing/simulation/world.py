"""The scheduler of a simulation: strands, of which one runs at a time, and a clock that jumps when none can.

After FoundationDB's simulator (Zhou et al., SIGMOD 2021): everything that runs is interleaved by one seed, in one thread.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tiercache.testing.simulation.process import Process

_SPIN_STEPS = 500_000
"""Steps at one instant after which a run is said to spin."""


class SimulationError(AssertionError):
    """What no run may do: wait for ever, or spin."""


class Strand:
    """Something that runs: an event loop's thread, or a worker's. It belongs to a process and ends with it."""

    __slots__ = ("greenlet", "is_ready", "joined", "local", "name", "process", "wait")

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.greenlet: greenlet
        self.is_ready = False
        self.wait = 0
        """Which of its waits it is in: a timer of an earlier one wakes nobody."""
        self.joined: list[Strand] = []
        """Who waits for its end."""
        self.local: dict[int, dict[str, Any]] = {}

    @property
    def ended(self) -> bool:
        return self.greenlet.dead


class World:
    """Time and strands of one run. All of it happens in the thread that calls `run`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now_s = 1_000.0
        self.clock_error_s = 0.0
        """By how much wall clocks are fast."""
        self.steps = 0
        self.current: Strand | None = None
        self.processes: list[Process] = []
        self.strands: list[Strand] = []
        """All that have not ended, those of dead processes included: their frames are kept until the end."""
        self._ready: list[Strand] = []
        self._timers: list[tuple[float, int, Strand | Callable[[], None], int]] = []
        self._order = itertools.count()
        self._hub: greenlet | None = None
        self._failure: BaseException | None = None

    # Running

    def run(self, until: Callable[[], bool]) -> None:
        """Let strands run until `until()` is true. Raises what a strand raised, or SimulationError where none can go on."""
        self._hub = getcurrent()
        steps = 0
        while not until():
            if not self._ready:
                self._jump()
                steps = 0
                continue
            steps += 1
            if steps > _SPIN_STEPS:
                raise SimulationError(f"{steps} steps at {self.now_s:.6f} s: something spins")
            place = int(self.chance.random() * len(self._ready))
            strand = self._ready[place]
            self._ready[place] = self._ready[-1]
            self._ready.pop()
            strand.is_ready = False
            if strand.process.alive:
                self._switch_to(strand)
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure

    def end(self) -> None:
        """Take all frames down that are still there. Nothing of it reaches the outside: no process lives any more."""
        for strand in self.strands:
            strand.process.die()
        for strand in self.strands:
            if not strand.greenlet.dead:
                self.current = strand
                strand.greenlet.throw(GreenletExit)
        for process in self.processes:
            process.end()
        self.current = None
        self.strands.clear()
        self._ready.clear()
        self._timers.clear()

    def _switch_to(self, strand: Strand) -> None:
        self.steps += 1
        self.current = strand
        strand.process.enter(strand)
        strand.greenlet.switch()
        strand.process.leave()
        self.current = None
        if strand.greenlet.dead:
            self.strands.remove(strand)
            for waiting in strand.joined:
                self.wake(waiting)

    def _jump(self) -> None:
        while self._timers:
            at_s, _, what, wait = heapq.heappop(self._timers)
            if isinstance(what, Strand):
                if what.wait != wait or what.is_ready or not what.process.alive:
                    continue  # it was woken by something else
                self.now_s = max(self.now_s, at_s)
                self.wake(what)
            else:
                self.now_s = max(self.now_s, at_s)
                what()
            return
        raise SimulationError("every strand waits, and nothing is left to wake one")

    # For strands

    def start(self, process: Process, name: str, call: Callable[[], None]) -> Strand:
        """A new strand of a process that begins with `call`."""
        strand = Strand(name, process)

        def run() -> None:
            try:
                call()
            except GreenletExit:
                pass
            except BaseException as error:
                if process.alive:
                    self._failure = error

        strand.greenlet = greenlet(run, parent=self._hub)
        self.strands.append(strand)
        self.wake(strand)
        return strand

    def wake(self, strand: Strand) -> None:
        """It goes on from its wait, in its turn."""
        if not strand.is_ready and not strand.greenlet.dead:
            strand.is_ready = True
            strand.wait += 1
            self._ready.append(strand)

    def wait(self, until_s: float | None = None) -> None:
        """The current strand stops until somebody wakes it, or until that time."""
        strand = self.current
        assert strand is not None and self._hub is not None, "only a strand can wait"
        if until_s is not None:
            heapq.heappush(self._timers, (until_s, next(self._order), strand, strand.wait))
        self._hub.switch()

    def pause(self, duration_s: float = 0.0) -> None:
        """The current strand lets others run: for that long, or just once."""
        strand = self.current
        assert strand is not None
        if duration_s > 0:
            self.wait(self.now_s + duration_s)
        elif self._ready:
            self.wake(strand)
            self.wait()

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call this at that time, from no strand."""
        heapq.heappush(self._timers, (at_s, next(self._order), call, 0))

    @property
    def others_are_ready(self) -> bool:
        return bool(self._ready)
