"""Prefetches from files give way to demand reads, also of their own chunks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.test_disk import FINGERPRINT, opened
from tiercache.core.header import HEADER_BYTES, Header, payload_checksum
from tiercache.errors import CorruptChunk
from tiercache.memory.workers import Workers
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import format as chunk_format
from tiercache.tiers.files import io_posix
from tiercache.tiers.files.format import read_chunk_file, write_chunk_file
from tiercache.tiers.files.io_posix import Precedence

A = b"a" * 24


class Line:
    """Those who read, each until it is told that it has ended, and those who prefetch in two parts."""

    def __init__(self, workers: Workers) -> None:
        self.precedence = Precedence()
        self.order: list[str] = []
        self._workers = workers

    def read(self) -> asyncio.Future[int | None]:
        return self.precedence.read(asyncio.get_running_loop().create_future())

    async def prefetch(self, key: bytes) -> asyncio.Future[int | None]:
        """One whose first part has been read."""
        begun = threading.Event()

        def parts(pause: Callable[[], None]) -> int:
            begun.set()
            pause()
            self.order.append(key[:1].decode())
            return 1

        work = self.precedence.prefetch(key, lambda pause: self._workers.submit(parts, pause))
        await asyncio.to_thread(begun.wait)
        return work

    def end(self, read: asyncio.Future[int | None]) -> None:
        self.order.append("read")
        read.set_result(1)


@asynccontextmanager
async def line(monkeypatch: pytest.MonkeyPatch, patience_s: float = 60.0) -> AsyncIterator[Line]:
    monkeypatch.setattr(io_posix, "_PATIENCE_S", patience_s)
    workers = Workers("prefetch", 2)
    async with asyncio.timeout(10.0):
        yield Line(workers)
    workers.close()


async def test_prefetch_stands_still_until_the_last_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch) as those:
        reads = [those.read(), those.read()]
        work = await those.prefetch(A)
        those.end(reads[0])
        those.end(reads[1])
        await work
        assert those.order == ["read", "read", "a"]


async def test_prefetch_does_not_wait_for_ever_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with line(monkeypatch, patience_s=0.01) as those:
        read = those.read()
        await (await those.prefetch(A))
        those.end(read)
        assert those.order == ["a", "read"]


def written(path: Path, key: bytes, payload: np.ndarray) -> None:
    header = Header(key, FINGERPRINT, CHUNK_BYTES, payload_checksum(payload[:CHUNK_BYTES]))
    write_chunk_file(path, header, payload, direct=False, durable=False)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many parts a chunk is read in."""
    monkeypatch.setattr(chunk_format, "PART_BYTES", 4096)
    return CHUNK_BYTES // max(4096, CHUNK_BYTES // 8)


def test_chunk_read_in_parts_is_whole_and_pauses_between_them(tmp_path: Path, small_parts: int) -> None:
    key, payload = chunk(1)
    written(tmp_path / "chunk", key, payload)
    into, pauses = page_aligned(CHUNK_BYTES), []
    header = read_chunk_file(tmp_path / "chunk", key, FINGERPRINT, into, direct=False, pause=lambda: pauses.append(1))
    assert header.payload_bytes == CHUNK_BYTES and np.array_equal(into, payload)
    assert len(pauses) == small_parts - 1 > 1


@pytest.mark.parametrize("harm", ["flipped", "cut"])
@pytest.mark.usefixtures("small_parts")
def test_chunk_that_is_bad_in_its_last_part_is_refused(tmp_path: Path, harm: str) -> None:
    key, payload = chunk(1)
    path = tmp_path / "chunk"
    written(path, key, payload)
    with path.open("r+b") as file:
        if harm == "flipped":
            file.seek(HEADER_BYTES + CHUNK_BYTES - 1)
            file.write(bytes([int(payload[CHUNK_BYTES - 1]) ^ 1]))
        else:
            file.truncate(HEADER_BYTES + CHUNK_BYTES - 4096)
    with pytest.raises(CorruptChunk):
        read_chunk_file(path, key, FINGERPRINT, page_aligned(CHUNK_BYTES), direct=False, pause=lambda: None)


async def test_reads_find_a_thread_while_every_prefetch_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: int
) -> None:
    monkeypatch.setattr(io_posix, "_PATIENCE_S", 60.0)
    async with opened(tmp_path, threads=1) as tier:
        for number in (1, 2):
            key, payload = chunk(number)
            await tier.write(key, payload, CHUNK_BYTES)
        io = tier.directories.io
        never = asyncio.get_running_loop().create_future()
        io._precedence.read(never)  # type: ignore[attr-defined]
        prefetching = asyncio.create_task(tier.prefetch(chunk(1)[0], page_aligned(CHUNK_BYTES)))
        async with asyncio.timeout(10.0):
            assert await tier.read(chunk(2)[0], page_aligned(CHUNK_BYTES)) == CHUNK_BYTES
            assert not prefetching.done()
            tier.hurry(chunk(1)[0])
            assert await prefetching == CHUNK_BYTES
        never.set_result(None)
