"""A cache with a shared memory tier: engines of a host read the same chunks where they lie."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, is_whole, key, only_below, opened, payload, reads
from tests.tiers.opened import until
from tests.tiers.others import Other, running
from tiercache import ConfigError, TierCache

CAP_GB = 8 / 1024

ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.test_cache import reads
from tests.test_cache_shared_memory import put, sharing

async def main(place):
    async with sharing(place) as cache:
        print("ready", flush=True)
        for line in sys.stdin:
            command, first, end = line.split()
            numbers = range(int(first), int(end))
            if command == "put":
                print(len(await put(cache, *numbers)), flush=True)
            elif command == "get":
                right = await reads(cache, *numbers)
                print(right, cache.statistics().reader.hits["shared_memory"], flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


@asynccontextmanager
async def sharing(place: Path, **values: Any) -> AsyncIterator[TierCache]:
    settings = {"shared_memory_path": str(place / "kv"), "max_shared_memory_size": CAP_GB, **values}
    async with opened(**settings) as cache:
        await cache.tiers[0].scanned()
        yield cache


async def put(cache: TierCache, *numbers: int) -> list[bytes]:
    for number in numbers:
        assert await cache.put(key(number), payload(number))
    assert (await cache.flush()).complete
    return [key(number) for number in numbers]


def engine(place: Path) -> AbstractAsyncContextManager[Other]:
    return running("-c", ENGINE, place)


async def test_two_engines_share_hits_and_outlive_each_other(in_memory: Path) -> None:
    async with sharing(in_memory) as cache:
        async with engine(in_memory) as other:
            assert await other.do("put", 1, 9) == "8"
            hit = await cache.lookup_keys([key(number) for number in range(1, 10)])
            assert (hit.chunks, hit.by_tier) == (8, {"cpu": 0, "shared_memory": 8})
            for _ in range(2):
                assert await reads(cache, *range(1, 9))
                assert cache.cpu.pool.free == cache.cpu.pool.count, "nothing was copied into the hot cache"
            await put(cache, 21, 22)
            assert await other.do("get", 21, 23) == "True 2"
            await other.kill()
        await put(cache, 23)
        assert await reads(cache, *range(1, 9))
        async with engine(in_memory) as restarted:
            assert await restarted.do("get", 1, 9) == "True 8"
            assert await restarted.do("get", 21, 24) == "True 11"


async def test_a_get_is_a_lease_on_the_shared_pages(in_memory: Path) -> None:
    async with sharing(in_memory) as writer, sharing(in_memory) as reader:
        await put(writer, 1)
        addresses = []
        for _ in range(2):
            async with reader.get(key(1)) as lease:
                assert lease is not None and np.array_equal(lease.view, payload(1)) and not lease.view.flags.writeable
                addresses.append(lease.view.ctypes.data)
        assert addresses[0] == addresses[1]
        assert reader.cpu.pool.free == reader.cpu.pool.count
        assert reader.statistics().reader.hits == {"cpu": 0, "shared_memory": 2}
        assert reader.statistics().tiers["shared_memory"].mapped_bytes == CHUNK_BYTES + 4096


async def test_a_process_maps_only_what_it_asks_for(in_memory: Path) -> None:
    """Else it would keep the memory of all that others store and evict."""
    async with sharing(in_memory) as writer, sharing(in_memory) as reader:
        keys = await put(writer, 1, 2, 3)
        (tier,) = reader.tiers
        await until(lambda: all(tier.contains(key) for key in keys))
        await reader.warm(keys[:1])
        assert reader.statistics().tiers["shared_memory"].mapped_bytes == CHUNK_BYTES + 4096


async def test_warm_maps_and_promotes_nothing(in_memory: Path) -> None:
    async with sharing(in_memory) as writer:
        keys = await put(writer, 1, 2, 3)
        async with sharing(in_memory) as reader:
            assert reader.lookup_hot(keys) == 0
            assert await reader.warm([*keys, key(4)]) == 3
            assert reader.lookup_hot([*keys, key(4)]) == 3
            assert reader.cpu.pool.free == reader.cpu.pool.count
            assert reader.statistics().reader.hits["cpu"] == 0


async def test_without_a_hot_cache_of_its_own_an_engine_has_the_shared_one(in_memory: Path) -> None:
    async with sharing(in_memory, local_cpu=False) as cache:
        keys = await put(cache, 1, 2)
        assert cache.cpu.pool.free == cache.cpu.pool.count
        progress = await cache.prefetch(keys)
        assert progress.promoted == 2 and cache.lookup_hot(keys) == 2
        async with cache.get(key(2)) as lease:
            assert lease is not None and np.array_equal(lease.view, payload(2))
        account = cache.statistics().prefetch["hints"]
        assert account.used_bytes == CHUNK_BYTES
    async with opened(local_cpu=False) as cache:
        with pytest.raises(ConfigError, match="no hot cache to promote into"):
            cache.prefetch(keys)


async def test_prefetch_and_pin_map_and_hold(in_memory: Path) -> None:
    async with sharing(in_memory) as writer, sharing(in_memory) as reader:
        keys = await put(writer, 1, 2)
        assert (await reader.prefetch(keys)).promoted == 2
        assert reader.cpu.pool.free == reader.cpu.pool.count
        assert reader.ahead.pin(keys) == 2
        await writer.forget(keys)  # elsewhere, so what is held here is found here
        assert reader.lookup_hot(keys) == 2
        await reader.forget(keys)
        assert reader.lookup_hot(keys) == 0 and reader.ahead.pinned == 0
        assert reader.statistics().tiers["shared_memory"].mapped_bytes == 0


async def test_forgotten_here_is_found_nowhere_at_once(in_memory: Path) -> None:
    async with sharing(in_memory) as cache:
        await put(cache, 1)
        cache.clear_hot()
        async with cache.get(key(1)) as lease:
            assert lease is not None
            forgetting = asyncio.ensure_future(cache.forget([key(1)]))
            await asyncio.sleep(0)  # it has begun
            async with cache.get(key(1), deadline_s=0.0) as other:
                assert other is None
            await forgetting
            assert np.array_equal(lease.view, payload(1))
            assert await cache.put(key(1), payload(2))
            await only_below(cache)
            async with cache.get(key(1)) as other:
                assert other is not None and np.array_equal(other.view, payload(2))
            assert np.array_equal(lease.view, payload(1))
        assert is_whole(cache)


@pytest.mark.parametrize("local_cpu", [True, False])
async def test_a_read_from_below_writes_nothing_that_others_see(in_memory: Path, tmp_path: Path, local_cpu: bool) -> None:
    """Another process may have forgotten the chunk meanwhile: it would come back, and keep new bytes out."""
    disk = {"local_disk": str(tmp_path / "disk"), "max_local_disk_size": 64 / 1024}
    async with opened(**disk) as before:
        await put(before, 1, 2)
    async with sharing(in_memory, local_cpu=local_cpu, **disk) as cache, sharing(in_memory) as other:
        hit = await cache.lookup_keys([key(1), key(2)])
        assert hit.by_tier == {"cpu": 0, "shared_memory": 0, "disk": 2}
        assert await reads(cache, 1, 2)
        assert (await cache.flush()).complete
        assert cache.statistics().tiers["shared_memory"].writes == 0
        assert (await other.lookup_keys([key(1)])).chunks == 0


async def test_where_a_device_is_in_use_chunks_go_through_slots(in_memory: Path) -> None:
    async with sharing(in_memory) as writer, sharing(in_memory, device="cpu") as reader:
        await put(writer, 1)
        async with reader.get(key(1)) as lease:
            assert lease is not None and np.array_equal(lease.view, payload(1))
        assert reader.cpu.contains(key(1))
        assert reader.statistics().tiers["shared_memory"].mapped_bytes == 0


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"shared_memory_path": "/dev/shm/kv"}, "shared_memory_path needs max_shared_memory_size"),
        ({"max_shared_memory_size": 1.0}, "max_shared_memory_size needs shared_memory_path"),
        (
            {"shared_memory_path": "/dev/shm/kv", "max_shared_memory_size": 1}
            | {"local_disk": "/dev/shm/kv/", "max_local_disk_size": 1},
            "disk: /dev/shm/kv belongs to the tier shared_memory already",
        ),
    ],
)
async def test_settings_that_do_not_do(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with opened(**values):
            pass
