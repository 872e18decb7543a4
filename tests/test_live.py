"""What can be changed in a running cache: limits, quotas, credentials, and tiers that are detached and attached."""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.scheduler.conftest import release
from tests.test_cache import CHUNK_BYTES, LAYOUT, configured, is_whole, key, only_below, opened, payload, until
from tests.test_tenants import chunks_on_disk, held, keys_of, on_disk, put
from tests.tiers.opened import refreshed
from tiercache import Config, Lease, TierCache
from tiercache.core.layout import Layout
from tiercache.errors import CacheClosed, ConfigError, TierUnavailable
from tiercache.integrations.settings import for_process

GB, MIB = 1 << 30, 1 << 20
LARGE = Layout("test-model", chunk_tokens=64, bytes_per_token=4096 * 4)
"""Chunks of 1 MiB."""
ARENA = 64 * MIB


def gb(size_bytes: int) -> float:
    return size_bytes / GB


def resident_bytes(cache: TierCache) -> int:
    """Of the arena, in this process: pages whose entry in pagemap has the bit "present"."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(cache.parts.arena.address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(ARENA // mmap.PAGESIZE * 8), np.uint64)
    assert len(entries) == ARENA // mmap.PAGESIZE
    return int(np.count_nonzero(entries >> np.uint64(63))) * mmap.PAGESIZE


async def fill(cache: TierCache, count: int, length: int = CHUNK_BYTES, first: int = 1) -> list[bytes]:
    keys = [key(number) for number in range(first, first + count)]
    assert await cache.put_many(keys, [payload(number, length) for number in range(first, first + count)]) == count
    return keys


async def pages_have_moved(cache: TierCache) -> None:
    """Pages are given up one call after the other."""
    await cache.cpu.slot_pool._pages.submit(int)


async def found(cache: TierCache, keys: list[bytes], length: int = CHUNK_BYTES) -> int:
    """Chunks that a get finds, each of which is right."""
    hits = 0
    for each in keys:
        async with cache.get(each, deadline_s=5.0) as lease:
            if lease is not None:
                assert np.array_equal(lease.view, payload(int.from_bytes(each, "big"), length))
                hits += 1
    return hits


@pytest.mark.parametrize("shared", [False, True])
async def test_a_smaller_hot_cache_gives_its_memory_back_and_grows_to_what_was_reserved(shared: bool) -> None:
    names = {"shm_name": f"live-{os.getpid()}"} if shared else {}
    async with opened(layout=LARGE, max_local_cpu_size=gb(ARENA), **names) as cache:
        keys = await fill(cache, 64, MIB)
        assert resident_bytes(cache) >= ARENA
        said = await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 4)})
        assert said == ["max_local_cpu_size: 0.0625 -> 0.015625"]
        await pages_have_moved(cache)
        assert resident_bytes(cache) <= ARENA // 4
        assert cache.statistics().slots == 16
        assert await found(cache, keys, MIB) == 16
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA)})
        assert resident_bytes(cache) >= ARENA, "no put causes a page fault"
        keys = await fill(cache, 64, MIB)
        assert await found(cache, keys, MIB) == 64
        assert is_whole(cache)


async def test_a_slot_in_use_is_left_until_its_lease_ends() -> None:
    async with opened(layout=LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        keys = await fill(cache, 64, MIB)
        leases = [lease for each in keys if (lease := cache.cpu.lease(each)) is not None]
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 8)})
        await pages_have_moved(cache)
        assert all(np.array_equal(lease.view, payload(int.from_bytes(lease.key, "big"), MIB)) for lease in leases)
        waiting = asyncio.create_task(cache.put(key(100), payload(100, MIB)))
        release(*leases[:50])
        assert cache.statistics().slots == 14 and not waiting.done(), "those that come free go first"
        release(*leases[50:])
        assert await waiting
        await pages_have_moved(cache)
        assert cache.statistics().slots == 8 and resident_bytes(cache) <= ARENA // 8
        assert is_whole(cache)


async def test_memory_that_a_device_has_registered_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(layout=LARGE, max_local_cpu_size=gb(ARENA), device="cpu") as cache:
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 4)})
        await pages_have_moved(cache)
        assert cache.statistics().slots == 16 and resident_bytes(cache) >= ARENA
    assert "the memory stays with this process" in caplog.text


async def test_growth_while_a_shrink_is_under_way_ends_with_the_new_size() -> None:
    async with opened(layout=LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        keys = await fill(cache, 64, MIB)
        leases = [lease for each in keys[:32] if (lease := cache.cpu.lease(each)) is not None]
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 4)})
        growing = asyncio.create_task(cache.reconfigure({"max_local_cpu_size": gb(ARENA // 2 + ARENA // 4)}))
        for lease in leases:
            await asyncio.sleep(0)
            lease.release()
        await growing
        assert cache.statistics().slots == 48
        keys = await fill(cache, 48, MIB)
        assert await found(cache, keys, MIB) == 48 and is_whole(cache)


WRONG = {
    "more than was reserved": ({"max_local_cpu_size": 1.0}, r"max_local_cpu_size: expected at most .* GB, .* found 1;"),
    "no chunk": ({"max_local_disk_size": 1e-6}, "max_local_disk_size: .* GB hold no chunk of 0.07 MiB"),
    "a small quota": ({"tenant_max_local_cpu_size": 1e-9}, "tenant_max_local_cpu_size: .* GB hold no chunk of 0.06 MiB"),
    "no number": ({"max_local_disk_size": "many"}, "max_local_disk_size: expected a number of GB"),
    "no such key": ({"max_disk": 1}, "max_disk: there is no such key; the nearest is"),
    "another place": ({"local_disk": "/elsewhere"}, "needs a restart, so nothing was changed: local_disk: .* -> /elsewhere"),
    "off": ({"max_local_disk_size": 0}, "needs a restart, so nothing was changed: max_local_disk_size: .* -> 0.0"),
}  # fmt: skip


async def test_prefetches_that_wait_for_room_go_on_when_the_hot_cache_grows(tmp_path: Path) -> None:
    async with opened(tmp_path, layout=LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        keys = await fill(cache, 10, MIB)
        await only_below(cache)
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 8)})
        handle = cache.prefetch(keys, ttl=600.0)
        async with asyncio.timeout(30):
            while handle.progress.promoted < 4:  # half of 8 slots
                await asyncio.sleep(0)
            await cache.reconfigure({"max_local_cpu_size": gb(ARENA)})
            assert (await handle).promoted == 10


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_value_changes_nothing_and_says_why(wrong: str, tmp_path: Path) -> None:
    values, why = WRONG[wrong]
    async with opened(tmp_path, tenant_max_local_cpu_size=gb(MIB)) as cache:
        before, slots = cache.config, cache.statistics().slots
        good = {"max_local_disk_size": 0.5} if "max_local_disk_size" not in values else {"queue_wait_s": 0.5}
        with pytest.raises(ConfigError, match=why):
            await cache.reconfigure({**good, **values})
        assert cache.config is before and cache.statistics().slots == slots
        assert cache.tiers[0].settings.cap_bytes == before.disk_bytes
        assert await cache.reconfigure({}) == []
    async with opened(layout=LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        with pytest.raises(ConfigError, match="0.001953 GB hold 2 chunks of 1.00 MiB; at least 4 are needed"):
            await cache.reconfigure({"max_local_cpu_size": 1e-9})


async def test_a_smaller_disk_is_evicted_to_its_cap_by_both_processes_that_use_it(tmp_path: Path) -> None:
    async with opened(tmp_path, max_local_cpu_size=gb(16 * MIB)) as cache, opened(tmp_path) as other:
        keys = await fill(cache, 100)
        assert (await cache.flush()).complete
        await refreshed(other.parts.tiers[0])  # type: ignore[arg-type]
        smaller = {"max_local_disk_size": chunks_on_disk(30)}
        await asyncio.gather(cache.reconfigure(smaller), other.reconfigure(smaller))
        await until(lambda: sum(1 for _ in chunks_of(tmp_path).glob("[0-9a-f][0-9a-f]/*")) <= 30)
        cache.clear_hot()
        assert 15 <= await found(cache, keys) <= 30, "neither evicts what the other has evicted already"
        await fill(other, 32)
        assert (await other.flush()).complete
        assert sum(1 for _ in chunks_of(tmp_path).glob("[0-9a-f][0-9a-f]/*")) <= 30
        await asyncio.gather(*(each.reconfigure({"max_local_disk_size": chunks_on_disk(300)}) for each in (cache, other)))
        keys = await fill(cache, 100, first=200)
        await only_below(cache)
        assert await found(cache, keys) == 100


async def test_quotas_that_are_lowered_and_raised(tmp_path: Path) -> None:
    quotas = {"tenant_max_local_cpu_size": gb(16 * CHUNK_BYTES), "tenant_max_local_disk_size": chunks_on_disk(16)}
    async with opened(tmp_path, **quotas) as cache:
        noisy, quiet = keys_of(cache, "noisy", 16), keys_of(cache, "quiet", 8)
        assert await put(cache, noisy) == 16 and await put(cache, quiet) == 8
        assert (await cache.flush()).complete
        await cache.reconfigure({name: size / 2 for name, size in quotas.items()})
        assert held(cache, "cpu", "noisy") == (8 * CHUNK_BYTES, 8) and held(cache, "cpu", "quiet")[1] == 8
        await until(lambda: on_disk(tmp_path, "noisy") <= 8)
        assert on_disk(tmp_path, "quiet") == 8
        await put(cache, keys_of(cache, "noisy", 16, session=1))
        assert held(cache, "cpu", "noisy")[1] == 8
        await cache.reconfigure(quotas)
        assert await put(cache, keys_of(cache, "noisy", 16, session=2)) == 16
        assert held(cache, "cpu", "noisy")[1] == 16 and held(cache, "cpu", "quiet")[1] == 8
        assert (await cache.flush()).complete and is_whole(cache)


async def test_leased_chunks_of_a_tenant_above_its_new_quota_go_when_their_leases_end() -> None:
    async with opened(tenant_max_local_cpu_size=gb(16 * CHUNK_BYTES)) as cache:
        keys = keys_of(cache, "noisy", 16)
        await put(cache, keys)
        leases = [lease for each in keys if isinstance(lease := cache.cpu.lease(each), Lease)]
        await cache.reconfigure({"tenant_max_local_cpu_size": gb(4 * CHUNK_BYTES)})
        assert held(cache, "cpu", "noisy")[1] == 16
        release(*leases)
        assert held(cache, "cpu", "noisy")[1] == 4 and is_whole(cache)


async def test_a_detached_tier_is_neither_read_nor_written_and_has_its_chunks_again_when_attached(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        keys = await fill(cache, 10)
        await cache.detach("disk")
        assert sum(1 for _ in chunks_of(tmp_path).glob("[0-9a-f][0-9a-f]/*")) == 10, "what was queued is written"
        cache.clear_hot()
        assert await found(cache, keys) == 0
        assert (await cache.lookup_keys(keys)).chunks == 0 and not any(await cache.lookup_each(keys))
        assert cache.statistics().breakers == {"disk": "detached"}
        assert cache.statistics().writers["disk"].breaker == "detached"
        await cache.detach("disk")
        new = [key(number) for number in range(20, 25)]
        await cache.put_many(new, [payload(number) for number in range(20, 25)])
        assert (await cache.flush()).complete
        written = cache.statistics().writers["disk"].written
        await cache.attach("disk")
        await cache.attach("disk")
        assert await found(cache, keys) == 10
        assert cache.statistics().breakers == {"disk": "closed"}
        assert cache.statistics().tiers["disk"].writes == written == 10, "counters go on"
        await cache.put_many(keys_new := [key(30)], [payload(30)])
        assert (await cache.flush()).written == {"disk": 1}
        cache.clear_hot()
        assert await found(cache, [*keys_new, *new]) == 1
        assert is_whole(cache)


async def test_a_read_that_has_begun_ends_before_its_tier_closes(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        keys = await fill(cache, 1)
        await only_below(cache)
        tier, begun, gate = cache.tiers[0], asyncio.Event(), asyncio.Event()
        read = tier.read

        async def waits(each: bytes, into: np.ndarray) -> int | None:
            begun.set()
            await gate.wait()
            return await read(each, into)

        tier.read = waits  # type: ignore[method-assign]
        reading = asyncio.create_task(found(cache, keys))
        await begun.wait()
        detaching = asyncio.create_task(cache.detach("disk"))
        await until(lambda: cache.statistics().breakers == {"disk": "detached"})
        await asyncio.wait([detaching], timeout=0.1)
        gate.set()
        assert await reading == 1
        await detaching


async def test_chunks_forgotten_while_a_tier_is_detached_leave_it_when_it_is_attached(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        keys = await fill(cache, 4)
        await cache.detach("disk")
        with pytest.raises(TierUnavailable, match="disk is detached"):
            await cache.forget(keys[:2])
        await cache.attach("disk")
        assert await found(cache, keys[:2]) == 0
        await until(lambda: sum(1 for _ in chunks_of(tmp_path).glob("[0-9a-f][0-9a-f]/*")) <= 2)
        cache.clear_hot()
        assert await found(cache, keys) == 2


async def test_a_detach_that_is_cancelled_while_it_waits_leaves_the_tier_attached(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        writer = cache.parts.fan_out.writers[0]
        stored = [asyncio.create_task(cache.put(key(number), payload(number))) for number in range(1, 9)]
        await asyncio.gather(*stored)
        assert writer.pending
        detaching = asyncio.create_task(cache.detach("disk"))
        await asyncio.sleep(0)
        detaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await detaching
        assert await cache.put(key(9), payload(9))
        await only_below(cache)
        assert await found(cache, [key(number) for number in range(1, 10)]) == 9


async def test_a_tier_with_a_full_queue_that_hangs_is_detached_in_time_and_no_put_waits_for_it(tmp_path: Path) -> None:
    queue = {"write_queue_bytes": 2 * CHUNK_BYTES, "on_queue_full": "wait", "queue_wait_s": 60.0}
    async with opened(tmp_path, **queue) as cache:
        tier, gate = cache.tiers[0], asyncio.Event()

        async def hangs(*arguments: object) -> bool:
            await gate.wait()
            return False

        tier.write = hangs  # type: ignore[method-assign]
        puts = [asyncio.create_task(cache.put(key(number), payload(number))) for number in range(1, 12)]
        await until(lambda: cache.parts.fan_out.writers[0].statistics().queued)
        async with asyncio.timeout(30):
            await cache.detach("disk", timeout_s=0.01)
            assert not cache.statistics().writers["disk"].queued
            assert all(await asyncio.gather(*puts))
        assert await cache.put(key(50), payload(50))
        gate.set()
        await cache.attach("disk")
        keys = await fill(cache, 4, first=60)
        await only_below(cache)
        assert await found(cache, keys) == 4 and is_whole(cache)


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 40])
async def test_changes_under_way_at_a_close_end_and_leave_no_tier_open(steps: int, tmp_path: Path) -> None:
    async with opened(tmp_path, LARGE, max_local_cpu_size=gb(ARENA), close_timeout_s=5.0) as cache:
        await fill(cache, 8, MIB)
        await cache.detach("disk")
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA // 4)})
        changes = (cache.attach("disk"), cache.reconfigure({"max_local_cpu_size": gb(ARENA)}), cache.detach("disk"))
        works = [asyncio.create_task(change) for change in changes]
        for _ in range(steps):
            await asyncio.sleep(0)
    assert all(work.done() for work in works), "a change used parts that were closed"
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(outcome, (CacheClosed, list, type(None))) for outcome in outcomes)
    assert not cache.tiers[0].directories.is_open


async def test_changes_that_are_cancelled_at_any_step_leave_a_cache_that_works(tmp_path: Path) -> None:
    async with opened(tmp_path, LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        for steps in range(36):
            size_gb = gb((8 + 2 * (steps % 5)) * MIB)
            changes = (
                lambda: cache.detach("disk", timeout_s=0.0),
                lambda: cache.attach("disk"),
                lambda size_gb=size_gb: cache.reconfigure({"max_local_cpu_size": size_gb}),
            )
            before = cache.config
            change = asyncio.create_task(changes[steps % 3]())
            put = asyncio.create_task(cache.put(key(steps + 1), payload(steps + 1, MIB)))
            for _ in range(steps):
                await asyncio.sleep(0)
            change.cancel()
            await asyncio.wait([change])
            await put
            if cache.config is not before:
                assert cache.config.max_local_cpu_size == size_gb, "everything has changed, or nothing"
        await cache.attach("disk")
        await cache.reconfigure({"max_local_cpu_size": gb(ARENA)})
        assert cache.statistics().slots == 64
        keys = await fill(cache, 10, MIB, first=500)
        await only_below(cache)
        assert await found(cache, keys, MIB) == 10 and is_whole(cache)


async def test_changes_at_once_follow_one_another(tmp_path: Path) -> None:
    async with opened(tmp_path, LARGE, max_local_cpu_size=gb(ARENA)) as cache:
        sizes = [gb(slots * MIB) for slots in (8, 64, 4, 32)]
        values = [{"max_local_cpu_size": size} for size in sizes] + [{"max_local_disk_size": 0.05}, {"queue_wait_s": 0.5}]
        await asyncio.gather(*map(cache.reconfigure, values))
        assert cache.statistics().slots == 32 and cache.config.max_local_cpu_size == sizes[-1]
        assert (cache.config.max_local_disk_size, cache.config.queue_wait_s) == (0.05, 0.5)


async def test_shared_memory_is_resized_detached_and_attached(in_memory: Path) -> None:
    values = {"shared_memory_path": str(in_memory), "max_shared_memory_size": chunks_on_disk(40)}
    async with opened(**values) as cache:
        keys = await fill(cache, 30)
        await only_below(cache)
        assert await found(cache, keys) == 30
        async with cache.get(keys[-1]) as lease:
            assert lease is not None
            await cache.detach("shared_memory")
            assert cache.lookup_hot(keys) == 0 and await found(cache, keys) == 0
            assert np.array_equal(lease.view, payload(30)), "a lease lasts"
            await cache.attach("shared_memory")
        assert await found(cache, keys) == 30 and cache.lookup_hot(keys) == 30
        assert cache.ahead.pin(keys[:1], ttl_s=60) == 1
        await cache.forget(keys[:1])
        assert cache.lookup_hot(keys) == 0 and not cache.ahead.pinned
        await cache.reconfigure({"max_shared_memory_size": chunks_on_disk(10)})
        await until(lambda: sum(1 for _ in chunks_of(in_memory).glob("[0-9a-f][0-9a-f]/*")) <= 10)
        with pytest.raises(ConfigError, match="max_shared_memory_size: .* less than the"):
            await cache.reconfigure({"max_shared_memory_size": 1e9})


async def test_a_tier_that_cannot_be_opened_stays_detached(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    async with opened(directory) as cache:
        keys = await fill(cache, 2)
        await cache.detach("disk")
        (chunks_of(directory) / "tiercache.json").rename(tmp_path / "aside")
        (chunks_of(directory) / "tiercache.json").write_text('{"format": 99}')
        with pytest.raises(ConfigError):
            await cache.attach("disk")
        cache.clear_hot()
        assert await found(cache, keys) == 0
        (tmp_path / "aside").rename(chunks_of(directory) / "tiercache.json")
        await cache.attach("disk")
        assert await found(cache, keys) == 2
        with pytest.raises(ConfigError, match="cpu: there is no such tier below the hot cache; expected one of: disk"):
            await cache.detach("cpu")


async def test_a_change_does_not_wait_for_another_one_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiercache.yaml"
    file.write_text("max_local_cpu_size: 0.002\n")
    async with TierCache.open(type(configured()).load(file, environ={}), LAYOUT) as cache:
        file.unlink()
        os.mkfifo(file)  # reading it waits for a writer
        monkeypatch.setattr("tiercache.cache.FILE_SYSTEMS_S", 0.1)
        reloading = asyncio.create_task(cache.reload())
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="nothing was changed: another change has not ended"):
            await cache.reconfigure({"queue_wait_s": 0.5})
        with file.open("w"), pytest.raises(ConfigError, match="the file could not be read"):
            await reloading
        assert await cache.reconfigure({"queue_wait_s": 0.5}) == ["queue_wait_s: 1.0 -> 0.5"]


async def test_the_file_is_read_again_and_only_what_can_change_does(tmp_path: Path) -> None:
    file, disk = tmp_path / "tiercache.yaml", tmp_path / "disk"

    def write(**values: object) -> None:
        values = {"max_local_cpu_size": 2 / 1024, "local_disk": str(disk), "max_local_disk_size": 0.25, **values}
        file.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))

    write()
    config = type(configured()).load(file, environ={}, overrides={"queue_wait_s": 0.25})
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.reload() == []
        write(max_local_disk_size=0.125, queue_wait_s=5)
        assert await cache.reload() == ["max_local_disk_size: 0.25 -> 0.125"], "overrides still win"
        await cache.reconfigure({"max_local_disk_size": 0.1})
        assert await cache.reload() == ["max_local_disk_size: 0.1 -> 0.125"]
        write(max_local_disk_size=0.5, disk_io_threads=2)
        with pytest.raises(ConfigError, match="needs a restart, so nothing was changed: disk_io_threads: 4 -> 2"):
            await cache.reload()
        write(max_local_disk_size=-1)
        with pytest.raises(ConfigError, match="max_local_disk_size"):
            await cache.reload()
        file.unlink()
        with pytest.raises(ConfigError, match="there is no such file"):
            await cache.reload()
        assert cache.config.max_local_disk_size == 0.125
    async with opened() as cache:
        with pytest.raises(ConfigError, match="reload: the configuration of this cache came from no file"):
            await cache.reload()


async def test_the_file_is_read_again_by_each_rank_of_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "tiercache.yaml"
    content = f"max_local_cpu_size: {2 / 1024}\nlocal_disk: {tmp_path / 'disk'}\ncontrol_socket: {tmp_path / 'c.sock'}\n"
    file.write_text(f"{content}max_local_disk_size: 0.25")
    config = for_process(Config.load(file, environ={}), (1, 2))
    async with TierCache.open(config, LAYOUT) as cache:
        assert await cache.reload() == [], "the rank's own path is no change"
        await cache.reconfigure({"queue_wait_s": 0.5})
        file.write_text(f"{content}max_local_disk_size: 0.125")
        assert await cache.reload() == ["max_local_disk_size: 0.25 -> 0.125", "queue_wait_s: 0.5 -> 1.0"]
        assert cache.config.control_socket == f"{tmp_path / 'c.sock'}.1"
        file.write_text(f"{content}max_local_disk_size: 0.25\nchunk_size: 512")
        with pytest.raises(ConfigError, match="needs a restart, so nothing was changed: chunk_size: 256 -> 512"):
            await cache.reload()
        file.write_text(f"{content}max_local_disk_size: 0.25")
        assert await cache.reload() == ["max_local_disk_size: 0.125 -> 0.25"]
