"""TierCache as an embedder meets it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.scheduler.conftest import release
from tiercache import Config, ConfigError, Layout, TierCache
from tiercache.core.header import file_bytes
from tiercache.errors import CacheClosed

CHUNK_BYTES = 64 * 1024
LAYOUT = Layout("test-model", chunk_tokens=64, bytes_per_token=1024)


def configured(directory: Path | None = None, **values: object) -> Config:
    """32 slots, and a disk that holds about 900 chunks."""
    if directory is not None:
        values = {"local_disk": str(directory), "max_local_disk_size": 64 / 1024, **values}
    return Config.load(environ={}, overrides={"max_local_cpu_size": 2 / 1024, **values})


@asynccontextmanager
async def opened(directory: Path | None = None, layout: Layout = LAYOUT, **values: object) -> AsyncIterator[TierCache]:
    async with TierCache.open(configured(directory, **values), layout) as cache:
        yield cache


def payload(number: int, length: int = CHUNK_BYTES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(24, "big")


async def only_below(cache: TierCache) -> None:
    """What was put is written, and nothing is hot."""
    assert (await cache.flush()).complete
    cache.clear_hot()


async def reads(cache: TierCache, *numbers: int) -> bool:
    """A get finds all of these chunks, each with its own payload."""
    into = [np.zeros(CHUNK_BYTES, np.uint8) for _ in numbers]
    found = await cache.get_into([key(number) for number in numbers], into)
    return found == len(into) and all(map(np.array_equal, into, map(payload, numbers)))


async def until(holds: Callable[[], object]) -> None:
    """Wait for what tasks and threads make true."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0)


async def until_hot(cache: TierCache, keys: list[bytes]) -> None:
    await until(lambda: cache.lookup_hot(keys) == len(keys))


def is_whole(cache: TierCache) -> bool:
    return cache.cpu.obtainable == cache.cpu.pool.count and not any(cache.cpu.budget.held)


async def test_put_get_and_miss() -> None:
    async with opened() as cache:
        assert await cache.put(key(1), payload(1))
        async with cache.get(key(1)) as lease:
            assert lease is not None and np.array_equal(lease.view, payload(1))
            assert not lease.view.flags.writeable
        async with cache.get(key(2)) as lease:
            assert lease is None
        assert is_whole(cache)


async def test_shorter_tail_keeps_its_length_and_shows_nothing_of_the_slots_last_chunk(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for number in range(64):
            await cache.put(key(number), np.full(CHUNK_BYTES, 0xEE, np.uint8))
        assert await cache.put(key(100), payload(100, 5000))
        async with cache.get(key(100)) as lease:
            assert lease is not None and lease.view.nbytes == 5000
            assert not lease.padded[5000:].any()
        await cache.flush()
        (disk,) = cache.tiers
        stored = Path(disk.path(key(100))).read_bytes()  # type: ignore[attr-defined]
        assert b"\xee" * 16 not in stored[4096 + 5000 :]


@pytest.mark.parametrize("length", [0, CHUNK_BYTES + 1])
async def test_payload_of_a_wrong_length_is_an_error(length: int) -> None:
    async with opened() as cache:
        with pytest.raises(ValueError, match=f"expected 1..{CHUNK_BYTES} bytes"):
            await cache.put(key(1), bytes(length))


async def test_buffer_of_a_wrong_length_gets_nothing() -> None:
    async with opened() as cache:
        await cache.put(key(1), payload(1))
        short = np.zeros(CHUNK_BYTES - 1, np.uint8)
        assert await cache.get_into([key(1)], [short]) == 0
        assert not short.any()


async def test_store_lookup_load_by_tokens_across_a_restart(tmp_path: Path) -> None:
    tokens = list(range(64 * 5 + 10))
    async with opened(tmp_path) as cache:
        assert await cache.store(tokens, [payload(number) for number in range(5)]) == 5
        assert (await cache.lookup(tokens)).by_tier["cpu"] == 5
        assert (await cache.flush()).complete
    async with opened(tmp_path) as cache:
        hit = await cache.lookup([*tokens[: 64 * 4], 7, 8])
        assert (hit.chunks, hit.tokens) == (4, 256)
        assert hit.by_tier == {"cpu": 0, "disk": 4}
        buffers = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(5)]
        assert await cache.load(tokens, buffers) == 320
        assert all(np.array_equal(buffer, payload(number)) for number, buffer in enumerate(buffers))
        assert cache.lookup_hot(cache.keys(tokens)) == 5, "what was read is hot"


