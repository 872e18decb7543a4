"""The disk tier under bad luck: what is damaged, full, gone or shared costs hits and nothing else."""

import asyncio
import contextlib
import importlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.tiers.conftest import fill_up
from tests.tiers.opened import open_tier
from tests.tiers.others import running
from tiercache.core.header import Header, file_bytes, payload_checksum
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import FileSettings

FINGERPRINT = b"f" * 16
FILE_BYTES = file_bytes(CHUNK_BYTES)


def opened(directory: Path, cap_chunks: float = 64, **settings: Any) -> AbstractAsyncContextManager[DiskTier]:
    """A tier whose cap leaves room for `cap_chunks` chunks and the directories that they need."""
    cap_bytes = int(cap_chunks * (FILE_BYTES + 8192))
    return open_tier(DiskTier(FileSettings((directory,), cap_bytes, **settings), FINGERPRINT))


@asynccontextmanager
async def scanned(directory: Path, cap_chunks: float = 64, **settings: Any) -> AsyncIterator[DiskTier]:
    """Once it has looked through the directory."""
    async with opened(directory, cap_chunks, **settings) as tier:
        await tier.scanned()
        yield tier


async def fill(tier: Tier, numbers: range) -> None:
    for number in numbers:
        assert await tier.write(*chunk(number), CHUNK_BYTES)


async def is_hit(tier: Tier, number: int) -> bool:
    """Read a chunk; a hit must be right."""
    key, payload = chunk(number)
    into = page_aligned(CHUNK_BYTES)
    length = None
    with contextlib.suppress(CorruptChunk):
        length = await tier.read(key, into)
    if length is None:
        return False
    assert length == CHUNK_BYTES
    assert np.array_equal(into, payload), "wrong bytes were served as a hit"
    return True


def allocated_bytes(directory: Path) -> int:
    """What the file system really allocates for chunks and their directories."""
    total = 0
    for path in directory.rglob("*"):
        if ".tiercache" not in path.parts and path.name != "tiercache.json":
            total += path.lstat().st_blocks * 512
    return total


def half_written(directory: Path) -> list[Path]:
    return [*directory.glob("[0-9a-f][0-9a-f]/*.[0-9]*"), *directory.glob(".tiercache/tmp/*.[0-9]*")]


def physical_bytes(directory: Path) -> int:
    """Chunks, and what is half-written. Chunks may be deleted meanwhile; nothing may be written."""
    total = 0
    for path in [*directory.glob("[0-9a-f][0-9a-f]/*"), *half_written(directory)]:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated by a page": lambda path: os.truncate(path, FILE_BYTES - 4096),
    "truncated to its header": lambda path: os.truncate(path, 4096),
    "truncated inside its payload": lambda path: os.truncate(path, 10_001),
    "truncated inside its header": lambda path: os.truncate(path, 50),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, FILE_BYTES + 4096),
    "bit flipped in the payload": lambda path: flip(path, 4096 + CHUNK_BYTES - 1),
    "bit flipped in the header": lambda path: flip(path, 30),
    "zeroes": lambda path: path.write_bytes(bytes(FILE_BYTES)),
    "another chunk's": lambda path: path.write_bytes(whole_file(99, FINGERPRINT)),
    "another layout's": lambda path: path.write_bytes(whole_file(1, b"g" * 16)),
}


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def whole_file(number: int, fingerprint: bytes) -> bytes:
    key, payload = chunk(number)
    packed = Header(key, fingerprint, CHUNK_BYTES, payload_checksum(payload)).pack()
    return packed + bytes(4096 - len(packed)) + payload.tobytes()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "page cache"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_file_is_a_miss_and_deleted(tmp_path: Path, damage: str, direct: bool) -> None:
    async with scanned(tmp_path, direct=direct) as tier:  # a scan removes what is torn
        await fill(tier, range(1, 3))
        path = Path(tier.path(chunk(1)[0]))
        DAMAGES[damage](path)
        assert not await is_hit(tier, 1)
        assert not path.exists()
        assert tier.statistics().corrupt == 1
        assert tier.statistics().occupied_bytes >= allocated_bytes(chunks_of(tmp_path)), "what was cut off stays counted"
        assert await is_hit(tier, 2), "its neighbour is not affected"
        assert await tier.write(*chunk(1), CHUNK_BYTES), "the chunk can be stored again"
        assert await is_hit(tier, 1)


