"""Writers and removers that meet, answers that are lost: what never expires has a head, and what a head names stays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from tests.remote.redis.servers import Server, until
from tests.remote.redis.tiers import SEGMENT_BYTES, its_slot_is_moving, make_tier, opened
from tiercache.errors import TierFull, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.redis import RedisTier, chunks
from tiercache.tiers.remote.redis.channel import Channel
from tiercache.tiers.remote.redis.failures import BrokenConnection
from tiercache.tiers.remote.redis.layout import Segment, head_name

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 5 * SEGMENT_BYTES + 1000
KEY, PAYLOAD = chunk(7, LENGTH)
HEAD = head_name("tiercache", KEY)
TAKES_AWAY = (b"EVAL", b"GETDEL", b"UNLINK", b"DEL")


@pytest.fixture
async def other(server: Server) -> AsyncIterator[RedisTier]:
    async with opened(f"redis://127.0.0.1:{server.port}", name="redis.other") as other:
        yield other


def nobodys(client: object) -> list[bytes]:
    """Segments that stay for ever and that no head names."""
    head = client.get(HEAD) or b""  # type: ignore[attr-defined]
    write_id = head[-16:].hex().encode()
    kept = [name for name in client.keys("{*") if client.ttl(name) == -1]  # type: ignore[attr-defined]
    return sorted(name for name in kept if name.split(b":")[-2] != write_id)


def calls(client: object, name: str) -> int:
    return client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"]  # type: ignore[attr-defined, no-any-return]


def names_in(request: bytes) -> tuple[bytes, bool]:
    """The command, and whether it names the head."""
    words = request.split(b"\r\n")
    return words[2].upper(), HEAD in words


def once_before(monkeypatch: pytest.MonkeyPatch, commands: tuple[bytes, ...], happens: Callable[[], object]) -> None:
    """`happens` before the next request that is one of `commands` about the head, and has ended when it is sent."""
    request = Channel.request
    begun = threading.Event()

    def requested(self: Channel, *parts: bytes, **named: int) -> None:
        command, about_head = names_in(bytes(parts[0]))
        if about_head and command in commands and not begun.is_set():
            begun.set()
            happens()
        request(self, *parts, **named)

    monkeypatch.setattr(Channel, "request", requested)


async def is_whole(tier: RedisTier) -> bool:
    into = page_aligned(LENGTH)
    return await tier.read(KEY, into) == LENGTH and np.array_equal(into, PAYLOAD)


async def test_a_head_that_comes_while_it_is_looked_at_is_not_removed_as_what_is_left_of_one(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    with server.client() as client, monkeypatch.context() as patch:
        client.rename(HEAD, b"not yet")
        looked = calls(client, "getrange")

        def publish() -> None:
            until(lambda: calls(client, "getrange") > looked)
            client.rename(b"not yet", HEAD)

        once_before(patch, (b"STRLEN",), publish)
        await tier.remove(KEY)
        assert nobodys(client) == []
    assert await is_whole(tier)


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES, 2 * LENGTH], ids=["in segments", "one value"])
async def test_what_another_stores_while_the_chunk_is_removed_stays(
    tier: RedisTier, other: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    remover = make_tier(f"redis://127.0.0.1:{server.port}", segment_bytes=segment_bytes, name="redis.remover")
    await remover.open()
    await remover.write(KEY, PAYLOAD, LENGTH)

    def store_anew() -> None:
        assert other._chunks.remove(KEY)
        assert other._chunks.put(KEY, PAYLOAD[:LENGTH])

    with server.client() as client, monkeypatch.context() as patch:
        once_before(patch, TAKES_AWAY, store_anew)
        await remover.remove(KEY)
        assert nobodys(client) == []
    assert await is_whole(tier)
    await remover.close()


async def test_a_writer_whose_segment_was_evicted_leaves_what_another_has_stored_since(
    tier: RedisTier, other: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = chunks.keep
    with server.client() as client, monkeypatch.context() as patch:

        def evicted(channel: Channel, left: list[Segment], ttl_ms: int | None) -> None:
            if ttl_ms is None:
                patch.setattr(chunks, "keep", keep)
                client.delete(left[2].name)
            keep(channel, left, ttl_ms)

        def store_anew() -> None:
            assert other._chunks.remove(KEY)
            assert other._chunks.put(KEY, PAYLOAD[:LENGTH])

        patch.setattr(chunks, "publish", its_slot_is_moving)
        patch.setattr(chunks, "keep", evicted)
        once_before(patch, TAKES_AWAY, store_anew)
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        assert nobodys(client) == []
        assert len(client.keys("{*")) == 6
    assert await is_whole(tier)


async def test_a_removal_whose_answer_is_lost_leaves_no_segments(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tier.write(KEY, PAYLOAD, LENGTH)
    request = Channel.request
    lost = threading.Event()
    with server.client() as client, monkeypatch.context() as patch:

        def requested(self: Channel, *parts: bytes, **named: int) -> None:
            request(self, *parts, **named)
            command, about_head = names_in(bytes(parts[0]))
            if about_head and command in TAKES_AWAY and not lost.is_set():
                lost.set()
                until(lambda: not client.exists(HEAD))
                raise BrokenConnection("the answer is lost")

        patch.setattr(Channel, "request", requested)
        await tier.remove(KEY)
        assert lost.is_set()
        assert client.dbsize() == 0


async def test_a_removal_that_ends_after_its_head_leaves_no_segments(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is killed: nothing more is sent once the head is gone."""
    await tier.write(KEY, PAYLOAD, LENGTH)
    request = Channel.request
    with server.client() as client, monkeypatch.context() as patch:

        def requested(self: Channel, *parts: bytes, **named: int) -> None:
            if not client.exists(HEAD):
                raise TierUnavailable("killed")
            request(self, *parts, **named)

        patch.setattr(Channel, "request", requested)
        with contextlib.suppress(TierUnavailable):
            await tier.remove(KEY)
        assert nobodys(client) == []