@pytest.mark.parametrize("how", ["as a prefix", "as a batch", "one by one"])
async def test_what_fills_four_fifths_of_full_memory_is_read_back_whole(how: str) -> None:
    layout = Layout("test-model", chunk_tokens=64, bytes_per_token=16)
    chunk = payload(1, layout.chunk_bytes)
    async with opened(layout=layout, max_local_cpu_size=640 * layout.chunk_bytes / 2**30) as cache:
        for first in (10_000, *range(0, 2560, 512)):
            keys = [key(first + number) for number in range(512)]
            if how == "one by one":
                assert all([await cache.put(one, chunk) for one in keys])
            else:
                assert await cache.put_many(keys, [chunk] * 512, prefix=how == "as a prefix") == 512
            assert await cache.get_into(keys, [np.empty_like(chunk) for _ in keys]) == 512, f"from {first} on"


async def test_other_tenant_and_other_layout_see_nothing(tmp_path: Path) -> None:
    tokens = list(range(64))
    async with opened(tmp_path, tenant_salt="a") as cache:
        await cache.store(tokens, [payload(1)])
        await cache.flush()
    async with opened(tmp_path, tenant_salt="b") as cache:
        assert (await cache.lookup(tokens)).chunks == 0
    async with opened(tmp_path, Layout("test-model", 64, 1024, kv_dtype="fp8"), tenant_salt="a") as cache:
        assert (await cache.lookup(tokens)).chunks == 0
    async with opened(tmp_path, tenant_salt="a") as cache:
        assert (await cache.lookup(tokens)).chunks == 1


async def test_many_more_chunks_than_memory_pass_through_to_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, queue_wait_s=30.0) as cache:
        for number in range(200):
            assert await cache.put(key(number), payload(number))
        assert (await cache.flush()).complete
        assert cache.statistics().tiers["disk"].resident == 200
        assert await reads(cache, *range(200))
        assert is_whole(cache)


async def test_chunks_that_are_hot_stay_on_disk_too(tmp_path: Path) -> None:
    """They are served from memory, so the tier learns of it only because it is told."""
    hot = [key(number) for number in range(1, 21)]
    async with opened(tmp_path, max_local_disk_size=60 * file_bytes(CHUNK_BYTES) / 2**30) as cache:
        for first in (1, *range(100, 300, 20)):
            for number in range(first, first + 20):
                assert await cache.put(key(number), payload(number))
                if first > 1:
                    assert await cache.get_into(hot, [np.zeros(CHUNK_BYTES, np.uint8) for _ in hot]) == len(hot)
            assert (await cache.flush()).complete
        assert cache.tiers[0].statistics().evicted > 100
        assert sum(await cache.tiers[0].probe_each(hot)) == len(hot)


async def test_without_local_cpu_memory_is_staging_only(tmp_path: Path) -> None:
    async with opened(tmp_path, local_cpu=False) as cache:
        for number in range(10):
            await cache.put(key(number), payload(number))
        await cache.flush()
        statistics = cache.statistics()
        assert statistics.tiers["cpu"].resident == 0
        assert statistics.slots_free == statistics.slots
        async with cache.get(key(3)) as lease:
            assert lease is not None and np.array_equal(lease.view, payload(3))
        assert cache.statistics().slots_free == statistics.slots