async def test_cap_holds_where_the_size_of_a_file_is_said_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def fstat_late(descriptor: int) -> os.stat_result:
        _, fields = fstat(descriptor).__reduce__()[1]
        return os.stat_result(fstat(descriptor), fields | {"st_blocks": 0})

    async with opened(tmp_path, cap_chunks=8) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat_late)
            await fill(tier, range(1, 21))
        assert allocated_bytes(chunks_of(tmp_path)) <= tier.statistics().occupied_bytes <= tier.settings.cap_bytes


async def test_chunk_larger_than_the_cap_is_declined(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=0.5) as tier:
        assert await tier.write(*chunk(1), CHUNK_BYTES) is False


async def test_missing_ledger_is_counted_anew_before_any_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path) as tier:
        await fill(tier, range(1, 11))
    (chunks_of(tmp_path) / ".tiercache" / "ledger").unlink()
    async with opened(tmp_path) as tier:
        assert await tier.write(*chunk(50), CHUNK_BYTES) is False, "the cap cannot be kept before the scan"
        assert "nothing is written before a scan" in caplog.text
        await tier.scanned()
        assert tier.statistics().occupied_bytes == allocated_bytes(chunks_of(tmp_path))
        await fill(tier, range(50, 51))


async def test_strays_and_torn_files_are_removed_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    async with scanned(tmp_path) as tier:  # a scan that a close interrupts may remove the torn file, and count it
        await fill(tier, range(1, 3))
        torn = Path(tier.path(chunk(1)[0]))
    os.truncate(torn, 5000)
    dead = "0123456789abcdef" * 2
    stray = chunks_of(tmp_path) / ".tiercache" / "tmp" / f"{dead}.7"
    stray.write_bytes(b"half a chunk")
    stray.with_name(f"{dead}.lock").touch()
    beside = torn.with_name(f"{dead}.8")
    beside.write_bytes(b"half a chunk of a tier that makes files beside their names")
    precious = [tmp_path / "thesis.txt", torn.with_name("notes.txt"), torn.parent / "zz.txt"]
    for path in precious:
        path.write_text("mine")
    async with scanned(tmp_path) as tier:
        assert not torn.exists()
        assert not stray.exists()
        assert not beside.exists()
        assert tier.statistics().strays == 3
        assert all(path.read_text() == "mine" for path in precious)
        assert await is_hit(tier, 2)


@pytest.mark.parametrize("first", [True, False], ids=["first scan", "later scan"])
async def test_torn_file_that_a_scan_meets_before_a_read_is_removed_and_stored_anew(tmp_path: Path, first: bool) -> None:
    async with scanned(tmp_path) as tier:
        await fill(tier, range(1, 2))
        path = Path(tier.path(chunk(1)[0]))
        os.truncate(path, 10_001)
        tier.directories.begin_scan(tier.directories.all[0], first=first)
        await tier.scanned()
        assert not path.exists()
        assert not await is_hit(tier, 1)
        await fill(tier, range(1, 2))
        assert await is_hit(tier, 1)


