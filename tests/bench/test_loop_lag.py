"""The heartbeat that measures how late the loop is."""

import asyncio

from tiercache.bench.loop_figures import lags


async def test_a_loop_that_was_held_shows_as_lag() -> None:
    now_s = 0.0

    async def hold() -> None:
        nonlocal now_s
        for _ in range(2):
            turn = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.002, turn.set_result, None)
            await turn
            now_s += 7.0

    found = await lags(hold(), lambda: now_s)
    assert found == sorted(found)
    assert found[-1] == 7.0 - 0.001


async def test_no_beat_is_no_lag() -> None:
    assert await lags(asyncio.sleep(0)) == [0.0]
