"""Prefetches from files give way to demand reads, and so many writes are at a device at a time; none waits for ever."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.test_disk import FILE_BYTES, fill, flip, opened
from tiercache.errors import CorruptChunk
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import format as chunk_format
from tiercache.tiers.files import io_posix


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefetch reads a chunk in eight parts."""
    monkeypatch.setattr(chunk_format, "PART_BYTES", 4096)


@pytest.mark.parametrize("until", ["the last read has ended", "it has a waiter", "its patience is over"])
async def test_prefetches_stand_still_during_a_read_and_other_reads_find_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: None, until: str
) -> None:
    monkeypatch.setattr(io_posix, "_PATIENCE_S", 0.01 if until == "its patience is over" else 60.0)
    go_on, preadv = threading.Event(), os.preadv
    keys = [chunk(number)[0] for number in range(5)]
    async with opened(tmp_path, threads=2) as tier, asyncio.timeout(20):
        await fill(tier, range(5))

        def held(descriptor: int, *rest: object) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}") == tier.path(keys[0]):
                assert go_on.wait(20)
            return preadv(descriptor, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", held)
        reading = asyncio.create_task(tier.read(keys[0], page_aligned(CHUNK_BYTES)))
        into = [page_aligned(CHUNK_BYTES) for _ in range(2)]
        prefetches = [asyncio.create_task(tier.prefetch(key, each)) for key, each in zip(keys[1:], into, strict=False)]
        for key in keys[3:]:
            assert await tier.read(key, page_aligned(CHUNK_BYTES)) == CHUNK_BYTES
        if until == "the last read has ended":
            assert not (await asyncio.wait(prefetches, timeout=0.1))[0]
            go_on.set()
        elif until == "it has a waiter":
            for key in keys[1:3]:
                tier.hurry(key)
        assert await asyncio.gather(*prefetches) == [CHUNK_BYTES] * 2
        assert all(np.array_equal(each, chunk(number)[1]) for number, each in enumerate(into, start=1))
        go_on.set()
        assert await reading == CHUNK_BYTES


@pytest.mark.parametrize(
    "harm",
    [lambda path: flip(path, FILE_BYTES - 1), lambda path: os.truncate(path, FILE_BYTES - 4096)],
    ids=["flipped", "cut"],
)
async def test_prefetch_refuses_a_chunk_that_is_bad_in_its_last_part(
    tmp_path: Path, in_parts: None, harm: Callable[[Path], None]
) -> None:
    async with opened(tmp_path) as tier:
        await fill(tier, range(1, 2))
        await tier.scanned()
        harm(Path(tier.path(chunk(1)[0])))
        with pytest.raises(CorruptChunk):
            await tier.prefetch(chunk(1)[0], page_aligned(CHUNK_BYTES))


@pytest.mark.parametrize(("patience_s", "together"), [(60.0, 2), (0.001, 3)], ids=["each waits", "those there hang"])
async def test_two_threads_hand_over_bytes_at_a_time_unless_they_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patience_s: float, together: int
) -> None:
    monkeypatch.setattr(chunk_format, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(chunk_format, "LARGE_BYTES", CHUNK_BYTES)
    counting, pwritev = threading.Lock(), os.pwritev
    at_device, most_at_device, writing = 0, 0, threading.Barrier(together)

    def counted(descriptor: int, *arguments: object) -> int:
        nonlocal at_device, most_at_device
        with counting:
            at_device += 1
            most_at_device = max(most_at_device, at_device)
        writing.wait(10.0)  # until others are there
        written = pwritev(descriptor, *arguments)  # type: ignore[arg-type]
        with counting:
            at_device -= 1
        return written

    async with opened(tmp_path, threads=4) as tier:
        monkeypatch.setattr(os, "pwritev", counted)
        writes = [tier.write(*chunk(number), CHUNK_BYTES) for number in range(6)]
        assert all(await asyncio.gather(*writes))
    assert most_at_device == 2 if together == 2 else most_at_device >= 3
