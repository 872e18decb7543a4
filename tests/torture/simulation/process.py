"""A simulated process: what dies together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.torture.simulation.loop import SimulatedLoop
    from tests.torture.simulation.world import Strand, World


class Killed(BaseException):
    """Raised by every call to the system of a process that was killed: whatever still runs of it does nothing."""


class Process:
    """An event loop with its threads and descriptors. Its number is its pid."""

    def __init__(self, world: World, number: int, on_enter: Callable[[Process], None] = lambda process: None) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.no_threads = False
        """Whether the system starts no thread of it now."""
        self.loop: SimulatedLoop | None = None
        self.threads = itertools.count(1)
        self.on_death: list[Callable[[], None]] = []
        self._on_enter = on_enter
        world.processes.append(self)

    def run(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> Strand:
        """Begin with an event loop that runs `main` to its end."""
        from tests.torture.simulation.loop import SimulatedLoop

        def run() -> None:
            assert self.loop is not None
            self.loop.run_until_complete(main())
            self.loop.close()

        self.loop = SimulatedLoop(self.world)
        strand = self.world.start(self, name, run)
        strand.loop = self.loop
        self.loop.strand = strand
        return strand

    def die(self) -> None:
        """As by kill -9: no instruction more."""
        if self.alive:
            self.alive = False
            if self.loop is not None:
                self.loop.is_dead = True
            for call in self.on_death:
                call()

    def end(self) -> None:
        """Take down what its tasks had on their stacks, after its death."""
        if self.loop is not None:
            events._set_running_loop(self.loop)
            ended: set[asyncio.Task[Any]] = set()
            while tasks := asyncio.all_tasks(self.loop) - ended:  # what ends may begin others
                for task in tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()
                ended |= tasks
            events._set_running_loop(None)

    def entered(self) -> None:
        """Strands of this process run from now on."""
        self._on_enter(self)
