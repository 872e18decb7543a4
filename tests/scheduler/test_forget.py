"""Forget: what began before it is not visible after it, what begins after it is. From memory, from every tier, whatever was
under way."""

import asyncio
import threading
from itertools import pairwise

import pytest

from tests.scheduler.conftest import is_whole, now, release
from tests.scheduler.held import CHUNK_BYTES, NEW, OLD, begun, found, key, opened, raising, settle, tier, until
from tiercache import TierCache
from tiercache.errors import TierFull, TierUnavailable

K = key(1)
refuse = raising(OSError, "connection refused")


async def new_bytes_are_everywhere(cache: TierCache, *names: str) -> None:
    """Put new bytes after the forget, and find them wherever a chunk can lie."""
    assert not cache.cpu.contains(K)
    await store(cache, NEW)
    assert await found(cache, K) == NEW, "from memory"
    for name in names:
        assert tier(name).chunks.get(K) == NEW, f"on {name}"
    for name in names:
        cache.clear_hot()
        for other in names:
            tier(other).chunks = {K: NEW} if other == name else {}
        assert await found(cache, K) == NEW, f"from {name}"


async def store(cache: TierCache, payload: bytes) -> None:
    assert await cache.put(K, payload)
    assert (await cache.flush()).complete


async def store_cold(cache: TierCache, payload: bytes = OLD) -> None:
    await store(cache, payload)
    cache.clear_hot()


@pytest.mark.parametrize("kind", ["get", "get_into", "warm", "prefetch"])
async def test_read_in_flight_brings_nothing_back(kind: str) -> None:
    async with opened("a", "b") as cache:
        await store_cold(cache)
        tier("a").hold("read")
        into = bytearray(CHUNK_BYTES)
        reading: asyncio.Future[object] = asyncio.ensure_future(
            {
                "get": lambda: found(cache, K),
                "get_into": lambda: cache.get_into([K], [into]),
                "warm": lambda: cache.warm([K]),
                "prefetch": lambda: cache.prefetch([K]),
            }[kind]()
        )
        await tier("a").until_entered("read")
        forgetting = await begun(cache.forget([K]))
        tier("a").let_go("read")
        await asyncio.gather(reading, forgetting)
        assert await found(cache, K) is None
        await new_bytes_are_everywhere(cache, "a", "b")


async def test_read_that_outlived_its_deadline_brings_nothing_back(cache: TierCache) -> None:
    await store_cold(cache)
    tier("a").hold("read")
    assert await found(cache, K, deadline_s=1.0) is None
    with pytest.raises(TierUnavailable, match="a: 1 of 1"):
        await cache.forget([K], deadline_s=1.0)
    assert await cache.put(K, NEW)
    tier("a").let_go("read")
    await settle()
    assert await found(cache, K) == NEW
    assert (await cache.flush()).complete
    cache.clear_hot()
    assert await found(cache, K) == NEW


async def test_who_comes_after_a_forget_does_not_join_a_flight_from_before(cache: TierCache) -> None:
    await store_cold(cache)
    tier("a").hold("read")
    before = asyncio.create_task(found(cache, K))
    await tier("a").until_entered("read")
    forgetting = await begun(cache.forget([K]))
    after = await begun(found(cache, K))
    tier("a").let_go("read")
    await asyncio.gather(before, forgetting)
    assert await after is None


async def test_read_after_a_forget_finds_the_new_bytes_while_one_from_before_hangs() -> None:
    async with opened("a", "b", only_read="a") as cache:
        tier("a").chunks[K] = OLD
        tier("a").hold("read")
        before = asyncio.create_task(found(cache, K))
        await tier("a").until_entered("read")
        await cache.forget([K])
        await store_cold(cache, NEW)
        assert await found(cache, K) == NEW
        assert not before.done()
        tier("a").let_go("read")
        assert await before is None


async def test_put_that_is_being_filled_brings_nothing_back(cache: TierCache) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def slowly(slot: object) -> None:
        copying.set()
        go_on.wait(10.0)
        slot[:] = bytearray(OLD)  # type: ignore[index]

    before = asyncio.create_task(cache.put_from([(K, CHUNK_BYTES, slowly)]))
    await until(copying.is_set)
    await cache.forget([K])
    after = await begun(cache.put(K, NEW))
    go_on.set()
    assert await before == 0
    assert await after
    assert await found(cache, K) == NEW
    cache.cpu.forget(K)
    await cache.forget([K])
    await new_bytes_are_everywhere(cache, "a")


