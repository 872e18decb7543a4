"""What is decided by the seed, and how workers and the referee reckon."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from tests.torture.campaign.messages import Missed, Mouth
from tests.torture.campaign.operations import Lane, Tally
from tests.torture.campaign.payloads import CHUNK_BYTES, KEYS_A_SLOT, SLOTS, difference, key_of, payload_of
from tests.torture.campaign.plan import PARTS, PLACES, rounds
from tests.torture.campaign.promises import Promises
from tests.torture.campaign.usage import SOAK_S, Usage, growth, usage_of
from tests.torture.campaign.worker import LAYOUT
from tiercache.cache import TierCache
from tiercache.config import Config

EVERYTHING = range(SLOTS * KEYS_A_SLOT)


def test_same_seed_is_the_same_plan_and_another_one_another() -> None:
    first, again, other = (list(islice(rounds(seed, PARTS, 12.0), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_each_place_gets_its_turn() -> None:
    planned = list(islice(rounds(1, PARTS, 5.0), 2 * len(PARTS)))
    assert {each.place for each in planned} == {place for part in PARTS for place in PLACES[part]}
    assert all(2 <= each.writers <= 4 for each in planned)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_strikes_a_place_ends_in_the_round_and_nobody_is_killed_while_a_server_is_away(seed: int) -> None:
    for planned in islice(rounds(seed, PARTS, 12.0), 10):
        struck = None
        for fault in planned.faults:
            assert 0 <= fault.at_s <= planned.seconds
            if fault.kind == "kill":
                assert struck in (None, "fill")
            elif fault.kind == "heal":
                assert struck is not None
                struck = None
            elif fault.kind != "audit":
                assert struck is None
                struck = fault.kind
        assert struck is None


def test_every_chunk_has_a_key_and_bytes_of_its_own() -> None:
    keys = {key_of(place, number) for place in ("disk", "fs") for number in EVERYTHING}
    assert len(keys) == 2 * len(EVERYTHING)
    payloads = [payload_of(key) for key in keys]
    assert len({payload.tobytes() for payload in payloads}) == len(keys)
    assert {len(payload) == CHUNK_BYTES for payload in payloads} == {True, False}, "tails are shorter"


def test_difference_says_where_and_what() -> None:
    expected = payload_of(key_of("disk", 0))
    found = expected.copy()
    assert difference(expected, found) is None
    found[100] ^= 1
    said = difference(expected, found)
    assert said is not None and said.startswith(f"1 of {len(expected)} bytes are wrong, the first at 100: expected ")
    assert difference(expected, np.zeros(3, np.uint8)) == f"expected {len(expected)} bytes, found 3"


def test_a_promise_is_due_to_who_asked_after_it_and_until_it_is_taken_back() -> None:
    promises = Promises()
    promises.promised([1], since_s=9.0, at_s=10.0)
    assert promises.was_due(1, 11.0)
    assert not promises.was_due(1, 9.5), "asked before it was made"
    assert not promises.was_due(2, 11.0)
    promises.forgetting([1])
    assert not promises.was_due(1, 11.0)


def test_promise_is_told_however_many_puts_were_heard_since() -> None:
    promises = Promises()
    promises.note("disk-0", "promised", [1], 10.0)
    promises.promised([1], since_s=9.0, at_s=10.0)
    for at_s in range(20, 30):
        promises.note("disk-1", "putting", [1], float(at_s))
    assert "promised since -19.000 s" in promises.history(1)
    promises.forgetting([1])
    assert "promised" not in promises.history(1), "it holds no more"


def test_what_was_forgotten_may_be_there_again_once_somebody_puts_it() -> None:
    promises = Promises()
    promises.forgetting([1])
    assert promises.gone == [], "a forget that did not end promises nothing"
    promises.forgotten([1])
    assert promises.gone == [1]
    promises.putting([1])
    assert promises.gone == []


def test_a_server_that_lost_everything_keeps_no_promise_that_was_begun_before() -> None:
    promises = Promises()
    promises.promised([1], since_s=1.0, at_s=2.0)
    promises.void()
    assert promises.is_void and promises.due == []
    promises.void(until_s=10.0)
    promises.promised([1], since_s=9.0, at_s=12.0)
    assert promises.due == []
    promises.promised([1], since_s=11.0, at_s=12.0)
    assert promises.due == [1]
    assert not promises.was_due(1, since_s=-inf)


def samples(*rss_mib: float, seconds: float) -> list[Usage]:
    step_s = seconds / len(rss_mib)
    return [Usage(number * step_s, int(mib * 2**20), 10, 20) for number, mib in enumerate(rss_mib)]


def test_memory_may_grow_by_two_percent_in_a_soak() -> None:
    fine = growth(samples(50, 60, 61, 61, *[61] * 16, seconds=SOAK_S), SOAK_S)
    assert fine is not None and not fine.leaks, "what is taken in the first quarter is warm-up"
    assert fine.course == (121 << 19, *[61 << 20] * 5)
    fine = growth(samples(*[60, 67, 60] * 19, 60, 67, 60, 67, seconds=SOAK_S), SOAK_S)
    assert fine is not None and not fine.leaks, "one moment is not what a process has come to hold"
    assert fine.last.rss_bytes == 60 << 20
    leaking = growth(samples(50, *[60] * 9, *[62] * 10, seconds=SOAK_S), SOAK_S)
    assert leaking is not None and leaking.leaks == ("memory: 2.0 MiB more than 60.0",)


def test_descriptors_and_threads_may_not_grow() -> None:
    first, last = Usage(1.0, 1, 10, 20), Usage(60.0, 1, 30, 60)
    found = growth([first, last], 60.0)
    assert found is not None and found.leaks == ("descriptors: 10, then 30", "threads: 20, then 60")
    kept = growth([first, last], 60.0, descriptors_kept=128)
    assert kept is not None and kept.leaks == ("threads: 20, then 60",)


def test_a_process_that_has_ended_and_was_not_waited_for_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert usage_of(process.pid, 0.0) is None
    process.wait()
    assert usage_of(process.pid, 0.0) is None
    assert usage_of(os.getpid(), 0.0) is not None


@pytest.mark.parametrize("probed_meanwhile", [True, False])
async def test_a_miss_while_another_read_probes_a_tier_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed_meanwhile: bool
) -> None:
    sizes = {"chunk_size": 16, "max_local_cpu_size": 0.01, "max_local_disk_size": 0.01}
    config = Config.load(environ={}, overrides=sizes | {"local_disk": str(tmp_path)})
    said: list[object] = []
    mouth = SimpleNamespace(say=said.append)
    async with TierCache.open(config, LAYOUT) as cache:
        (reader,) = cache.parts.reader.tiers
        lane = Lane("disk", 0, 0, cache, Random(1), cast(Mouth, mouth), Tally())

        async def get(key: bytes, *, deadline_s: float) -> AsyncIterator[None]:
            """A miss. The breaker is closed again before its caller runs."""
            yield
            reader.breaker.succeeded(asyncio.get_running_loop().time())

        monkeypatch.setattr(cache, "get", asynccontextmanager(get))
        if probed_meanwhile:
            reader.breaker.trip(asyncio.get_running_loop().time())
        await lane.get_one()
    assert [type(one) for one in said] == ([] if probed_meanwhile else [Missed])