async def test_the_directories_of_chunks_never_take_the_files_above_the_cap(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:  # a directory for each chunk
        await tier.scanned()
        payload = chunk(1)[1]
        cap_bytes = tier.directories.all[0].files.cap_bytes
        for number in range(160):
            assert await tier.write(bytes([number]) * 24, payload, CHUNK_BYTES)
            assert tier.statistics().occupied_bytes == allocated_bytes(chunks_of(tmp_path)) <= cap_bytes
        assert allocated_bytes(chunks_of(tmp_path)) > cap_bytes - 4 * FILE_BYTES


async def test_two_instances_in_one_directory_neither_fail_nor_exceed_the_cap(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=40) as one, opened(tmp_path, cap_chunks=40) as other:
        await asyncio.gather(fill(one, range(1, 31)), fill(other, range(1, 31)))
        assert tier_total(one, other) == tier_total(other, one) == allocated_bytes(chunks_of(tmp_path))
        for number in range(1, 31):
            assert await is_hit(one, number)
            assert await is_hit(other, number)


def tier_total(tier: DiskTier, *others: DiskTier) -> int:
    """What is counted now, without what these tiers have reserved; statistics are as old as a process's last change."""
    for each in (tier, *others):
        each.directories.all[0].files.capacity.refresh()
    reserved = [each.directories.all[0].files.capacity for each in others]
    return tier.statistics().occupied_bytes - sum(each.counted_bytes - each.used_bytes for each in reserved)


@pytest.mark.parametrize("leaves", ["removed", "evicted"])
async def test_a_chunk_stored_by_another_tier_in_another_size_frees_what_it_occupies(tmp_path: Path, leaves: str) -> None:
    """The same key has other bytes after a `forget`, or another compression."""
    key, payload = chunk(1)
    async with opened(tmp_path, cap_chunks=4) as one, opened(tmp_path, cap_chunks=4) as other:
        await one.write(key, payload, CHUNK_BYTES)
        await other.remove(key)
        await other.write(key, payload[:8192], 5000)
        if leaves == "removed":
            await one.remove(key)
        else:
            await fill(one, range(11, 16))
        assert not Path(one.path(key)).exists()
        assert tier_total(one, other) == tier_total(other, one) == allocated_bytes(chunks_of(tmp_path))


async def test_a_chunk_that_is_stored_after_the_eviction_of_its_older_file_is_known(tmp_path: Path) -> None:
    key, payload = chunk(1)
    async with scanned(tmp_path, 16) as tier:
        async with opened(tmp_path) as other:
            await fill(other, range(1, 2))
        io = tier.directories.io
        write, began, may_go_on = io.write, asyncio.Event(), asyncio.Event()

        async def write_late(*arguments: Any) -> int:
            began.set()
            await may_go_on.wait()
            return await write(*arguments)

        io.write = lambda *arguments: asyncio.ensure_future(write_late(*arguments))  # type: ignore[method-assign]
        writing = asyncio.ensure_future(tier.write(key, payload, CHUNK_BYTES))
        await began.wait()
        io.write = write  # type: ignore[method-assign]
        assert await tier.probe([key]) == 1
        await fill(tier, range(2, 40))
        assert not tier.contains(key), "it was evicted for these"
        may_go_on.set()
        assert await writing
        assert tier.contains(key) and await is_hit(tier, 1)
        await fill(tier, range(40, 80))
        assert not tier.contains(key) and not await is_hit(tier, 1), "it is evicted as others are"


async def test_instance_that_knows_nothing_looks_around_when_the_directory_is_full(tmp_path: Path) -> None:
    async with scanned(tmp_path, cap_chunks=8) as other:
        async with opened(tmp_path, cap_chunks=8) as one:
            await fill(one, range(1, 9))
        other.directories.all[0].next_scan_s = 0.5
        await fill(other, range(100, 110))
        assert allocated_bytes(chunks_of(tmp_path)) <= other.settings.cap_bytes


@pytest.mark.parametrize("wrong", ["a file", "below a file", "newer format"])
async def test_path_that_cannot_be_used_is_one_clear_sentence(tmp_path: Path, wrong: str) -> None:
    directory = tmp_path / "place"
    if wrong == "newer format":
        chunks_of(directory).mkdir(parents=True)
        (chunks_of(directory) / "tiercache.json").write_text('{"format": 99}')
    else:
        directory.write_text("I am a file")
        directory = directory / "below" if wrong == "below a file" else directory
    with pytest.raises(ConfigError, match=f"local_disk: {directory}"):
        async with opened(directory):
            pass


@pytest.mark.needs("mount")
async def test_bookkeeping_that_is_deleted_on_a_full_device_is_made_anew(small_device: Path) -> None:
    async with opened(small_device, cap_chunks=1000) as tier:
        await fill(tier, range(1, 200))
        shutil.rmtree(chunks_of(small_device) / ".tiercache")
        fill_up(small_device)
        written = 0
        for number in range(200, 210):
            with contextlib.suppress(TierFull, TierUnavailable):
                written += await tier.write(*chunk(number), CHUNK_BYTES)
            await tier.scanned()
        assert written >= 5


@pytest.mark.needs("mount")
async def test_full_device_evicts_then_refuses_then_heals(small_device: Path) -> None:
    async with opened(small_device, cap_chunks=1000) as tier:
        await fill(tier, range(1, 200))
        assert tier.statistics().evicted > 100, "no room on the device is a reason to evict"
        assert await is_hit(tier, 199)
        assert tier_total(tier) == allocated_bytes(chunks_of(small_device))
        for number in range(1, 200):
            await tier.remove(chunk(number)[0])
        ballast = fill_up(small_device)
        with pytest.raises(TierFull):
            await tier.write(*chunk(1), CHUNK_BYTES)
        assert tier_total(tier) == allocated_bytes(chunks_of(small_device))
        assert not half_written(chunks_of(small_device))
        ballast.unlink()
        assert await tier.write(*chunk(1), CHUNK_BYTES), "the key that failed can be stored again"
        assert await is_hit(tier, 1)


async def test_directory_that_cannot_be_written_still_gives_its_hits(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await fill(tier, range(1, 4))
        place = Path(tier.path(chunk(4)[0])).parent
        # Root may write where others may not, but not even root into an immutable directory.
        forbid, allow = (["chmod", "0555"], ["chmod", "0755"]) if os.getuid() else (["chattr", "+i"], ["chattr", "-i"])
        if subprocess.run([*forbid, place], capture_output=True, check=False).returncode:
            pytest.skip("this file system cannot forbid writing")
        try:
            assert await is_hit(tier, 1)
            with pytest.raises(OSError, match="not permitted|denied"):
                await fill(tier, range(4, 5))
            assert await is_hit(tier, 2)
        finally:
            subprocess.run([*allow, place], check=True)
        await fill(tier, range(4, 5))
        assert await is_hit(tier, 4)


KILLED_WRITER = """
import asyncio, sys
from pathlib import Path
from {module} import opened
from tests.tiers.test_disk import fill

async def main():
    async with opened(Path(sys.argv[1]), cap_chunks=100) as tier:
        await tier.scanned()
        print("ready", flush=True)
        for start in range(int(sys.argv[2]), 10**6, 4):
            await asyncio.gather(*(fill(tier, range(number, number + 1)) for number in range(start, start + 4)))
            print(start + 3, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("module", ["tests.tiers.test_disk", "tests.tiers.test_weka"])
async def test_killed_writer_leaves_nothing_wrong_and_what_was_durable(tmp_path: Path, module: str) -> None:
    open_it = importlib.import_module(module).opened
    random = np.random.default_rng(5)
    next_number = 1
    for _ in range(8):
        async with running("-c", KILLED_WRITER.format(module=module), tmp_path, next_number) as child:
            durable = [int(await child.line()) for _ in range(int(random.integers(1, 12)))]
            await child.kill()
            while (line := await child.line()).isdigit():
                durable.append(int(line))
        async with open_it(tmp_path, cap_chunks=100) as tier:
            await tier.scanned()
            assert tier_total(tier) == allocated_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes
            assert not half_written(chunks_of(tmp_path))
            for number in range(max(next_number, durable[-1] - 40), durable[-1] + 1):
                assert await is_hit(tier, number), "what was durable before the kill is found after it"
            for number in range(durable[-1] + 1, durable[-1] + 9):
                await is_hit(tier, number)
            assert tier.statistics().corrupt == 0
        next_number = durable[-1] + 9


def test_volume_survives_directories_that_somebody_tidies_away(tmp_path: Path) -> None:
    files = ChunkFiles(tmp_path, 1 << 30, FINGERPRINT, direct=None, durable=False)
    files.open()
    key, payload = chunk(1)
    for _ in range(20):
        files.write(key, payload, CHUNK_BYTES)
        assert files.delete(key)
        (tmp_path / key.hex()[:2]).rmdir()
    files.close()