async def test_put_that_waits_for_a_slot_brings_nothing_back() -> None:
    async with opened(slots=8) as cache:
        leases = []
        for number in range(10, 18):
            assert await cache.put(key(number), OLD)
            leases.append(cache.cpu.lease(key(number)))
        before = await begun(cache.put(K, OLD))
        await cache.forget([K])
        after = await begun(cache.put(K, NEW))
        release(*leases)
        assert await asyncio.gather(before, after) == [False, True]
        assert await found(cache, K) == NEW


async def test_write_under_way_is_followed_by_the_write_of_what_is_put_after() -> None:
    async with opened("a", "b") as cache:
        tier("a").hold("write")
        assert await cache.put(K, OLD)
        await tier("a").until_entered("write")
        forgetting = await begun(cache.forget([K]))
        assert await cache.put(K, NEW)
        assert not (await cache.flush(0.0)).complete, "it is not written yet"
        tier("a").let_go("write")
        await forgetting
        assert (await cache.flush()).complete
        for name in ("a", "b"):
            assert tier(name).chunks == {K: NEW}


async def test_write_that_waits_for_its_next_attempt_does_not_delay_the_removal(cache: TierCache) -> None:
    failures = [OSError("connection refused")]

    async def fail_once() -> None:
        if failures:
            raise failures.pop()

    tier("a").fate = fail_once
    assert await cache.put(K, OLD)
    await tier("a").until_entered("write")
    await settle()
    await cache.forget([K], deadline_s=5.0)
    await new_bytes_are_everywhere(cache, "a")


async def test_queued_write_is_not_written(cache: TierCache) -> None:
    tier("a").hold("write")
    for number in (10, 11):
        await cache.put(key(number), OLD)
    await cache.put(K, OLD)
    forgetting = await begun(cache.forget([K]))
    tier("a").let_go("write")
    await forgetting
    assert (await cache.flush()).complete
    assert set(tier("a").chunks) == {key(10), key(11)}
    await new_bytes_are_everywhere(cache, "a")


async def test_write_that_waits_for_room_in_the_queue_is_not_written() -> None:
    async with opened("a", write_queue_bytes=CHUNK_BYTES, queue_wait_s=20.0) as cache:
        tier("a").hold("write")
        for number in (10, 11, 12):
            await cache.put(key(number), OLD)
        before = asyncio.create_task(cache.put(K, OLD))
        await until(lambda: cache.cpu.contains(K))
        assert not before.done()
        forgetting = await begun(cache.forget([K]))
        tier("a").let_go("write")
        await asyncio.gather(before, forgetting)
        assert (await cache.flush()).complete
        assert K not in tier("a").chunks
        await new_bytes_are_everywhere(cache, "a")


async def test_stuck_write_brings_nothing_back_and_flush_tells_what_became_of_the_new_one(cache: TierCache) -> None:
    tier("a").hold("write")
    assert await cache.put(K, OLD)
    await asyncio.sleep(31.0)
    assert cache.statistics().stuck == 1
    with pytest.raises(TierUnavailable):
        await cache.forget([K], deadline_s=1.0)
    assert await cache.put(K, NEW)
    assert not (await cache.flush(1.0)).complete
    report = await cache.flush(60.0)
    assert report.complete and report.dropped["a"] >= 1, "it holds no memory for ever"
    tier("a").let_go("write")
    await settle()
    assert tier("a").chunks == {}, "the old bytes landed, and are gone again"
    assert await found(cache, K) == NEW


