"""What was just stored or loaded is there for the next request: through the cache itself."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache

CHUNK_BYTES = 16384
LAYOUT = Layout("test-model", chunk_tokens=64, bytes_per_token=256)
PAYLOAD = np.zeros(CHUNK_BYTES, np.uint8)


@asynccontextmanager
async def opened(slots: int, directory: Path | None = None, **values: object) -> AsyncIterator[TierCache]:
    if directory is not None:
        values = {"local_disk": str(directory), "max_local_disk_size": 1.0, **values}
    overrides = {"max_local_cpu_size": slots * CHUNK_BYTES / 2**30, **values}
    async with TierCache.open(Config.load(environ={}, overrides=overrides), LAYOUT) as cache:
        assert cache.cpu.pool.count == slots
        yield cache


def key(number: int) -> bytes:
    return number.to_bytes(24, "big")


def numbered(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


async def got(cache: TierCache, keys: Sequence[bytes]) -> int:
    return await cache.get_into(keys, [np.empty(CHUNK_BYTES, np.uint8) for _ in keys])


async def put(cache: TierCache, keys: Sequence[bytes], how: str) -> None:
    if how == "one by one":
        for one in keys:
            assert await cache.put(one, PAYLOAD)
    else:
        stored = await cache.put_many(keys, [PAYLOAD] * len(keys), prefix=how == "as a prefix")
        assert stored == len(keys) or len(keys) > cache.cpu.pool.count


@pytest.mark.parametrize("how", ["as a prefix", "as a batch", "one by one"])
async def test_what_fills_four_fifths_of_a_full_arena_is_read_back_whole(how: str) -> None:
    async with opened(640) as cache:
        await put(cache, numbered(1_000_000, 640), "as a batch")
        for pair in range(5):
            keys = numbered(pair * 512, 512)
            await put(cache, keys, how)
            assert await got(cache, keys) == 512, f"pair {pair + 1}"


async def test_chats_and_now_and_then_a_long_document(tmp_path: Path) -> None:
    """Every store and every load is whole for the request after it; the hot cache is always full. What is still being
    written holds up to half of it: only a long document waits for that."""
    slots = 128
    chance = random.Random(7)
    async with opened(slots, tmp_path) as cache:
        chats: list[list[int]] = []
        fresh = iter(range(1, 1_000_000))
        for step in range(100):
            if step % 10 == 9:
                await cache.flush()
                keys = [key(next(fresh)) for _ in range(chance.randint(slots * 15 // 100, slots * 6 // 10))]
            else:
                if len(chats) < 12 or chance.random() < 0.3:
                    chats.append([0, *(next(fresh) for _ in range(chance.randint(2, 10)))])
                chat = chance.choice(chats[-12:])
                chat += [next(fresh) for _ in range(chance.randint(1, 4))]
                keys = [key(number) for number in chat[:90]]
            delivered = await got(cache, keys)
            assert cache.lookup_hot(keys[:delivered]) == delivered, f"just loaded, step {step}"
            assert await cache.put_many(keys, [PAYLOAD] * len(keys), prefix=True) == len(keys)
            assert cache.lookup_hot(keys) == len(keys), f"just stored, step {step}"


async def test_the_same_chunks_may_be_put_as_prefixes_in_different_orders() -> None:
    """Keys that are not chained allow it. Seen: puts raised KeyError."""
    chance = random.Random(1)
    async with opened(128) as cache:
        for _ in range(150):
            keys = [key(number) for number in chance.sample(range(240), chance.randrange(2, 50))]
            await put(cache, keys, "as a prefix")
            assert await got(cache, keys) == len(keys)


async def test_the_same_chunks_may_be_read_from_disk_in_different_orders(tmp_path: Path) -> None:
    """Seen: reads of chunks that lie there were misses, then puts of new chunks failed, too."""
    chance = random.Random(4)
    async with opened(128, tmp_path, disk_durability="none") as cache:
        for number in range(0, 240, 40):
            await put(cache, numbered(number, 40), "as a batch")
            await cache.flush()
        for _ in range(150):
            keys = [key(number) for number in chance.sample(range(240), chance.randrange(2, 50))]
            assert await got(cache, keys) == len(keys)
        for one in numbered(1000, 40):
            assert await cache.put(one, PAYLOAD)