@pytest.mark.parametrize("ttl_s", [None, 3600])
async def test_a_chunk_that_can_be_seen_stays_even_if_its_writer_ends_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, ttl_s: int | None
) -> None:
    """As a server that freezes, or a process that is killed: nothing more is sent once the head is there.

    Who sees the head takes the chunk for stored, and nobody comes back to its segments.
    """
    request = Channel.request
    async with opened(f"redis://127.0.0.1:{server.port}", ttl_s=ttl_s) as writer:
        with server.client() as client, monkeypatch.context() as patch:

            def requested(self: Channel, *parts: bytes, **named: int) -> None:
                if client.exists(HEAD):
                    raise TierUnavailable("killed")
                request(self, *parts, **named)

            patch.setattr(Channel, "request", requested)
            with contextlib.suppress(TierUnavailable):
                await writer.write(KEY, PAYLOAD, LENGTH)
            assert client.exists(HEAD)
            assert len(client.keys("{*")) == 6
            remaining_ms = [client.pttl(name) for name in client.keys("{*")]
            assert all(left_ms == -1 if ttl_s is None else left_ms > 3600_000 for left_ms in remaining_ms), remaining_ms
        assert await writer.write(KEY, PAYLOAD, LENGTH) and await is_whole(writer)


@pytest.mark.parametrize("others", ["nobody", "another stores it anew"])
async def test_publishing_whose_answer_is_lost_is_found_to_have_been_ours(
    tier: RedisTier, other: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """The second time the head is there already; whose it is decides about the segments."""
    await tier.write(*chunk(1), 5000)  # a connection that was used before: a request on it is made again
    request = Channel.request
    lost: list[bytes] = []
    with server.client() as client, monkeypatch.context() as patch:

        def requested(self: Channel, *parts: bytes, **named: int) -> None:
            request(self, *parts, **named)
            if not lost and names_in(bytes(parts[0])) in ((b"EVAL", True), (b"SET", True)):
                until(lambda: client.exists(HEAD))
                lost.append(client.get(HEAD))
                if others != "nobody":
                    assert other._chunks.remove(KEY)
                    assert other._chunks.put(KEY, PAYLOAD[:LENGTH])
                raise BrokenConnection("the answer is lost")

        patch.setattr(Channel, "request", requested)
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        assert lost
        assert (client.get(HEAD) == lost[0]) == (others == "nobody")
        assert nobodys(client) == []
        assert [client.pttl(name) for name in client.keys("{*")] == [-1] * 6
    assert await is_whole(tier)


@pytest.mark.parametrize("number", [0, 3, 5])
async def test_a_chunk_that_has_lost_a_segment_is_not_published(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with server.client() as client:
        heads = []

        def evict() -> None:
            client.delete(sorted(client.keys("{*"))[number])

        def look() -> None:
            heads.append(client.exists(HEAD))

        with monkeypatch.context() as patch:
            once_before(patch, (b"EVAL", b"SET"), evict)
            request = Channel.request

            def requested(self: Channel, *parts: bytes, **named: int) -> None:
                look()
                request(self, *parts, **named)

            patch.setattr(Channel, "request", requested)
            with pytest.raises(TierFull, match="evicts chunks while they are written"):
                await tier.write(KEY, PAYLOAD, LENGTH)
        assert heads and not any(heads)
        assert client.dbsize() == 0
    assert await tier.write(KEY, PAYLOAD, LENGTH) and await is_whole(tier)


async def test_a_server_that_is_full_when_a_chunk_is_to_be_published_is_a_full_tier(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        try:
            with monkeypatch.context() as patch:
                once_before(patch, (b"EVAL", b"SET"), lambda: client.config_set("maxmemory", 1))
                with pytest.raises(TierFull, match="maxmemory"):
                    await tier.write(KEY, PAYLOAD, LENGTH)
        finally:
            client.config_set("maxmemory", 0)
        assert client.dbsize() == 0
    assert await tier.write(KEY, PAYLOAD, LENGTH) and await is_whole(tier)


async def test_a_put_in_segments_takes_no_more_than_a_look_its_segments_and_one_request(
    tier: RedisTier, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Channel.request
    asked: list[bytes] = []

    def requested(self: Channel, *parts: bytes, **named: int) -> None:
        asked.append(names_in(bytes(parts[0]))[0])
        request(self, *parts, **named)

    monkeypatch.setattr(Channel, "request", requested)
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert asked == [b"GETRANGE", b"STRLEN", b"EXISTS", *[b"SET"] * 6, b"EVAL"]