@pytest.mark.parametrize("kind", ["remove", "write"])
async def test_forget_ends_at_its_deadline_on_a_tier_that_hangs(kind: str) -> None:
    async with opened("a", "b") as cache:
        if kind == "remove":
            await store_cold(cache)
        tier("a").hold(kind)
        if kind == "write":
            assert await cache.put(K, OLD)
            await tier("a").until_entered("write")
        began_s = now()
        with pytest.raises(TierUnavailable, match=r"within 2\.0 s \(a: 1 of 1 chunks\)"):
            await cache.forget([K], deadline_s=2.0)
        assert now() - began_s < 3.0
        assert K not in tier("b").chunks, "the other one is not kept from it"
        assert await found(cache, K) is None, "though it lies there still"
        assert (await cache.lookup_keys([K])).chunks == 0
        tier("a").let_go(kind)
        await settle()
        assert K not in tier("a").chunks, "the removal went on"
        await new_bytes_are_everywhere(cache, "a", "b")


async def test_new_bytes_wait_for_a_removal_that_hangs(cache: TierCache) -> None:
    await store_cold(cache)
    tier("a").hold("remove")
    with pytest.raises(TierUnavailable):
        await cache.forget([K], deadline_s=1.0)
    assert await cache.put(K, NEW)
    cache.clear_hot()
    assert cache.cpu.contains(K), "it is still to be written"
    assert not (await cache.flush(1.0)).complete
    tier("a").let_go("remove")
    assert (await cache.flush()).complete
    assert tier("a").chunks == {K: NEW}


async def test_removal_that_fails_is_reported_and_tried_again(cache: TierCache) -> None:
    await store_cold(cache)
    tier("a").fail_removals = [OSError("connection refused")] * 2
    with pytest.raises(TierUnavailable, match="connection refused"):
        await cache.forget([K])
    assert tier("a").chunks == {K: OLD}
    assert await found(cache, K) is None
    assert await cache.put(K, NEW)
    report = await cache.flush()
    assert (report.written, report.dropped) == ({"a": 0}, {"a": 1}), "the old chunk is still there"
    assert is_whole(cache.cpu), "what cannot be written now waits in nobody's memory"
    await asyncio.sleep(5.0)
    assert tier("a").chunks == {}
    await cache.forget([K])
    await new_bytes_are_everywhere(cache, "a")


async def test_lease_from_before_keeps_its_bytes() -> None:
    async with opened("a", slots=8) as cache:
        await cache.put(K, OLD)
        async with cache.get(K) as lease:
            assert lease is not None
            await cache.forget([K])
            await cache.put(K, NEW)
            for number in range(10, 40):
                await cache.put(key(number), NEW)
            assert bytes(lease.view) == OLD
        assert await found(cache, K) == NEW


async def test_tier_that_is_only_read_keeps_its_chunk_and_is_not_asked_for_it() -> None:
    async with opened("a", "b", only_read="b") as cache:
        tier("b").chunks[K] = OLD
        await cache.forget([K])
        assert tier("b").chunks == {K: OLD}, "nobody told us to change it"
        assert await found(cache, K) is None
        await store_cold(cache, NEW)
        assert await found(cache, K) == NEW


async def test_cancelled_forget_ends_at_once_and_has_forgotten_all_chunks(cache: TierCache) -> None:
    keys = [key(number) for number in range(1, 1001)]
    tier("a").chunks = dict.fromkeys(keys, OLD)
    tier("a").hold("remove")
    forgetting = asyncio.create_task(cache.forget(keys))
    await tier("a").until_entered("remove")
    began_s = now()
    forgetting.cancel()
    await asyncio.gather(forgetting, return_exceptions=True)
    assert now() - began_s < 1.0
    assert sum(await cache.lookup_each(keys)) == 0
    assert await found(cache, keys[-1]) is None
    tier("a").let_go("remove")
    await until(lambda: not tier("a").chunks)


async def test_forget_of_many_chunks_leaves_the_loop_to_others_and_has_forgotten_all_at_its_end() -> None:
    async with opened("a", "b") as cache:
        keys = [key(number) for number in range(1, 10_001)]
        for name in ("a", "b"):
            tier(name).chunks = dict.fromkeys(keys, OLD)
        offered = [len(keys)]
        forgetting = asyncio.create_task(cache.forget(keys))
        while not forgetting.done():
            await asyncio.sleep(0)
            offered.append(sum(map(cache.tiers[0].offers, keys)))
        assert max(before - after for before, after in pairwise(offered)) < 1000, "in one turn of the loop"
        await forgetting
        assert not any(any(map(each.offers, keys)) for each in cache.tiers)
        assert sum(await cache.lookup_each(keys)) == 0


