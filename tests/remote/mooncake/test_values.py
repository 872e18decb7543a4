"""What lies in the store, and what of it the tier takes for a chunk."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.remote.arena import chunk, page_aligned
from tests.remote.mooncake.conftest import make_tier
from tests.servers.mooncake import Master
from tests.tiers.opened import open_tier
from tiercache.core.header import PACKED_BYTES
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.mooncake import MooncakeTier

pytestmark = pytest.mark.needs("libibverbs1")

LARGEST = 5 << 20
KEY, PAYLOAD = chunk(1)
LENGTH = PAYLOAD.nbytes
NAME = f"tiercache:{KEY.hex()}"


@pytest.fixture
async def tier(master: Master) -> AsyncIterator[MooncakeTier]:
    tier = make_tier(master.url, chunk_bytes=LARGEST, timeout_s=10.0)
    async with open_tier(tier):
        yield tier


@pytest.fixture
async def other(master: Master) -> AsyncIterator[MooncakeTier]:
    """Another client of the same store."""
    async with open_tier(make_tier(master.url, chunk_bytes=LARGEST)) as tier:
        yield tier


@pytest.mark.parametrize("length", [1, 88, 4097, (1 << 20) + 13, LARGEST])
async def test_every_length_comes_back_and_padding_is_left_alone(
    tier: MooncakeTier, other: MooncakeTier, length: int
) -> None:
    key, payload = chunk(length, length)
    assert await tier.write(key, payload, length)
    for reader in (tier, other):
        into = page_aligned(length + 4096)
        into[:] = 0xEE
        assert await reader.read(key, into) == length
        assert np.array_equal(into[:length], payload[:length])
        assert (into[length:] == 0xEE).all()


async def test_the_value_is_the_payload_and_its_header(tier: MooncakeTier, client: Any) -> None:
    assert await tier.write(KEY, PAYLOAD, 1000)
    value = client.get(NAME)
    assert len(value) == 1000 + PACKED_BYTES
    assert value[:1000] == PAYLOAD[:1000].tobytes() and value[1000:1008] == b"TIERKV\r\n"


async def test_a_value_that_is_still_being_written_is_not_there(tier: MooncakeTier, client: Any) -> None:
    assert client.batch_put_session_start([NAME], [LENGTH]) == [0]
    assert await tier.probe([KEY]) == 0
    assert await tier.read(KEY, page_aligned(LENGTH)) is None
    assert client.batch_put_session_revoke([NAME]) == [0]
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH


async def test_a_chunk_can_be_removed_right_after_it_was_read(tier: MooncakeTier) -> None:
    assert await tier.write(KEY, PAYLOAD, LENGTH)
    assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH
    assert await tier.remove(KEY) is True
    assert await tier.read(KEY, page_aligned(LENGTH)) is None
    assert await tier.remove(KEY) is False


@pytest.mark.parametrize("length", [1, 88, 89, LARGEST + 1000])
async def test_the_value_of_another_program_is_left_alone(tier: MooncakeTier, client: Any, length: int) -> None:
    value = b"x" * length
    assert client.put(NAME, value) == 0
    into = page_aligned(LARGEST)
    with pytest.raises(NotOurs):
        await tier.read(KEY, into)
    assert client.get(NAME) == value
