"""What a cache advises after a workload whose hit rates are known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, LAYOUT, key, only_below, opened, payload
from tiercache import TierCache
from tiercache.core.advice import Usage, sentences

SLOTS = 32
TOKENS = LAYOUT.chunk_tokens


async def ask(cache: TierCache, keys: list[bytes], *, stores: bool = True) -> int:
    """A request: look up a prefix, load what is there, and store the rest."""
    found = (await cache.lookup_keys(keys)).chunks
    assert await cache.get_into(keys[:found], [np.zeros(CHUNK_BYTES, np.uint8)] * found) == found
    if stores and found < len(keys):
        await cache.put_many(keys[found:], [payload(1)] * (len(keys) - found), prefix=True)
    return found


async def ask_in_turns(cache: TierCache, numbers: Iterable[int]) -> int:
    return sum([await ask(cache, [key(number)]) for number in numbers])


def hit_rate(cache: TierCache, chunks: int) -> float:
    usage = cache.statistics().advice.usage
    return usage.hit_tokens[str(chunks * CHUNK_BYTES)] / usage.sampled_tokens


def chunks_missed(usage: Usage) -> dict[str, int]:
    return {reason: round(tokens / TOKENS) for reason, tokens in usage.missed_tokens.items() if tokens}


async def test_a_cycle_larger_than_the_cache_hits_in_one_twice_as_large() -> None:
    async with opened() as cache:
        assert await ask_in_turns(cache, [number % 48 for number in range(480)]) == 0
        advice = cache.statistics().advice
        assert (advice.requests, advice.usage.asked_tokens, advice.usage.found_tokens) == (480, 480 * TOKENS, 0)
        assert hit_rate(cache, SLOTS) == 0.0
        assert hit_rate(cache, 2 * SLOTS) == pytest.approx(0.9)
        assert (advice.tiers["cpu"].hit_rate, advice.tiers["cpu"].hit_rate_doubled) == (0.0, pytest.approx(0.9))
        assert chunks_missed(advice.usage) == {"never_stored": 48, "evicted_10m": 432}
        assert sentences(advice)[:2] == [
            "2 MB more RAM: +90.0 points of hit rate.",
            "90 % of misses are evicted chunks that were used less than 10 minutes before: a larger cache keeps them.",
        ]


async def test_predictions_for_its_own_size_are_what_the_cache_hits() -> None:
    choose = np.random.default_rng(1)
    async with opened() as cache:
        prompts = [[*range(1, 4), int(turn)] for turn in choose.zipf(1.3, 2000) % 500 + 10]
        found = [await ask(cache, [key(number) for number in prompt]) for prompt in prompts]
        usage = cache.statistics().advice.usage
        assert usage.found_tokens == sum(found) * TOKENS
        assert hit_rate(cache, SLOTS) == pytest.approx(usage.found_tokens / usage.asked_tokens, abs=0.02)


async def test_what_was_loaded_is_saved_prefill() -> None:
    async with opened() as cache:
        await ask_in_turns(cache, [1, 1, 1])
        assert cache.statistics().advice.saved_s is None
        cache.computing_takes(0.25)
        advice = cache.statistics().advice
        assert (advice.loaded_tokens, advice.saved_s) == (2 * TOKENS, 0.5)


async def test_a_cache_without_lookups_counts_its_gets() -> None:
    async with opened() as cache:
        await cache.put_many([key(1), key(2)], [payload(1)] * 2, prefix=True)
        for _ in range(3):
            assert await cache.get_into([key(1), key(2), key(3)], [np.zeros(CHUNK_BYTES, np.uint8)] * 3) == 2
        usage = cache.statistics().advice.usage
        assert (usage.asked_tokens, usage.found_tokens) == (9 * TOKENS, 6 * TOKENS)
        assert chunks_missed(usage) == {"never_stored": 3}


async def test_a_further_question_about_a_request_does_not_count() -> None:
    async with opened() as cache:
        for counts in (True, False, False):
            await cache.lookup_keys([key(1)], counts=counts)
        assert cache.statistics().advice.requests == 1


async def test_tokens_after_the_last_chunk_are_missed_if_all_chunks_are_there() -> None:
    prompt = list(range(2 * TOKENS + 10))
    async with opened() as cache:
        await cache.lookup(prompt)
        await cache.store(prompt, [payload(1), payload(2)])
        await cache.lookup(prompt)
        usage = cache.statistics().advice.usage
        assert usage.asked_tokens == 4 * TOKENS + 10
        assert usage.missed_tokens["partial_chunk"] == pytest.approx(10)
    async with opened(save_unfull_chunk=True) as cache:
        await cache.store(prompt, [payload(1), payload(2), payload(3, 10 * 1024)])
        await cache.lookup(prompt)
        assert chunks_missed(cache.statistics().advice.usage) == {}


async def test_what_the_admission_kept_from_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, flash_admission="second_touch") as cache:
        await ask(cache, [key(1)])
        await only_below(cache)
        await ask(cache, [key(1)])
        assert chunks_missed(cache.statistics().advice.usage) == {"never_stored": 1, "declined": 1}
        assert not cache.statistics().advice.tiers["disk"].admits_all


async def test_a_disk_has_a_size_and_its_hits(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await ask_in_turns(cache, range(100))
        await cache.flush()
        await ask_in_turns(cache, range(100))
        tiers = cache.statistics().advice.tiers
        assert tiers["disk"].capacity_bytes == 64 << 20
        assert (tiers["cpu"].hit_rate, tiers["disk"].hit_rate) == (0.0, pytest.approx(0.5))
        assert tiers["disk"].written_bytes == 100 * CHUNK_BYTES


async def test_a_disk_that_is_slower_than_computing_is_not_praised(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for _ in range(2):
            await ask_in_turns(cache, range(48))  # measures the disk: the first read of an unknown one is only a trial
            await cache.flush()
        cache.computing_takes(1e-9)
        for _ in range(8):
            await ask_in_turns(cache, range(48))
            await cache.flush()
        advice = cache.statistics().advice
        assert advice.usage.missed_tokens["too_slow"] == pytest.approx(0.8 * advice.usage.asked_tokens)
        disk = advice.tiers["disk"]
        assert disk.hit_rate == pytest.approx(0.9)
        assert disk.slow_tokens == advice.usage.missed_tokens["too_slow"]
        ram_said, disk_said, *_ = sentences(advice)
        assert "of hits in RAM, +" in ram_said and "+0.0 points of hit rate" not in ram_said
        assert disk_said.startswith("disk: +10.0 points"), "only what it loaded"


async def test_chunks_of_an_earlier_process_are_hits_of_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await ask_in_turns(cache, range(50))
    async with opened(tmp_path) as cache:
        assert await ask_in_turns(cache, range(50)) == 50
        tiers = cache.statistics().advice.tiers
        assert (tiers["cpu"].hit_rate, tiers["disk"].hit_rate) == (0.0, pytest.approx(1.0))


async def test_forgotten_chunks_are_missed_as_if_they_were_new() -> None:
    async with opened() as cache:
        await ask(cache, [key(1)])
        await cache.forget([key(1)])
        await ask(cache, [key(1)])
        usage = cache.statistics().advice.usage
        assert chunks_missed(usage) == {"never_stored": 2}
        assert hit_rate(cache, 2 * SLOTS) == 0.0


async def test_tenants_have_their_own_figures() -> None:
    async with opened() as cache:
        for salt, turns in (("a", 3), ("b", 1)):
            for _ in range(turns):
                await ask(cache, cache.keys(range(TOKENS), salt=salt))
        await ask(cache, cache.keys(range(TOKENS)))
        advice = cache.statistics().advice
        found = sorted((usage.asked_tokens, usage.found_tokens) for usage in advice.tenants.values())
        assert found == [(TOKENS, 0), (TOKENS, 0), (3 * TOKENS, 2 * TOKENS)]
        assert "default" in advice.tenants and advice.usage.asked_tokens == 5 * TOKENS


async def test_the_number_of_tenants_has_a_limit() -> None:
    async with opened() as cache:
        for _ in range(3):
            await ask(cache, cache.keys(range(TOKENS), salt="often"), stores=False)
        for tenant in range(100):
            await ask(cache, cache.keys(range(TOKENS), salt=str(tenant)), stores=False)
        advice = cache.statistics().advice
        assert len(advice.tenants) == 16 and advice.usage.asked_tokens == 103 * TOKENS
        assert max(usage.asked_tokens for usage in advice.tenants.values()) == 3 * TOKENS, "those with most stay"


async def test_sizes_are_those_of_the_cache_as_it_is_now(tmp_path: Path) -> None:
    async with opened(tmp_path, max_local_cpu_size=4 / 1024) as cache:
        await ask_in_turns(cache, [number % 48 for number in range(480)])
        assert cache.statistics().advice.tiers["cpu"].hit_rate == pytest.approx(0.9)
        await cache.reconfigure({"max_local_cpu_size": 2 / 1024, "max_local_disk_size": 1 / 32})
        advice = cache.statistics().advice
        ram, disk = advice.tiers["cpu"], advice.tiers["disk"]
        assert (ram.capacity_bytes, ram.hit_rate, ram.hit_rate_doubled) == (2 << 20, 0.0, pytest.approx(0.9))
        assert disk.capacity_bytes == 32 << 20
        assert min(map(int, advice.usage.hit_tokens)) == (2 << 20) // 8


async def test_a_detached_tier_is_down_and_gets_no_advice(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await ask_in_turns(cache, range(40))
        await cache.flush()
        await cache.detach("disk")
        cache.clear_hot()
        await ask(cache, [key(1)], stores=False)
        advice = cache.statistics().advice
        assert chunks_missed(advice.usage) == {"never_stored": 40, "tier_down": 1}
        assert set(advice.tiers) == {"cpu"}
        await cache.attach("disk")
        assert await ask_in_turns(cache, range(40)) == 40
        assert set(cache.statistics().advice.tiers) == {"cpu", "disk"}


async def test_ram_that_keeps_nothing_is_no_cache(tmp_path: Path) -> None:
    async with opened(tmp_path, local_cpu=False) as cache:
        await ask_in_turns(cache, [number % 48 for number in range(480)])
        advice = cache.statistics().advice
        assert set(advice.tiers) == {"disk"}
        assert not [said for said in sentences(advice) if "RAM" in said]


async def test_an_empty_cache_and_one_request() -> None:
    async with opened() as cache:
        advice = cache.statistics().advice
        assert (advice.requests, advice.usage.sampled_tokens, advice.tiers["cpu"].hit_rate) == (0, 0.0, 0.0)
        assert await cache.lookup_keys([]) and await cache.get_into([], []) == 0
        await cache.lookup(list(range(10)))
        assert cache.statistics().advice.usage.missed_tokens["partial_chunk"] == pytest.approx(10)
        await ask(cache, [key(1)])
        assert cache.statistics().advice.requests == 1
