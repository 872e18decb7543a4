"""Strands and the clock: who runs, when, and what is no run at all."""

from collections.abc import Callable

import pytest

from tests.torture.simulation.process import Process
from tests.torture.simulation.world import SimulationError, Strand, World


def run(world: World, *calls: Callable[[], None], process: Process | None = None) -> None:
    """Run these as strands of one process until the first of them has ended, and end the others."""
    process = process or Process(world, 1)
    first, *others = calls

    def main() -> None:
        first()
        world.stop()

    for place, call in enumerate((main, *others)):
        world.start(process, f"strand {place}", call)
    try:
        world.run()
    finally:
        world.end()


def test_the_clock_jumps_to_the_next_timer_exactly(world: World) -> None:
    seen = []

    def waits() -> None:
        for duration_s in (0.000001, 1e6, 0.25):
            began_s = world.now_s
            world.pause(duration_s)
            seen.append(world.now_s - began_s)

    run(world, waits)
    assert seen == pytest.approx([0.000001, 1e6, 0.25], abs=1e-9)


def test_what_waits_for_the_same_time_goes_on_in_an_order_by_seed() -> None:
    def order(seed: int) -> str:
        world = World(seed)
        found: list[str] = []

        def waits(name: str) -> Callable[[], None]:
            def call() -> None:
                world.pause()
                found.append(name)
                if name == "a":
                    world.pause(1.0)

            return call

        run(world, *map(waits, "abcd"))
        return "".join(found)

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len(set(orders)) > 5
    assert all(sorted(each) == list("abcd") for each in orders)


def test_a_strand_goes_on_when_it_is_woken_and_an_older_timer_wakes_it_no_more(world: World) -> None:
    times = []
    strands: list[Strand] = []

    def sleeps() -> None:
        world.wait(world.now_s + 5.0)
        times.append(world.now_s)
        world.wait(world.now_s + 20.0)
        times.append(world.now_s)
        world.stop()

    def wakes() -> None:
        world.pause(1.0)
        world.wake(strands[0])
        world.wait()

    process = Process(world, 1)
    strands.append(world.start(process, "sleeps", sleeps))
    world.start(process, "wakes", wakes)
    world.run()
    assert times == [1_001.0, 1_021.0]


def test_a_killed_process_runs_nothing_more(world: World) -> None:
    victim = Process(world, 2)
    did = []

    def works() -> None:
        try:
            did.append("began")
            world.pause(1.0)
            did.append("went on")
        finally:
            did.append("cleaned up")

    def kills() -> None:
        world.pause(0.5)
        victim.die()
        world.pause(10.0)
        assert did == ["began"]

    world.start(victim, "works", works)
    run(world, kills)


def test_where_all_wait_for_ever_the_run_fails(world: World) -> None:
    with pytest.raises(SimulationError, match="nothing is left to wake one"):
        run(world, world.wait)


def test_who_runs_on_without_time_passing_is_found_to_spin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.torture.simulation.world.MOST_TURNS", 1000)

    def spins() -> None:
        while True:
            world.pause()

    with pytest.raises(SimulationError, match=r"at 1000\.000000 s: something spins"):
        run(world, spins, spins)


def test_where_only_timers_go_on_the_run_fails_at_its_end(world: World) -> None:
    world.ends_s = 5_000.0

    def looks_again_and_again() -> None:
        while True:
            world.pause(0.25)

    with pytest.raises(SimulationError, match="no end at 5000 s; what has not ended: strand 0 of 1, strand 1 of 1"):
        run(world, world.wait, looks_again_and_again)
    assert world.now_s == 5_000.25