async def test_dead_tier_is_asked_seldom_to_remove_chunks_and_removes_them_when_it_is_well(cache: TierCache) -> None:
    keys = [key(number) for number in range(1, 5001)]
    tier("a").chunks, tier("a").fate = dict.fromkeys(keys, OLD), refuse
    with pytest.raises(TierUnavailable, match="connection refused"):
        await cache.forget(keys)
    assert tier("a").entered["remove"] <= 10
    await asyncio.sleep(200.0)
    assert tier("a").entered["remove"] <= 20, "the pauses grow"
    tried = tier("a").entered["remove"]
    with pytest.raises(TierUnavailable, match="connection refused"):
        await cache.forget(keys[:1000])
    assert tier("a").entered["remove"] == tried + 1, "a call tries one"
    assert sum(await cache.lookup_each(keys)) == 0
    tier("a").fate = None
    await asyncio.sleep(70.0)
    assert tier("a").chunks == {}
    await cache.forget([K])
    await new_bytes_are_everywhere(cache, "a")


async def test_removals_of_a_tier_that_is_away_for_a_moment_are_tried_again_soon(cache: TierCache) -> None:
    async def refuse_late() -> None:
        await asyncio.sleep(0.005)  # several removals are in flight when the first one fails
        raise OSError("connection refused")

    keys = [key(number) for number in range(1, 101)]
    tier("a").chunks, tier("a").fate = dict.fromkeys(keys, OLD), refuse_late
    with pytest.raises(TierUnavailable, match="connection refused"):
        await cache.forget(keys)
    await asyncio.sleep(2.0)
    tier("a").fate = None
    await asyncio.sleep(8.0)
    assert len(tier("a").chunks) == 0


@pytest.mark.parametrize("tier_hangs", [False, True], ids=["fails", "hangs"])
async def test_chunks_too_many_to_be_removed_later_are_never_used_there_again(cache: TierCache, tier_hangs: bool) -> None:
    keys = [key(number) for number in range(1, 70_001)]
    tier("a").chunks = dict.fromkeys(keys, OLD)
    if tier_hangs:
        tier("a").hold("remove")
        with pytest.raises(TierUnavailable, match="more than 65536 forgotten chunks could not be removed; 4464 others stay"):
            await cache.forget(keys, deadline_s=1.0)
    else:
        tier("a").fate = refuse
        with pytest.raises(TierUnavailable, match="connection refused"):
            await cache.forget(keys)
    assert await cache.put(keys[0], NEW) and await cache.put(keys[-1], NEW)
    tier("a").fate = None
    tier("a").let_go("remove")
    await asyncio.sleep(10.0)
    left = [each for each, stored in tier("a").chunks.items() if stored == OLD]
    assert 0 < len(left) <= 70_000 - 65_536
    cache.clear_hot()
    assert sum(await cache.lookup_each(left)) == 0
    for one in left[:20]:
        assert await cache.put(one, NEW)
    assert (await cache.flush()).complete
    cache.clear_hot()
    for one in left[:20]:
        assert await found(cache, one) is None
    others = [key(number) for number in range(100_001, 100_101)]
    for one in others:
        assert await cache.put(one, NEW)
    assert (await cache.flush()).complete
    assert sum(one in tier("a").chunks for one in others) >= 99


async def test_full_tier_removes_what_is_forgotten_though_it_takes_no_writes(cache: TierCache) -> None:
    await store_cold(cache)
    tier("a").fate = raising(TierFull, "no room")
    assert await cache.put(key(2), NEW)
    assert (await cache.flush()).dropped == {"a": 1}
    tier("a").fate = None
    await cache.forget([K])
    assert tier("a").chunks == {}


async def test_chunk_whose_removal_fails_keeps_no_other_from_being_removed() -> None:
    async with opened("a", concurrency=1) as cache:
        keys = [key(number) for number in range(1, 11)]
        tier("a").chunks = dict.fromkeys(keys, OLD)
        tier("a").fail_removals = [OSError("not permitted")]
        with pytest.raises(TierUnavailable, match="not permitted"):
            await cache.forget(keys)
        assert len(tier("a").chunks) == 1
        await asyncio.sleep(5.0)
        assert tier("a").chunks == {}
