"""Values on the server: whole or absent, removed for good, never taken for a chunk when they are none; limits respected."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.remote.redis.servers import Server, running, until
from tests.remote.redis.tiers import make_tier, opened, value_name
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.redis import RedisTier

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 300_000
KEY, PAYLOAD = chunk(7, LENGTH)
NAME = value_name(KEY)


async def test_a_chunk_is_one_value_that_never_expires(tier: RedisTier, server: Server) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        assert client.keys() == [NAME]
        assert client.strlen(NAME) == 88 + LENGTH
        assert client.ttl(NAME) == -1


LONG = 5 << 20  # read in pieces


@pytest.mark.parametrize("length", [LONG, (4 << 20) - 88, (4 << 20) - 87, 6 << 20])
async def test_a_long_chunk_is_read_in_pieces(tier: RedisTier, length: int) -> None:
    key, payload = chunk(3, length)
    into = page_aligned(length)
    assert await tier.read(key, into) is None
    assert await tier.write(key, payload, length)
    assert await tier.read(key, into) == length
    assert np.array_equal(into[:length], payload[:length])
    assert await tier.read(chunk(2)[0], into) is None, "the next request is answered"


@pytest.mark.parametrize(
    ("length", "left_bytes"),
    [
        *((LENGTH, left_bytes) for left_bytes in (3, 88, 120, 88 + LENGTH - 1, 88 + LENGTH + 1, 88 + 3 * LENGTH)),
        *((LONG, left_bytes) for left_bytes in (3, 88, 2 << 20, (2 << 20) + 40, 88 + LONG - 1, 88 + LONG + 1)),
    ],
)
async def test_a_value_that_was_cut_or_is_too_long_is_a_corrupt_chunk_and_is_removed(
    tier: RedisTier, server: Server, length: int, left_bytes: int
) -> None:
    key, payload = chunk(3, length)
    memory = page_aligned(4 * length)
    assert await tier.write(key, payload, length)
    with server.client() as client:
        client.set(value_name(key), client.get(value_name(key)).ljust(left_bytes)[:left_bytes])
        with pytest.raises(CorruptChunk):
            await tier.read(key, memory[:length])
        assert not memory[length:].any()
        assert not client.exists(value_name(key))
    assert await tier.read(key, memory) is None, "the next request is answered"
    assert await tier.write(key, payload, length)
    assert await tier.read(key, memory) == length


@pytest.mark.parametrize("length", [LENGTH, LONG])
async def test_an_empty_value_is_a_miss_that_a_put_replaces(tier: RedisTier, server: Server, length: int) -> None:
    key, payload = chunk(3, length)
    with server.client() as client:
        client.set(value_name(key), b"")
    into = page_aligned(length)
    assert await tier.read(key, into) is None
    assert await tier.write(key, payload, length)
    assert await tier.read(key, into) == length


@pytest.mark.parametrize("value", [b"x", b"x" * 120, b"x" * 3_000_000, ["x"]], ids=lambda v: str(len(v)))
async def test_a_value_of_another_program_is_left_alone_by_reads_and_replaced_by_a_put(
    tier: RedisTier, server: Server, value: bytes | list[str]
) -> None:
    with server.client() as client:
        client.set(NAME, value) if isinstance(value, bytes) else client.rpush(NAME, *value)
        before = client.dump(NAME)
        into = page_aligned(LENGTH)
        with pytest.raises(NotOurs):
            await tier.read(KEY, into)
        assert tier.statistics().corrupt == 1
        assert client.dump(NAME) == before
    assert await tier.read(chunk(2)[0], into) is None, "the next request is answered"
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.read(KEY, into) == LENGTH and np.array_equal(into[:LENGTH], PAYLOAD[:LENGTH])


async def test_chunks_expire_after_ttl_s(server: Server) -> None:
    async with opened(server.url, ttl_s=3600) as tier:
        await tier.write(KEY, PAYLOAD, LENGTH)
        with server.client() as client:
            assert 3500 < client.ttl(NAME) <= 3600
            client.pexpire(NAME, 1)
            until(lambda: client.dbsize() == 0)
        assert await tier.read(KEY, page_aligned(LENGTH)) is None
        assert tier.statistics().corrupt == 0


async def test_a_server_that_is_full_and_evicts_nothing_is_a_full_tier(tier: RedisTier, server: Server) -> None:
    there, new = chunk(1, LENGTH), chunk(2, LENGTH)
    await tier.write(*there, LENGTH)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(TierFull):
                await tier.write(*new, LENGTH)
            assert await tier.read(there[0], page_aligned(LENGTH)) == LENGTH
        finally:
            client.config_set("maxmemory", 0)
        assert not client.exists(value_name(new[0]))
    assert await tier.write(*new, LENGTH)


async def test_connections_are_bounded(server: Server) -> None:
    tier = make_tier(server.url, concurrency=3)
    await tier.open()
    chunks = [chunk(number) for number in range(1, 41)]
    with server.client() as client:
        before = client.info("clients")["connected_clients"]
        await asyncio.gather(*(tier.write(*each, 5000) for each in chunks))
        await asyncio.gather(*(tier.read(key, page_aligned(65536)) for key, _ in chunks), tier.probe([chunk(99)[0]]))
        assert client.info("clients")["connected_clients"] - before <= 2 * 3 + 2
        await tier.close()
        until(lambda: client.info("clients")["connected_clients"] <= 1)


async def test_a_server_that_forbids_large_values_is_a_clean_failure(tmp_path: Path) -> None:
    with running(tmp_path, "--proto-max-bulk-len", "1mb") as server:
        async with opened(server.url, timeout_s=2.0) as tier:
            with pytest.raises(TierUnavailable):
                await tier.write(*chunk(1, 2 << 20), 2 << 20)
            assert await tier.write(*chunk(2), 5000)
