"""The heartbeat that measures how late the loop is."""

import asyncio

from tiercache.bench.loop_figures import lags


class HeldLoop(asyncio.SelectorEventLoop):
    """A loop that can be told that it was held up for some time."""

    held_s = 0.0

    def time(self) -> float:
        return super().time() + self.held_s


def test_a_loop_that_was_held_shows_as_lag() -> None:
    async def hold() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HeldLoop)
        for _ in range(2):
            turn = loop.create_future()
            loop.call_later(0.002, turn.set_result, None)
            await turn
            loop.held_s += 7.0

    async def measure() -> list[float]:
        return await lags(hold())

    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        found = runner.run(measure())
    assert found == sorted(found)
    assert 6.9 < found[-1] < 14.0


def test_no_beat_is_no_lag() -> None:
    async def measure() -> list[float]:
        return await lags(asyncio.sleep(0))

    assert asyncio.run(measure()) == [0.0]
