"""The virtual clock of `tiercache.testing`: it moves by jumps to the next timer alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from tiercache.testing import JumpingClockLoop


def computed_for(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


@pytest.mark.parametrize("sleep_s", [0.001, 0.02, 0.5, 3600.0])
def test_sleeping_takes_exactly_what_was_asked_for_however_long_the_loop_computes(sleep_s: float) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        computed_for(0.05)
        await asyncio.sleep(sleep_s)
        computed_for(0.05)
        return loop.time() - began_s

    with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
        assert runner.run(main()) == pytest.approx(sleep_s, abs=1e-6)


@pytest.mark.parametrize("timeout_s", [0.01, 1.0])
def test_clock_stands_while_threads_compute(timeout_s: float) -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.timeout(timeout_s):
            await asyncio.to_thread(computed_for, 0.3)
        return loop.time() - began_s

    with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
        assert runner.run(main()) == 0.0