async def test_every_slot_leased_is_a_skipped_put_at_its_deadline_and_never_a_hang() -> None:
    async with opened() as cache:
        leases = []
        for number in range(cache.cpu.pool.count):
            assert await cache.put(key(number), payload(number))
            leases.append(cache.cpu.lease(key(number)))
        assert not await cache.put(key(998), payload(998), deadline_s=0.01)
        assert cache.statistics().puts_skipped == 1
        release(*leases)
        assert await cache.put(key(999), payload(999))


async def test_lease_keeps_its_bytes_while_everything_else_is_replaced() -> None:
    async with opened() as cache:
        await cache.put(key(0), payload(0))
        async with cache.get(key(0)) as lease:
            assert lease is not None
            for number in range(1, 200):
                await cache.put(key(number), payload(number))
            assert np.array_equal(lease.view, payload(0))
        with pytest.raises(ValueError, match="released"):
            _ = lease.view


async def test_forgotten_lease_is_reported_and_its_slot_comes_back() -> None:
    async with opened() as cache:
        await cache.put(key(0), payload(0))
        lease = cache.cpu.lease(key(0))
        with pytest.warns(ResourceWarning, match="never released"):
            del lease
        await asyncio.sleep(0)
        assert is_whole(cache)


async def test_closed_cache_says_so() -> None:
    async with opened() as cache:
        pass
    with pytest.raises(CacheClosed):
        await cache.put(key(1), payload(1))
    for call in (lambda: cache.get(key(1)), cache.statistics):
        with pytest.raises(CacheClosed):
            call()
    assert (await cache.close()).complete


async def test_lease_of_a_closed_cache_says_so_and_a_view_that_was_taken_before_stays() -> None:
    async with opened() as cache:
        assert await cache.put(key(1), payload(1))
        lease = cache.cpu.lease(key(1))
        assert lease is not None
        view = lease.view
    with pytest.raises(CacheClosed, match="its memory given back"):
        _ = lease.view
    assert np.array_equal(view, payload(1))
    lease.release()


async def test_deadline_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    nan = float("nan")
    async with opened(tmp_path) as cache:
        for call in (cache.put(key(1), payload(1), deadline_s=nan), cache.forget([key(1)], deadline_s=nan)):
            with pytest.raises(ValueError, match="deadline_s: expected a number of seconds, found nan"):
                await call
        with pytest.raises(ValueError, match="deadline_s"):
            async with cache.get(key(1), deadline_s=nan):
                pass
        for close in (cache.flush, cache.close):
            with pytest.raises(ValueError, match="timeout_s"):
                await close(nan)
        assert await cache.put(key(1), payload(1), deadline_s=float("inf"))
        assert is_whole(cache) or (await cache.flush()).complete


async def test_arena_too_small_for_the_layout_says_what_to_raise() -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size.*at least 4 are needed"):
        async with opened(layout=Layout("big", chunk_tokens=64, bytes_per_token=1 << 20)):
            pass


