"""Locks, events, queues and threads for strands."""

from collections.abc import Callable

import pytest

from tests.simulation.test_world import run
from tests.torture.simulation.process import Process
from tests.torture.simulation.threads import Threads
from tests.torture.simulation.world import SimulationError, World


@pytest.fixture
def threads(world: World) -> Threads:
    return Threads(world)


def test_a_lock_blocks_a_strand_until_it_is_free(world: World, threads: Threads) -> None:
    lock = threads.Lock()
    taken_s = []

    def holds() -> None:
        with lock:
            world.pause(2.0)
        world.pause(2.0)

    def wants() -> None:
        world.pause(1.0)
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(timeout=0.25)
        taken_s.append(world.now_s)
        with lock:
            taken_s.append(world.now_s)

    run(world, holds, wants)
    assert taken_s == [1_001.25, 1_002.0]


def test_a_lock_that_its_holder_took_to_the_grave_blocks_for_ever(world: World, threads: Threads) -> None:
    lock = threads.Lock()
    victim = Process(world, 2)

    def holds() -> None:
        lock.acquire()
        world.pause(10.0)

    def wants() -> None:
        world.pause(1.0)
        victim.die()
        lock.acquire()

    world.start(victim, "holds", holds)
    with pytest.raises(SimulationError, match="nothing is left"):
        run(world, wants)


def test_an_event_wakes_all_and_its_wait_says_whether_it_came(world: World, threads: Threads) -> None:
    event = threads.Event()
    said: list[tuple[str, bool, float]] = []

    def waits(name: str, timeout_s: float) -> Callable[[], None]:
        return lambda: said.append((name, event.wait(timeout_s), world.now_s))

    def sets() -> None:
        world.pause(1.0)
        event.set()
        world.pause(1.0)

    run(world, sets, waits("short", 0.5), waits("long", 5.0), waits("longer", 7.0))
    assert sorted(said) == [("long", True, 1_001.0), ("longer", True, 1_001.0), ("short", False, 1_000.5)]


def test_a_thread_runs_beside_who_starts_it_and_is_joined(world: World, threads: Threads) -> None:
    ends_s = []

    def starts() -> None:
        thread = threads.Thread(target=world.pause, args=(3.0,), name="slow")
        thread.start()
        thread.join(1.0)
        ends_s.append((thread.is_alive(), world.now_s))
        thread.join()
        ends_s.append((thread.is_alive(), world.now_s))

    run(world, starts)
    assert ends_s == [(True, 1_001.0), (False, 1_003.0)]


def test_no_thread_starts_where_the_system_gives_none(world: World, threads: Threads) -> None:
    process = Process(world, 2)
    process.no_threads = True

    def starts() -> None:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.Thread(target=print).start()

    run(world, starts, process=process)
