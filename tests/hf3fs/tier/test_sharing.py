"""Several base paths, several instances: chunks spread evenly, found by everybody, and never seen before they are whole."""

import asyncio
import errno
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import Memory, Opened
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.opened import until
from tiercache.core.keys import ChunkKey
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.hf3fs import Hf3fsTier

CHUNKS = 99


async def write_small(tier: Hf3fsTier, memory: Memory, numbers: range) -> list[ChunkKey]:
    keys = []
    for number in numbers:
        key = np.random.default_rng(number).bytes(32)
        source = memory.make(np.full(100, number % 251, dtype=np.uint8))
        assert await tier.write(key, source[:4096], 100)
        memory.give_back(source)
        keys.append(key)
    return keys


async def test_base_paths_share_evenly_and_find_all_after_one_is_added(
    opened: Opened, place: Path, memory: Memory
) -> None:
    three = [place / name for name in "abc"]
    async with opened(*three) as tier:
        keys = await write_small(tier, memory, range(CHUNKS))
        where = Counter(Path(tier.path(key)).parents[2].name for key in keys)
        # The directory's name is another one each time: 99 fair draws are outside of this once in a million times.
        assert all(10 < where[name] < 57 for name in "abc"), where
    async with opened(*three, place / "d") as tier:
        into = memory.make()
        for number, key in enumerate(keys):
            assert await tier.probe([key]) == 1
            assert await tier.read(key, into) == 100
            assert (into[:100] == number % 251).all()
        more = await write_small(tier, memory, range(CHUNKS, 2 * CHUNKS))
        assert 5 < sum(Path(tier.path(key)).parents[2].name == "d" for key in more) < 47


async def test_writing_chunk_is_seen_by_nobody(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    key, payload = chunk(1)
    async with opened(place) as writer, opened(place) as reader:
        emulator.control.hang()
        write = asyncio.create_task(writer.write(key, memory.make(payload), CHUNK_BYTES))
        await until(lambda: writer.io.engine.in_flight == 1)
        assert await reader.probe([key]) == 0
        assert await reader.read(key, memory.make()) is None
        emulator.control.resume()
        assert await write
        into = memory.make()
        assert await reader.read(key, into) == CHUNK_BYTES
        assert np.array_equal(into, payload)


@pytest.mark.parametrize("call", ["open", "fsync"])
async def test_failed_call_leaves_no_chunk_and_no_count(
    tier: Hf3fsTier, place: Path, memory: Memory, emulator: Hf3fsEmulator, call: str
) -> None:
    key, payload = chunk(1)
    await tier.scanned()
    Path(tier.path(key)).parent.mkdir()  # else it is made, and counted, whatever becomes of the chunk
    used_before = tier.statistics().occupied_bytes
    emulator.control.fail_call(call, errno.EIO)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Errno 5"):
        await tier.write(key, memory.make(payload), CHUNK_BYTES)
    assert not tier.contains(key)
    assert not list(place.rglob("*.[0-9]*"))
    assert tier.statistics().occupied_bytes == used_before
    assert await tier.write(key, memory.make(payload), CHUNK_BYTES)
