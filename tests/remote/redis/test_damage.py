"""Values that were damaged, where they lie or on their way: one costs its own key and nothing else, and heals."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.remote.redis.servers import Server
from tests.remote.redis.tiers import SEGMENT_BYTES, make_tier, opened
from tests.remote.wire import relay_to
from tiercache import Config, Layout, TierCache
from tiercache.core.header import PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.redis import RedisTier
from tiercache.tiers.remote.redis.layout import head_name

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 5 * SEGMENT_BYTES + 1000
KEY, PAYLOAD = chunk(7, LENGTH)
HEAD = head_name("tiercache", KEY)


@pytest.fixture
async def tier(server: Server) -> AsyncIterator[RedisTier]:
    async with opened(f"redis://127.0.0.1:{server.port}", chunk_bytes=LENGTH) as tier:
        yield tier


def flip(client: object, name: bytes, byte: int, bit: int) -> None:
    value = bytearray(client.getrange(name, byte, byte))  # type: ignore[attr-defined]
    value[0] ^= 1 << bit
    client.setrange(name, byte, bytes(value))  # type: ignore[attr-defined]


async def is_whole(tier: RedisTier) -> bool:
    into = page_aligned(LENGTH)
    return await tier.read(KEY, into) == LENGTH and np.array_equal(into, PAYLOAD)


@pytest.mark.parametrize(("length", "times"), [(SEGMENT_BYTES, 1), (SEGMENT_BYTES, 2), (LENGTH, 1)])
async def test_a_bit_that_flips_on_the_wire_costs_the_server_nothing(server: Server, length: int, times: int) -> None:
    """The second of two is taken for what it looks like: a value that is damaged where it lies."""
    key, payload = chunk(1, length)
    with relay_to(server.port) as relay, server.client() as client:
        tier = make_tier(f"redis://127.0.0.1:{relay.port}", segment_bytes=SEGMENT_BYTES)
        await tier.open()
        assert await tier.write(key, payload, length)
        there = client.dbsize()
        relay.flip_next(times)
        into = page_aligned(length)
        if times == 1:
            assert await tier.read(key, into) == length and np.array_equal(into, payload)
        else:
            with pytest.raises(CorruptChunk):
                await tier.read(key, into)
        assert relay.flips == times
        assert client.dbsize() == (there if times == 1 else 0)
        assert (tier.statistics().read_again, tier.statistics().corrupt) == (1, times - 1)
        await tier.close()


@pytest.mark.parametrize("bit", range(18))
@pytest.mark.parametrize("field", ["count", "segment_bytes"])
async def test_a_bit_of_the_manifest_costs_its_key_and_a_few_requests(
    tier: RedisTier, server: Server, field: str, bit: int
) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        flip(client, HEAD, PACKED_BYTES + (0 if field == "count" else 8) + bit // 8, bit % 8)
        before = client.info("stats")["total_commands_processed"]
        with pytest.raises(CorruptChunk):
            await tier.read(KEY, page_aligned(LENGTH))
        asked = client.info("stats")["total_commands_processed"] - before
        assert asked < 200, "as many as a chunk may have segments, and not what a damaged head says"
        assert not client.exists(HEAD)
    assert await tier.write(KEY, PAYLOAD, LENGTH) and await is_whole(tier)


async def test_a_manifest_with_a_damaged_count_takes_its_segments_with_it(tier: RedisTier, server: Server) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        flip(client, HEAD, PACKED_BYTES + 1, 7)
        with pytest.raises(CorruptChunk):
            await tier.read(KEY, page_aligned(LENGTH))
        assert client.dbsize() == 0


async def test_damaged_heads_do_not_open_the_breaker(server: Server) -> None:
    """In the cache: four heads with one flipped bit, and all good chunks beside them are hits."""
    layout = Layout("m", chunk_tokens=64, bytes_per_token=4096)
    values = {
        "chunk_size": 64,
        "max_local_cpu_size": 0.02,
        "remote_storage_plugins": ["redis"],
        "remote_storage_plugin.redis.url": f"redis://127.0.0.1:{server.port}",
        "remote_storage_plugin.redis.segment_bytes": 8192,
        "remote_storage_plugin.redis.timeout_s": 1.0,
    }
    config = Config.load(environ={}, overrides=values)
    chunks = [chunk(number, layout.chunk_bytes) for number in range(1, 15)]
    async with TierCache.open(config, layout) as cache:
        assert await cache.put_many([key for key, _ in chunks], [payload for _, payload in chunks])
        assert (await cache.flush()).complete
    with server.client() as client:
        for key, _ in chunks[:4]:
            (name,) = client.keys(f"*:{key.hex()}")
            if client.strlen(name) == PACKED_BYTES + 32:
                value = client.getrange(name, PACKED_BYTES, PACKED_BYTES + 7)
                damaged = struct.unpack("<Q", value)[0] ^ 1 << 15
                client.setrange(name, PACKED_BYTES, struct.pack("<Q", damaged))
            else:
                pytest.fail("the chunk has no manifest")
    async with TierCache.open(config, layout) as cache:
        hits = []
        for key, _ in chunks:
            async with cache.get(key) as lease:
                hits.append(lease is not None)
        assert hits == [False] * 4 + [True] * 10
        assert all(str(state) == "closed" for state in cache.statistics().breakers.values())


@pytest.mark.parametrize("length", [SEGMENT_BYTES, LENGTH], ids=["one value", "segments"])
@pytest.mark.parametrize("left_bytes", [0, 3, 40, PACKED_BYTES, 110])
async def test_what_is_left_of_a_torn_value_is_replaced_by_a_put(
    tier: RedisTier, server: Server, length: int, left_bytes: int
) -> None:
    key, payload = chunk(1, length)
    name = head_name("tiercache", key)
    other = make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=SEGMENT_BYTES)
    await other.open()
    with server.client() as client:
        await tier.write(key, payload, length)
        torn = client.getrange(name, 0, left_bytes - 1) if left_bytes else b""
        client.set(name, torn)
        assert await other.write(key, payload, length), "by one who has not read it"
        into = page_aligned(length)
        assert await other.read(key, into) == length and np.array_equal(into, payload)
        client.set(name, torn)
        with pytest.raises(CorruptChunk):
            await other.read(key, into)
        await other.probe([key])
        assert await other.write(key, payload, length), "by one who has"
        assert await other.read(key, into) == length and np.array_equal(into, payload)
    await other.close()


async def test_a_value_that_was_refused_is_not_found_again_by_a_look_up(tier: RedisTier, server: Server) -> None:
    """Else each request would read it once more, and a put would take it for the chunk."""
    key, payload = chunk(1, SEGMENT_BYTES)
    with server.client() as client:
        client.set(head_name("tiercache", key), b"somebody else's")
        assert await tier.probe([key]) == 1
        with pytest.raises(CorruptChunk):
            await tier.read(key, page_aligned(SEGMENT_BYTES))
        assert await tier.probe([key]) == 0
        client.delete(head_name("tiercache", key))
    assert await tier.write(key, payload, SEGMENT_BYTES)
    assert await tier.probe([key]) == 1
