"""Why chunks are missed, where a tier is the reason."""

import asyncio

from tests.scheduler.conftest import Bench, now, soon
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.advisor import Advisor
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk


def watched(bench: Bench) -> tuple[Reader, Advisor]:
    reader = Reader(bench.cpu, [bench.tier], ReaderSettings(deadline_s=1.0, probe_deadline_s=1.0))
    return reader, Advisor(reader, 4096, 1)


def missed(advisor: Advisor) -> dict[str, float]:
    return {reason: tokens for reason, tokens in advisor.advice().usage.missed_tokens.items() if tokens}


async def look_up(reader: Reader, advisor: Advisor, keys: list[ChunkKey]) -> None:
    until_s = soon(1.0)
    advisor.looked_up(keys, (await reader.lookup(keys, until_s))[0], until_s)


async def test_a_tier_that_is_down(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 21))
    reader, advisor = watched(bench)
    bench.tier.gate.clear()
    for start in range(0, 20, 4):
        await asyncio.gather(*(reader.fetch(key, soon(1.0)) for key in keys[start : start + 4]))
    assert reader.breakers() == {"disk": "open"}
    await look_up(reader, advisor, keys)
    assert missed(advisor) == {"tier_down": 20.0}
    await bench.let_go()


async def test_a_chunk_behind_a_missing_one(bench: Bench) -> None:
    here, after = bench.keep_on_tier(range(1, 3))
    reader, advisor = watched(bench)
    await look_up(reader, advisor, [here, chunk(9)[0], after])
    assert missed(advisor) == {"never_stored": 1.0, "gap": 1.0}


async def test_what_was_found_and_is_late(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 4))
    reader, advisor = watched(bench)
    await look_up(reader, advisor, keys)
    advisor.got(keys, 1, now())
    assert missed(advisor) == {"deadline": 2.0}
    advisor.got(keys, 2, soon(1.0))
    assert missed(advisor) == {"deadline": 2.0}, "it was never promised, or was removed"
    usage = advisor.advice().usage
    assert (usage.asked_tokens, usage.found_tokens, advisor.advice().loaded_tokens) == (3, 1, 3)


async def test_a_get_that_is_too_late(bench: Bench) -> None:
    keys = bench.keep_on_tier(range(1, 4))
    _, advisor = watched(bench)
    advisor.got(keys, 1, now())
    assert missed(advisor) == {"deadline": 2.0}