def test_import_is_quick_and_takes_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, tiercache; tiercache.TierCache, tiercache.Config; print('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("wrong", [b"short", b"", b"x" * 31, "x" * 24, None])
async def test_what_is_no_key_is_refused_everywhere(tmp_path: Path, wrong: object) -> None:
    async with opened(tmp_path) as cache:
        calls: list[tuple[Any, ...]] = [
            (cache.put, wrong, payload(1)),
            (cache.put_many, [wrong], [payload(1)]),
            (cache.put_from, [(wrong, 100, lambda slot: None)]),
            (cache.get, wrong),
            (cache.get_into, [wrong], [np.zeros(CHUNK_BYTES, np.uint8)]),
            (cache.get_to, [wrong], [lambda view: None]),
            (cache.prefetch, [key(1), wrong]),
            (cache.ahead.began, "session", [wrong]),
            (cache.ahead.ended, "session", [wrong]),
        ]
        of_keys = (cache.warm, cache.warm_soon, cache.lookup_keys, cache.lookup_hot, cache.forget)
        for call, *arguments in [*calls, *((one, [wrong]) for one in (*of_keys, cache.ahead.pin, cache.ahead.unpin))]:
            with pytest.raises((ValueError, TypeError), match="key: expected 24 bytes"):
                outcome = call(*arguments)
                if asyncio.iscoroutine(outcome):
                    await outcome
        assert cache.cpu.statistics().resident == 0


async def test_keys_of_a_generator_are_all_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put_many([key(1), key(2)], [payload(1), payload(2)])
        await cache.flush()
        await cache.forget(key(number) for number in (1, 2))
        assert await cache.lookup_each([key(1), key(2)]) == [False, False]


async def test_call_from_another_loop_is_one_clear_error_and_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        assert await cache.put(key(1), payload(1))
        into = np.zeros(CHUNK_BYTES, np.uint8)

        async def get(number: int) -> None:
            async with cache.get(key(number)):
                pass

        async def call(function: Callable[..., object], *arguments: object) -> None:
            function(*arguments)

        at_once: list[tuple[Any, ...]] = [
            *((function, [key(3)]) for function in (cache.prefetch, cache.warm_soon)),
            *((function, [key(1)]) for function in (cache.lookup_hot, cache.ahead.pin, cache.ahead.unpin)),
            *((function, "session", [key(1)]) for function in (cache.ahead.began, cache.ahead.ended)),
            *((cache.ahead.over, "session"), (cache.computing_takes, 1.0), (cache.clear_hot,)),
        ]
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: cache.put(key(2), payload(2)),
            lambda: cache.put_many([key(2)], [payload(2)]),
            lambda: cache.store(range(64), [payload(2)]),
            lambda: get(1),
            lambda: get(2),
            lambda: cache.get_into([key(1)], [into]),
            lambda: cache.warm([key(1)]),
            lambda: cache.lookup_keys([key(1)]),
            lambda: cache.flush(),
            lambda: cache.forget([key(1)]),
            lambda: cache.close(),
            *(partial(call, *one) for one in at_once),
        ]
        for begin in calls:
            with pytest.raises(RuntimeError, match="belongs to the event loop that started it"):
                await asyncio.to_thread(lambda: asyncio.run(begin()))
        with pytest.raises(RuntimeError, match="belongs to the event loop that started it"):
            await asyncio.to_thread(cache.clear_hot)
        assert (await asyncio.to_thread(cache.statistics)).tiers["cpu"].resident == 1
        assert await cache.put(key(2), payload(2))
        assert await reads(cache, 1)
        await cache.flush()
        assert is_whole(cache)


async def test_repeated_keys_count_once() -> None:
    async with opened() as cache:
        repeated = [key(1)] * 3
        assert await cache.put_many(repeated, [payload(1)] * 3) == 1
        assert cache.ahead.pin(repeated) == cache.ahead.pinned == 1
        cache.ahead.unpin(repeated)
        assert cache.clear_hot(repeated) == 1
        assert is_whole(cache)


