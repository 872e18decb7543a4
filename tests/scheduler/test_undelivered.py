"""What is said of chunks that a caller's memory did not take: once in a while, with their number."""

import asyncio

import pytest

from tests.scheduler.conftest import Bench, expect
from tests.scheduler.test_reader import reader_of, soon
from tiercache.scheduler.reads import WARN_EVERY_S


async def test_buffers_of_a_wrong_length_are_said_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    keys = bench.keep_on_tier(range(1, 9))
    wrong = [expect(77)] * 8
    reader = reader_of(bench)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "could not be delivered" in record.getMessage()]

    for _ in range(3):
        assert await reader.deliver(keys, wrong, soon()) == 0
    assert len(lines()) == 1 and "(1 so far)" in lines()[0]
    before = reader.counters.sink_failures
    assert before > 2
    await asyncio.sleep(WARN_EVERY_S)
    assert await reader.deliver(keys[:1], wrong[:1], soon()) == 0
    assert len(lines()) == 2
    assert f"({before + 1} so far)" in lines()[1]
