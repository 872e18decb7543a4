"""What lies on the server: published whole, never mixed, other programs' values left alone, limits respected."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.remote.redis.servers import Server, running, until
from tests.remote.redis.tiers import FINGERPRINT, SEGMENT_BYTES, its_slot_is_moving, make_tier
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.redis import RedisTier, chunks
from tiercache.tiers.remote.redis.channel import Channel
from tiercache.tiers.remote.redis.layout import Segment, head_name

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 5 * SEGMENT_BYTES + 1000
KEY, PAYLOAD = chunk(7, LENGTH)
HEAD = head_name("tiercache", KEY)


def segments(client: object) -> list[bytes]:
    return sorted(client.keys("{*"))  # type: ignore[attr-defined]


async def test_a_chunk_of_one_segment_is_one_value(tier: RedisTier, server: Server) -> None:
    key, payload = chunk(1, SEGMENT_BYTES)
    await tier.write(key, payload, SEGMENT_BYTES)
    with server.client() as client:
        assert client.keys() == [b"tiercache:" + key.hex().encode()]
        assert client.strlen(head_name("tiercache", key)) == 88 + SEGMENT_BYTES
        assert client.ttl(head_name("tiercache", key)) == -1


async def test_a_longer_chunk_lies_in_segments_that_never_expire(tier: RedisTier, server: Server) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        assert client.strlen(HEAD) == 88 + 32
        names = segments(client)
        assert [client.strlen(name) for name in names] == [SEGMENT_BYTES] * 5 + [1000]
        assert {client.ttl(name) for name in [HEAD, *names]} == {-1}


async def test_removing_leaves_nothing(tier: RedisTier, server: Server) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.remove(KEY)
    with server.client() as client:
        assert client.dbsize() == 0


async def test_a_second_writer_finds_the_chunk_there_and_leaves_no_segments(tier: RedisTier, server: Server) -> None:
    other = make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=SEGMENT_BYTES // 2)
    await other.open()
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await other.write(KEY, PAYLOAD, LENGTH)
    into = page_aligned(LENGTH)
    assert await other.read(KEY, into) == LENGTH
    await other.close()
    with server.client() as client:
        assert len(segments(client)) == 6


async def test_an_evicted_segment_is_a_miss_and_the_rest_goes(tier: RedisTier, server: Server) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        client.delete(segments(client)[3])
        assert await tier.read(KEY, page_aligned(LENGTH)) is None
        assert client.dbsize() == 0
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH


@pytest.mark.parametrize("damage", ["truncated", "longer", "of another type", "much longer"])
async def test_a_damaged_segment_is_a_corrupt_chunk_and_is_removed(
    tier: RedisTier, server: Server, damage: str
) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        name = segments(client)[2]
        if damage == "of another type":
            client.delete(name)
            client.rpush(name, "x")
        else:
            client.set(name, b"x" * {"truncated": 100, "longer": SEGMENT_BYTES + 1, "much longer": 3 << 20}[damage])
        into = page_aligned(LENGTH + 8192)
        into[LENGTH:] = 7
        with pytest.raises(CorruptChunk):
            await tier.read(KEY, into)
        assert (into[LENGTH:] == 7).all(), "written past the payload"
        assert client.dbsize() == 0
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.read(KEY, into) == LENGTH


async def test_a_truncated_value_is_a_corrupt_chunk(tier: RedisTier, server: Server) -> None:
    key, payload = chunk(1, SEGMENT_BYTES)
    await tier.write(key, payload, SEGMENT_BYTES)
    with server.client() as client:
        client.set(head_name("tiercache", key), client.getrange(head_name("tiercache", key), 0, 1000))
    with pytest.raises(CorruptChunk):
        await tier.read(key, page_aligned(SEGMENT_BYTES))
    assert await tier.write(key, payload, SEGMENT_BYTES)
    assert await tier.read(key, page_aligned(SEGMENT_BYTES)) == SEGMENT_BYTES


@pytest.mark.parametrize("length", [SEGMENT_BYTES, LENGTH])
@pytest.mark.parametrize(
    "value", [b"x", b"x" * 120, b"x" * 100_000, b"x" * 3_000_000, ["x"]], ids=lambda v: str(len(v))
)
async def test_what_another_program_wrote_is_left_alone(
    tier: RedisTier, server: Server, value: bytes | list[str], length: int
) -> None:
    key, payload = chunk(1, length)
    name = head_name("tiercache", key)
    with server.client() as client:
        client.set(name, value) if isinstance(value, bytes) else client.rpush(name, *value)
        before = client.dump(name)
        into = page_aligned(length)
        with pytest.raises(NotOurs):
            await tier.read(key, into)
        assert not into.any() and tier.statistics().corrupt == 1
        assert await tier.write(key, payload, length) is False
        assert await tier.remove(key) is False
        assert client.dump(name) == before and client.dbsize() == 1
    assert await tier.read(chunk(2)[0], into) is None, "the next request is answered"


async def test_readers_see_one_writer_or_nothing(server: Server) -> None:
    """Two writers with payloads of their own, removals, and readers, all at once on one chunk of several segments."""
    tiers = [make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=4096, name=f"redis.{n}") for n in range(4)]
    for tier in tiers:
        await tier.open()
    payloads = [chunk(n, 40_000)[1] for n in (1, 2)]
    seen: set[int] = set()
    written: list[bool] = []
    done = False

    async def writer(tier: RedisTier, payload: np.ndarray) -> None:
        for _ in range(60):
            tier.known.clear()
            # It may decline: when the other's chunk was there each time that it came, and gone each time that it looked.
            written.append(await tier.write(KEY, payload, 40_000))
            await tier.remove(KEY)

    async def reader(tier: RedisTier) -> None:
        into = page_aligned(40_000)
        while not done:
            if await tier.read(KEY, into) is not None:
                (which,) = (n for n in range(2) if np.array_equal(into, payloads[n]))
                seen.add(which)

    readers = [asyncio.create_task(reader(tier)) for tier in tiers[2:]]
    await asyncio.gather(*(writer(tier, payload) for tier, payload in zip(tiers[:2], payloads, strict=True)))
    done = True
    await asyncio.gather(*readers)
    assert seen and any(written)
    assert not any(tier.statistics().corrupt for tier in tiers)
    for tier in tiers:
        await tier.close()
    with server.client() as client:
        assert all(client.ttl(name) > 0 for name in segments(client)), "segments of nobody stay for ever"


async def test_a_writer_that_dies_half_way_leaves_segments_that_expire(tier: RedisTier, server: Server) -> None:
    with server.client() as client:
        # No room for the head: the server allows the writer segments, and nothing after them.
        client.execute_command("ACL", "SETUSER", "torn", "on", ">p", "~{tiercache:*", "%R~tiercache:*", "+@all")
        torn = make_tier(f"redis://torn:p@127.0.0.1:{server.port}", segment_bytes=SEGMENT_BYTES)
        await torn.open()
        with pytest.raises(TierUnavailable, match="NOPERM"):
            await torn.write(KEY, PAYLOAD, LENGTH)
        await torn.close()
        names = segments(client)
        assert len(names) == 6 and all(0 < client.ttl(name) <= 60 + 6 * 5 for name in names)
    assert await tier.write(KEY, PAYLOAD, LENGTH), "another writer is not disturbed by them"


@pytest.mark.parametrize("segments_left", [True, False])
async def test_a_chunk_whose_writer_died_before_its_end_is_finished_by_the_next_one(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch, segments_left: bool
) -> None:
    """While its slot moves: until then it is to be found for a day."""
    keep = chunks.keep

    def die(channel: Channel, left: list[Segment], ttl_ms: int | None) -> None:
        if ttl_ms is None:
            raise TierUnavailable("killed between the last two steps")
        keep(channel, left, ttl_ms)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "publish", its_slot_is_moving)
        patch.setattr(chunks, "keep", die)
        with pytest.raises(TierUnavailable):
            await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client:
        assert client.exists(HEAD) and all(client.ttl(name) > 23 * 3600 for name in segments(client))
        if not segments_left:
            client.delete(*segments(client))
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        assert {client.ttl(name) for name in [HEAD, *segments(client)]} == {-1}
        assert len(segments(client)) == 6
    into = page_aligned(LENGTH)
    assert await tier.read(KEY, into) == LENGTH
    assert np.array_equal(into, PAYLOAD)


async def test_two_writers_that_finish_the_same_chunk_do_not_take_it_for_evicted(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = chunks.keep
    with server.client() as client:

        def late(channel: Channel, left: list[Segment], ttl_ms: int | None) -> None:
            for name in segments(client):
                client.persist(name)
            keep(channel, left, ttl_ms)

        monkeypatch.setattr(chunks, "publish", its_slot_is_moving)
        monkeypatch.setattr(chunks, "keep", late)
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        assert {client.ttl(name) for name in [HEAD, *segments(client)]} == {-1}


async def test_chunks_expire_when_told_to(server: Server) -> None:
    tier = make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=SEGMENT_BYTES, ttl_s=3600)
    await tier.open()
    small = chunk(1)
    await tier.write(KEY, PAYLOAD, LENGTH)
    await tier.write(*small, 5000)
    with server.client() as client:
        for name in (HEAD, head_name("tiercache", small[0])):
            assert 3590 < client.ttl(name) <= 3600
        assert all(3600 <= client.ttl(name) <= 3610 for name in segments(client)), "a head never outlives its segments"
        for name in client.keys("*"):
            client.pexpire(name, 1)
        until(lambda: client.dbsize() == 0)
    assert await tier.read(KEY, page_aligned(LENGTH)) is None
    assert tier.statistics().corrupt == 0
    await tier.close()


async def test_eviction_by_the_server_is_a_miss(server: Server) -> None:
    tier = make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=4096)
    await tier.open()
    chunks = [chunk(number, 40_000) for number in range(1, 161)]
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 5 << 20)
        try:
            for key, payload in chunks:
                # Redis knows ages in seconds: among keys of one second it may evict what is being written.
                with contextlib.suppress(TierFull):
                    await tier.write(key, payload, 40_000)
            into = page_aligned(40_000)
            hits = 0
            for key, payload in chunks:
                if await tier.read(key, into) is not None:
                    assert np.array_equal(into, payload)
                    hits += 1
            assert 0 < hits < len(chunks)
            assert tier.statistics().corrupt == 0
        finally:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
            await tier.close()


@pytest.mark.parametrize("length", [SEGMENT_BYTES, LENGTH])
async def test_a_server_that_is_full_and_evicts_nothing_is_a_full_tier(
    tier: RedisTier, server: Server, length: int
) -> None:
    there, new = chunk(1, length), chunk(2, length)
    await tier.write(*there, length)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(TierFull):
                await tier.write(*new, length)
            assert await tier.read(there[0], page_aligned(length)) == length
        finally:
            client.config_set("maxmemory", 0)
        assert not client.exists(head_name("tiercache", new[0]))
    assert await tier.write(*new, length)


async def test_existence_of_many_is_one_round_trip(tier: RedisTier, server: Server) -> None:
    chunks = [chunk(number, 100) for number in range(1, 301)]
    for key, payload in chunks[::2]:
        await tier.write(key, payload, 100)
    tier.known.clear()
    with server.client() as client:
        before = client.info("stats")["total_reads_processed"]
        assert await tier.probe([key for key, _ in chunks]) == 1
        # One more for the client that counts.
        assert client.info("stats")["total_reads_processed"] - before <= 3
    assert [tier.contains(key) for key, _ in chunks] == [True, False] * 150


async def test_tiers_of_another_layout_do_not_read_each_others_chunks(tier: RedisTier, server: Server) -> None:
    other = make_tier(f"redis://127.0.0.1:{server.port}")
    other.fingerprint = FINGERPRINT[::-1]
    await other.open()
    await tier.write(KEY, PAYLOAD, LENGTH)
    with pytest.raises(CorruptChunk):
        await other.read(KEY, page_aligned(LENGTH))
    await other.close()


async def test_connections_are_bounded(server: Server) -> None:
    tier = make_tier(f"redis://127.0.0.1:{server.port}", concurrency=3)
    await tier.open()
    chunks = [chunk(number) for number in range(1, 41)]
    with server.client() as client:
        before = client.info("clients")["connected_clients"]
        await asyncio.gather(*(tier.write(*each, 5000) for each in chunks))
        await asyncio.gather(*(tier.read(key, page_aligned(65536)) for key, _ in chunks), tier.probe([chunk(99)[0]]))
        assert tier.open_connections <= 2 * 3 + 2
        assert client.info("clients")["connected_clients"] - before <= 2 * 3 + 2
        await tier.close()
        until(lambda: client.info("clients")["connected_clients"] <= 1)


async def test_a_server_that_forbids_large_values_is_a_clean_failure(tmp_path: Path) -> None:
    with running(tmp_path, "--proto-max-bulk-len", "1mb") as server:
        tier = make_tier(f"redis://127.0.0.1:{server.port}", timeout_s=2.0)
        await tier.open()
        with pytest.raises(TierUnavailable):
            await tier.write(*chunk(1, 2 << 20), 2 << 20)
        assert await tier.write(*chunk(2), 5000)
        await tier.close()


async def test_a_value_of_ours_that_is_longer_than_the_slot_stays_out_of_what_lies_behind_it(
    tier: RedisTier, server: Server
) -> None:
    key, payload = chunk(1, SEGMENT_BYTES)
    await tier.write(key, payload, SEGMENT_BYTES)
    memory = page_aligned(4 * SEGMENT_BYTES)
    with server.client() as client:
        client.append(head_name("tiercache", key), b"\7" * 2 * SEGMENT_BYTES)
    with pytest.raises(CorruptChunk):
        await tier.read(key, memory[:SEGMENT_BYTES])
    assert not memory[SEGMENT_BYTES:].any()
    assert await tier.read(chunk(2)[0], memory) is None, "the next request is answered"
