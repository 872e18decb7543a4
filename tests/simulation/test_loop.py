"""The event loop of a simulated process: asyncio's contract on the world's clock."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.torture.simulation.gathering import gather
from tests.torture.simulation.process import Process
from tests.torture.simulation.world import SimulationError, World


def run(world: World, main: Callable[[], Awaitable[Any]]) -> Process:
    process = Process(world, 1)

    async def whole() -> None:
        await main()
        world.stop()

    process.run("main", whole)
    world.run()
    return process


def test_a_deadline_is_kept_to_the_microsecond() -> None:
    world = World(0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(123.456789):
                await loop.create_future()
        assert loop.time() - began_s == pytest.approx(123.456789, abs=1e-6)

    run(world, main)


def test_every_fourth_seed_runs_them_in_an_order_of_its_own() -> None:
    def order(seed: int) -> list[int]:
        seen: list[int] = []

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for number in range(5):
                loop.call_soon(seen.append, number)
            await asyncio.sleep(1.0)

        run(World(seed), main)
        return seen

    assert [order(seed) == sorted(order(seed)) for seed in (0, 1, 2, 4, 5, 6)] == [True] * 6
    assert any(order(seed) != sorted(order(seed)) for seed in (3, 7, 11))
    assert order(7) == order(7)


def test_what_a_callback_raises_is_kept_as_nobodys() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1.0)

    loop = run(World(0), main).loop
    assert loop is not None
    assert [type(error["exception"]) for error in loop.errors] == [ZeroDivisionError]


def test_a_loop_whose_tasks_give_way_to_each_other_for_ever_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.torture.simulation.loop.MOST_TURNS", 1000)
    world = World(0)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimulationError, match="something spins"):
        run(world, main)
    world.end()


async def _answers(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def _fails() -> int:
    raise ZeroDivisionError


@pytest.mark.parametrize("gathers", [asyncio.gather, gather], ids=["asyncio", "ours"])
class TestGather:
    """Ours does what asyncio's does."""

    async def test_results_are_in_the_order_of_what_was_given(self, gathers: Callable[..., Any]) -> None:
        assert await gathers(_answers(1, 0.01), _answers(2)) == [1, 2]
        assert await gathers() == []

    async def test_what_is_given_twice_is_awaited_once(self, gathers: Callable[..., Any]) -> None:
        coroutine = _answers(3)
        assert await gathers(coroutine, coroutine) == [3, 3]

    async def test_the_first_error_is_raised_or_all_are_returned(self, gathers: Callable[..., Any]) -> None:
        with pytest.raises(ZeroDivisionError):
            await gathers(_answers(1), _fails())
        one, error = await gathers(_answers(1), _fails(), return_exceptions=True)
        assert (one, type(error)) == (1, ZeroDivisionError)

    async def test_cancelling_it_cancels_all(self, gathers: Callable[..., Any]) -> None:
        tasks = [asyncio.create_task(_answers(1, 60.0)) for _ in range(2)]
        gathered = gathers(*tasks)
        await asyncio.sleep(0)
        gathered.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathered
        assert all(task.cancelled() for task in tasks)

    async def test_a_child_that_is_cancelled_counts_as_an_error(self, gathers: Callable[..., Any]) -> None:
        task = asyncio.create_task(_answers(1, 60.0))
        gathered = gathers(task, _answers(2), return_exceptions=True)
        await asyncio.sleep(0)
        task.cancel()
        error, two = await gathered
        assert (type(error), two) == (asyncio.CancelledError, 2)
