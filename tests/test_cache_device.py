"""TierCache with chunks in device memory, on the CPU twin: what comes back is what was put, from wherever it comes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.twin import TwinDriver
from tests.test_cache import key
from tiercache import Config, Layout, TierCache
from tiercache.core.keys import ChunkKey, tenant_tag
from tiercache.device.paged import PagedChunk, PagedKv
from tiercache.errors import ConfigError, LayoutError
from tiercache.memory.slots import Purpose

BLOCK_TOKENS, CHUNK_TOKENS, LAYERS, HEADS, HEAD = 16, 64, 3, 2, 32
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD * 2
LAYOUT = Layout("test", chunk_tokens=CHUNK_TOKENS, bytes_per_token=BYTES_PER_TOKEN)
CHUNK_BYTES = LAYOUT.chunk_bytes


@pytest.fixture
def driver() -> Any:
    driver = TwinDriver(256 << 20)
    yield driver
    driver.close()


def tensor_on(driver: TwinDriver, shape: tuple[int, ...], seed: int | None = None, dtype: Any = torch.bfloat16) -> Any:
    length = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    memory = driver.empty(length)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        memory.copy_(torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator))
    return memory.view(dtype).reshape(shape)


def content(layers: list[Any], blocks: list[int]) -> Any:
    """(layers, K and V, blocks, ...) as the engine reads it."""
    return torch.stack([layer[:, torch.tensor(blocks)] for layer in layers])


def same(first: Any, second: Any) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


Opened = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path, driver: TwinDriver) -> Opened:
    @asynccontextmanager
    async def make(**values: Any) -> AsyncIterator[TierCache]:
        settings = {"max_local_cpu_size": 0.02, "gds_buffer_size": 4, "use_gds": False} | values
        async with TierCache.open(Config(**settings), LAYOUT, device=driver) as cache:
            yield cache

    return make


def chunks(driver: TwinDriver, numbers: range) -> list[Any]:
    return [tensor_on(driver, (CHUNK_BYTES // 2,), seed=number) for number in numbers]


async def gets(cache: TierCache, driver: TwinDriver, keys: list[ChunkKey], tensors: list[Any]) -> bool:
    """A get fills other tensors with the bytes of these."""
    places = [tensor_on(driver, tensor.shape) for tensor in tensors]
    return await cache.get_into(keys, places) == len(keys) and all(map(same, places, tensors))


async def test_tensors_come_back_from_the_hot_cache(opened: Opened, driver: TwinDriver) -> None:
    async with opened() as cache:
        tensors = chunks(driver, range(20))
        keys = [key(number) for number in range(20)]
        assert await cache.put_many(keys, tensors) == 20
        assert await gets(cache, driver, keys, tensors)
        # and they are ordinary hot chunks
        async with cache.get(keys[3]) as lease:
            assert lease is not None and lease.view.tobytes() == tensors[3].view(torch.uint8).numpy().tobytes()


async def test_a_tenants_tensors_stay_within_his_quota_and_cost_nobody_else(opened: Opened, driver: TwinDriver) -> None:
    async with opened(tenant_max_local_cpu_size=8 * CHUNK_BYTES / 2**30) as cache:
        tensors = chunks(driver, range(20))
        quiet, noisy = ([key(number) + tenant_tag(salt) for number in range(20)] for salt in ("quiet", "noisy"))
        assert await cache.put_many(quiet[:8], tensors[:8]) == 8
        for _ in range(3):
            assert await cache.put_many(noisy, tensors) == 20
        assert cache.statistics().tiers["cpu"].tenants[tenant_tag("noisy").hex()].chunks == 8
        assert cache.lookup_hot(quiet) == 8 and await gets(cache, driver, quiet[:8], tensors[:8])


async def test_put_reads_what_the_producer_has_enqueued_before(opened: Opened, driver: TwinDriver) -> None:
    async with opened() as cache:
        source, late = chunks(driver, range(2))
        expected = late.clone()
        stream, hold = driver.make_stream(), threading.Event()
        stream.enqueue(hold.wait)
        driver.copy(source, late, stream)
        after = driver.record(stream)
        put = asyncio.ensure_future(cache.put_many([key(1)], [source], after=after))
        await asyncio.sleep(0)
        assert not put.done()
        hold.set()
        assert await put == 1
        assert await gets(cache, driver, [key(1)], [expected])


@pytest.mark.parametrize("local_cpu", [True, False])
@pytest.mark.parametrize("tier", ["gds", "weka"])
async def test_chunks_come_back_after_a_restart(
    opened: Opened, driver: TwinDriver, tmp_path: Path, tier: str, local_cpu: bool, request: pytest.FixtureRequest
) -> None:
    if tier == "weka":
        request.getfixturevalue("weka_mount")
    keys = [key(number) for number in range(30)]
    tensors = chunks(driver, range(30))
    settings = {f"{tier}_path": (str(tmp_path / tier),), "local_cpu": local_cpu}
    async with opened(**settings) as cache:
        assert await cache.put_many(keys, tensors) == 30
        report = await cache.flush()
        assert report.complete
        assert cache.statistics().writers[tier].written == 30
        if not local_cpu:
            assert cache.statistics().tiers["cpu"].writes == 0, "nothing came near the hot cache"
    async with opened(**settings) as cache:
        assert await gets(cache, driver, keys, tensors)
        statistics = cache.statistics()
        assert statistics.reader.hits[tier] == statistics.reads[tier].seconds.count == 30
        assert statistics.tiers["cpu"].writes == 0, "a get from GDS needs no memory of the CPU tier"
        assert statistics.device.slots_free == statistics.device.slots


async def test_paged_chunks_come_back_into_other_blocks(opened: Opened, driver: TwinDriver, tmp_path: Path) -> None:
    shape = (2, 64, BLOCK_TOKENS, HEADS, HEAD)
    old_layers, new_layers = ([tensor_on(driver, shape, seed=layer) for layer in range(LAYERS)] for _ in range(2))
    kv, fresh = (PagedKv(driver, [plane for layer in layers for plane in layer]) for layers in (old_layers, new_layers))
    keys = [key(number) for number in range(8)]
    old = [[32 - number, number, 40 + number, 63 - number] for number in range(8)]
    expected = [content(old_layers, blocks) for blocks in old]
    settings = {"gds_path": (str(tmp_path / "gds"),), "local_disk": (str(tmp_path / "disk"),), "max_local_disk_size": 1}
    async with opened(**settings) as cache:
        assert await cache.put_many(keys, [PagedChunk(kv, blocks) for blocks in old]) == 8
        await cache.flush()
        new = [[4 * number + 3, 4 * number + 1, 4 * number, 4 * number + 2] for number in range(8)]
        for clear in (False, True):
            for layer in new_layers:
                layer.zero_()
            if clear:
                cache.clear_hot()
            assert await cache.get_into(keys, [PagedChunk(fresh, blocks) for blocks in new]) == 8
            for blocks, wanted in zip(new, expected, strict=True):
                assert same(content(new_layers, blocks), wanted)
        tail = PagedChunk(fresh, [60], chunk_blocks=4, skip=3)
        assert await cache.get_into([keys[2]], [tail]) == 1
        assert same(content(new_layers, [60]), expected[2][:, :, 3:])


async def test_a_missing_chunk_ends_the_prefix(opened: Opened, driver: TwinDriver, tmp_path: Path) -> None:
    async with opened(gds_path=(str(tmp_path / "gds"),)) as cache:
        tensors = chunks(driver, range(4))
        keys = [key(number) for number in range(4)]
        await cache.put_many([keys[0], keys[1], keys[3]], [tensors[0], tensors[1], tensors[3]])
        places = [tensor_on(driver, tensor.shape) for tensor in tensors]
        assert await cache.get_into(keys, places) == 2
        assert same(places[1], tensors[1])


async def test_chunk_that_neither_cascade_has_is_one_miss(opened: Opened, driver: TwinDriver, tmp_path: Path) -> None:
    async with opened(gds_path=(str(tmp_path / "gds"),)) as cache:
        (place,) = chunks(driver, range(1))
        assert await cache.get_into([key(1)], [place]) == 0
        assert cache.statistics().reader.misses == 1


async def test_head_of_a_prefix_that_is_larger_than_the_hot_cache_stays(opened: Opened, driver: TwinDriver) -> None:
    async with opened() as cache:
        slots = cache.cpu.pool.count
        keys = [key(number) for number in range(2 * slots)]
        assert await cache.put_many(keys, chunks(driver, range(1)) * len(keys), prefix=True) == len(keys)
        assert cache.lookup_hot(keys) > slots // 2


async def test_pool_larger_than_the_device_is_one_clear_error(opened: Opened) -> None:
    with pytest.raises(ConfigError, match=r"gds_buffer_size: 1024 MiB asked, \d+ of 256 MiB of twin are free"):
        async with opened(gds_path=("/tmp/never",), gds_buffer_size=1024):
            pass


async def test_pool_too_small_for_the_chunks_is_one_clear_error(tmp_path: Path, driver: TwinDriver) -> None:
    layout = Layout("test", chunk_tokens=256, bytes_per_token=65_536)
    config = Config(max_local_cpu_size=0.1, gds_path=(str(tmp_path),), gds_buffer_size=32)
    with pytest.raises(ConfigError, match="hold 1 chunks of 16.00 MiB; at least 4 are needed: set 65 or more"):
        async with TierCache.open(config, layout, device=driver):
            pass


async def test_strided_tensor_is_refused(opened: Opened, driver: TwinDriver) -> None:
    async with opened() as cache:
        strided = tensor_on(driver, (64, 64), seed=1).t()
        with pytest.raises(LayoutError, match="expected a contiguous tensor in device memory"):
            await cache.put(key(1), strided)


@pytest.fixture
def weka_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.assembly.file_system_of", lambda directory: "wekafs")


@pytest.mark.usefixtures("weka_mount")
async def test_gds_path_on_a_weka_mount_gets_the_weka_tier(opened: Opened, tmp_path: Path) -> None:
    async with opened(gds_path=(str(tmp_path),)) as cache:
        assert [tier.name for tier in cache.tiers] == ["weka"]


@pytest.mark.usefixtures("weka_mount")
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"gds_path": ("/mnt/gds",)}, "gds_path: .* is a Weka mount, and weka_path makes the Weka tier already"),
        ({"use_gds": True}, "weka_path: GPUDirect Storage does not work with .* Set use_gds: false"),
    ],
)
async def test_settings_that_weka_refuses(opened: Opened, tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        async with opened(weka_path=(str(tmp_path),), **values):
            pass


async def test_weka_path_on_another_file_system_is_an_error(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weka_path: .* lies on \w+, not on a Weka file system \(wekafs\): is it mounted"):
        async with opened(weka_path=(str(tmp_path),)):
            pass


async def test_close_waits_for_puts_that_are_under_way(opened: Opened, driver: TwinDriver, tmp_path: Path) -> None:
    (tensor,) = chunks(driver, range(1))
    hold = threading.Event()
    async with opened(local_disk=(str(tmp_path),), max_local_disk_size=1) as cache:
        stream = driver.make_stream()
        stream.enqueue(hold.wait)
        put = asyncio.ensure_future(cache.put_many([key(1)], [tensor], after=driver.record(stream)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, hold.set)
    assert await put == 1
    async with opened(local_disk=(str(tmp_path),), max_local_disk_size=1) as cache:
        assert await gets(cache, driver, [key(1)], [tensor]), "it was written before the first cache closed"


async def test_a_put_that_gets_no_slot_is_skipped(opened: Opened, driver: TwinDriver, tmp_path: Path) -> None:
    async with opened(gds_path=(str(tmp_path),), max_gds_size=0.1) as cache:
        pools, taken = (cache.cpu, cache.parts.on_device.staging), []
        for pool in pools:
            for purpose in (Purpose.READ, Purpose.WRITE):
                while (slot := pool.try_reserve(purpose)) is not None:
                    taken.append((pool, slot, purpose))
        (tensor,) = chunks(driver, range(1))
        assert not await cache.put(key(0), tensor, deadline_s=0.0)
        assert cache.statistics().puts_skipped == 1
        for pool, slot, purpose in taken:
            pool.abandon(slot, purpose)
        assert await cache.put(key(0), tensor)
        assert (await cache.flush()).written == {"gds": 1}