async def test_statistics_do_not_change_after_the_call(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        keys = cache.keys(range(2 * LAYOUT.chunk_tokens))
        await cache.put_many(keys, [payload(1)] * 2, prefix=True)
        await cache.flush()
        before = cache.statistics()
        found = before.to_dict()
        cache.clear_hot()
        assert (await cache.prefetch(keys)).promoted == 2
        async with cache.get(keys[0]), cache.get(key(1)):
            assert before.to_dict() == found
        after = cache.statistics()
        assert (after.reader.misses, after.reader.hits["cpu"]) == (1, 1)
        assert after.prefetch["hints"].promoted_bytes == 2 * CHUNK_BYTES


async def test_statistics_in_a_thread_while_the_loop_goes_on(tmp_path: Path) -> None:
    """The loop stores a tenant's first chunk, and reads another chunk, before every twentieth instruction of the thread."""
    quotas = {"tenant_max_local_cpu_size": 1 / 1024, "tenant_max_local_disk_size": 1 / 1024}
    async with opened(tmp_path, **quotas) as cache:
        loop, instructions, steps = asyncio.get_running_loop(), count(), count()
        reads: list[asyncio.Task[int]] = []

        async def step() -> None:
            keys = cache.keys(range(LAYOUT.chunk_tokens), salt=str(next(steps)))
            await cache.put(keys[0], b"the first chunk of a tenant")
            cache.clear_hot()
            reads.append(asyncio.create_task(cache.warm(keys)))

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            frame.f_trace_opcodes = True
            if event == "opcode" and not next(instructions) % 20:
                asyncio.run_coroutine_threadsafe(step(), loop).result()
            return trace

        def statistics() -> None:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                cache.statistics()
            finally:
                sys.settrace(before)

        await asyncio.to_thread(statistics)
        assert all(await asyncio.gather(*reads)) and next(steps) > 100


# Chunks that leave the hot cache alone

TWO = [key(1), key(2)]


async def test_chunks_leave_the_hot_cache_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        assert await cache.put_many(TWO, [payload(1), payload(2)]) == 2
        assert (await cache.flush()).complete
        async with cache.get(TWO[0]) as lease:
            assert lease is not None
            assert cache.clear_hot([TWO[0], key(3)]) == 1
            assert cache.lookup_hot(TWO) == 0 and cache.lookup_hot(TWO[1:]) == 1
            assert np.array_equal(lease.view, payload(1))
        assert await cache.lookup_each(TWO) == [True, True]
        assert is_whole(cache)


async def test_a_close_removes_what_a_cancelled_forget_has_left(tmp_path: Path) -> None:
    keys = [key(number) for number in range(1, 301)]
    async with opened(tmp_path) as cache:
        assert await cache.put_many(keys, [payload(number) for number in range(1, 301)], deadline_s=60.0) == 300
        assert (await cache.flush()).complete
        forgetting = asyncio.ensure_future(cache.forget(keys))
        await asyncio.sleep(0)
        forgetting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forgetting
    async with opened(tmp_path) as cache:
        assert not any(await cache.lookup_each(keys))


# A caller that drops the coroutine of a call in the middle

EIGHT = [key(number) for number in range(1, 9)]
DROPPED: dict[str, Callable[[TierCache], Coroutine[Any, Any, object]]] = {
    "put_many": lambda cache: cache.put_many([key(n) for n in range(100, 140)], [payload(1)] * 40),
    "get_into": lambda cache: cache.get_into(EIGHT, [np.empty(CHUNK_BYTES, np.uint8) for _ in EIGHT]),
    "warm": lambda cache: cache.warm(EIGHT),
    "lookup": lambda cache: cache.lookup_keys([*EIGHT, key(99)]),
}


async def goes_on(call: Coroutine[Any, Any, object], steps: int) -> None:
    """Run it until it waits for the `steps`-th time, or ends."""
    with suppress(StopIteration):
        waiting = call.send(None)
        for _ in range(steps - 1):
            if waiting is None:
                await asyncio.sleep(0)
            else:
                waiting._asyncio_future_blocking = False
                await asyncio.wait([waiting])
            waiting = call.send(None)


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_what_is_dropped_in_mid_way_gives_everything_back(tmp_path: Path, name: str, steps: int) -> None:
    async with opened(tmp_path) as cache:
        assert await cache.put_many(EIGHT, [payload(number) for number in range(1, 9)]) == 8
        assert (await cache.flush()).complete
        for half in EIGHT[4:]:
            cache.cpu.forget(half)  # the rest is read from the disk
        call = DROPPED[name](cache)
        await goes_on(call, steps)
        call.close()
        await until(lambda: is_whole(cache))
        assert await reads(cache, *range(1, 9))
