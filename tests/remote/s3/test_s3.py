"""The S3 tier on a real store: parts, and what lies there that should not."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import numpy as np
import obstore
import pytest

from tests.tiers.opened import open_tier
from tiercache.core.header import PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.s3 import S3Tier

MakeTier = Callable[..., S3Tier]
LARGE_BYTES = 9 << 20


async def stored(tier: S3Tier, number: int) -> bytes:
    answer = await obstore.get_async(tier.store, tier.path(chunk(number)[0]))
    return (await answer.bytes_async()).to_bytes()


async def replace(tier: S3Tier, number: int, value: bytes) -> None:
    await obstore.put_async(tier.put_store, tier.path(chunk(number)[0]), value)


async def read(tier: S3Tier, number: int, length: int = CHUNK_BYTES) -> np.ndarray | None:
    into = page_aligned(max(length, tier.settings.chunk_bytes))
    found = await tier.read(chunk(number)[0], into)
    return None if found is None else into[:found]


async def test_a_chunk_of_another_layout_is_not_found(make_tier: MakeTier) -> None:
    async with open_tier(make_tier()) as one, open_tier(make_tier(fingerprint=b"o" * 16)) as other:
        await one.write(*chunk(1), CHUNK_BYTES)
        assert await other.probe([chunk(1)[0]]) == 0
        assert await read(other, 1) is None


@pytest.mark.parametrize("length", [0, 3, PACKED_BYTES, PACKED_BYTES + CHUNK_BYTES - 1, PACKED_BYTES + CHUNK_BYTES + 4])
async def test_an_object_of_a_wrong_length_is_no_hit_and_is_stored_anew(make_tier: MakeTier, length: int) -> None:
    async with open_tier(make_tier()) as tier, open_tier(make_tier()) as other:
        await tier.write(*chunk(1), CHUNK_BYTES)
        await replace(tier, 1, (await stored(tier, 1))[:length].ljust(length))
        torn = await stored(tier, 1)
        with pytest.raises(CorruptChunk):
            await read(tier, 1)
        assert tier.statistics().corrupt == 1
        assert await tier.write(*chunk(1), CHUNK_BYTES), "by one who has read it"
        assert await read(tier, 1) is not None
        await replace(tier, 1, torn)
        assert await other.write(*chunk(1), CHUNK_BYTES), "by one who has not"
        assert await read(other, 1) is not None


@pytest.mark.parametrize("value", [b"a text of somebody else's", bytes(PACKED_BYTES + CHUNK_BYTES + 1), bytes(88)])
async def test_an_object_of_another_program_is_left_alone_by_reads_and_replaced_by_a_put(
    make_tier: MakeTier, value: bytes
) -> None:
    async with open_tier(make_tier()) as tier:
        await replace(tier, 1, value)
        with pytest.raises(NotOurs):
            await read(tier, 1)
        assert await stored(tier, 1) == value
        assert await tier.write(*chunk(1), CHUNK_BYTES)
        assert await read(tier, 1) is not None


async def test_the_payloads_memory_is_free_when_a_write_has_returned(make_tier: MakeTier) -> None:
    async with open_tier(make_tier(chunk_bytes=LARGE_BYTES)) as tier:
        key, payload = chunk(1, LARGE_BYTES)
        held = weakref.ref(payload)
        await tier.write(key, payload, LARGE_BYTES)
        del payload
        async with asyncio.timeout(60):
            while held() is not None:
                gc.collect()
                await asyncio.sleep(0)


async def test_a_cancelled_write_ends_before_its_waiter_hears_of_it(make_tier: MakeTier) -> None:
    async with open_tier(make_tier(chunk_bytes=LARGE_BYTES)) as tier:
        key, payload = chunk(1, LARGE_BYTES)
        write = asyncio.create_task(tier.write(key, payload, LARGE_BYTES))
        while not tier.pending:
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
        assert write.cancelled()
        assert not tier.pending
        payload[:] = 0
        found = await read(tier, 1)
        assert found is not None and np.array_equal(found, chunk(1, LARGE_BYTES)[1])


async def test_secrets_are_in_no_repr(make_tier: MakeTier) -> None:
    async with open_tier(make_tier()) as tier:
        for shown in (repr(tier), repr(tier.settings), tier.describe(), repr(vars(tier)), str(tier.address)):
            assert "secret-of-the-tests" not in shown
