"""The disk tier heals while it runs: the count, the order, the directory and single files, without a restart."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chunks import chunks_of
from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.servers.processes import stop_process
from tests.tiers.conftest import fill_up
from tests.tiers.opened import fails, open_tier, until
from tests.tiers.others import REPOSITORY, running
from tests.tiers.test_disk import (
    FILE_BYTES,
    FINGERPRINT,
    allocated_bytes,
    fill,
    half_written,
    is_hit,
    opened,
    physical_bytes,
    scanned,
    tier_total,
)
from tiercache.errors import CacheClosed, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.owners import Owner

BEGINNERS = """
import asyncio, sys
from pathlib import Path
from tests.tiers.test_disk import opened

async def begin(place):
    async with opened(place):
        pass

print("ready", flush=True)
for line in sys.stdin:
    try:
        asyncio.run(begin(Path(sys.argv[1], line.strip())))
        print("open", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""


async def test_processes_that_begin_together_in_a_fresh_directory_all_open_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        beginners = [await stack.enter_async_context(running("-c", BEGINNERS, tmp_path)) for _ in range(8)]
        for number in range(60):
            assert await asyncio.gather(*(each.do(str(number)) for each in beginners)) == ["open"] * 8
            assert json.loads((chunks_of(tmp_path / str(number)) / "tiercache.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    "torn",
    [b"", b"{", b'{"format": 1, "wh', bytes(64), b"[]", b"[" * 100_000],
    ids=["empty", "a byte", "half", "zeroes", "no object", "too deep"],
)
async def test_a_manifest_that_is_damaged_heals(tmp_path: Path, torn: bytes) -> None:
    async with opened(tmp_path) as tier:
        await fill(tier, range(1, 3))
    (chunks_of(tmp_path) / "tiercache.json").write_bytes(torn)
    async with opened(tmp_path) as tier:
        assert await is_hit(tier, 2)
    assert json.loads((chunks_of(tmp_path) / "tiercache.json").read_text())["format"] == 1


KILLED_OPENER = """
import os, sys, threading
from pathlib import Path
from tiercache.tiers.files.chunk_files import ChunkFiles

def kill(event, arguments):
    if event in ("open", "os.remove", "os.rename") and ".tiercache" in str(arguments[0]):
        kill.count -= 1
        if not kill.count:
            os.kill(os.getpid(), 9)

kill.count = int(sys.argv[2])
sys.addaudithook(kill)
ChunkFiles(Path(sys.argv[1]), 1 << 24, b"f" * 16, direct=None, durable=True).open()
"""


async def test_killed_at_any_point_of_the_start_the_next_start_works_and_leaves_nothing(tmp_path: Path) -> None:
    for point in range(1, 11):
        place = tmp_path / str(point)
        command = [sys.executable, "-c", KILLED_OPENER, str(place), str(point)]
        await asyncio.to_thread(subprocess.run, command, cwd=REPOSITORY, check=False)
        async with opened(place) as tier:
            await fill(tier, range(1, 3))
            left = {path.name for path in (chunks_of(place) / ".tiercache" / "tmp").iterdir() if path.suffix != ".new"}
            assert len(left) == 1, left


# The count


def empty(directory: Path) -> None:
    """Delete all but our bookkeeping."""
    for path in directory.iterdir():
        if path.name != ".tiercache":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("cap_before", [16, 64], ids=["at once", "after a lowered cap"])
async def test_an_emptied_directory_is_filled_again(tmp_path: Path, cap_before: int) -> None:
    """What was evicted in one go must not stay counted as about to be deleted: no count would be doubted any more."""
    async with opened(tmp_path, cap_chunks=cap_before) as tier:
        await fill(tier, range(1, cap_before))
    async with scanned(tmp_path, cap_chunks=16) as tier:
        empty(tmp_path)
        await fill(tier, range(101, 117))
        assert sum([await is_hit(tier, number) for number in range(101, 117)]) >= 15
        assert physical_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes
        assert (chunks_of(tmp_path) / "tiercache.json").exists()


async def test_an_eviction_that_fails_keeps_its_victims_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first unlink: the lock file cannot be written for a moment."""
    async with scanned(tmp_path, cap_chunks=16) as tier:
        await fill(tier, range(1, 33))
        assert tier.statistics().evicted
        files = tier.directories.all[0].files
        while files.is_behind:
            files.catch_up()

        with monkeypatch.context() as patched:
            patched.setattr(Owner, "write", fails)
            with pytest.raises(OSError, match="Input/output"):
                await tier.write(*chunk(90), CHUNK_BYTES)
        numbers = [number for number in range(1, 33) if Path(tier.path(chunk(number)[0])).exists()]
        assert [number for number in numbers if not tier.contains(chunk(number)[0])] == []


async def test_a_cap_that_is_lowered_without_bookkeeping_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scanned(tmp_path, cap_chunks=16) as tier:
        await fill(tier, range(1, 17))
        shutil.rmtree(chunks_of(tmp_path) / ".tiercache" / "tmp")
        tier.limit(8 * (FILE_BYTES + 8192), 0)
        trimming = [task for task in tier.directories._tasks if "trim" in task.get_name()]
        assert trimming
        await asyncio.wait(trimming)
        assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        await fill(tier, range(31, 33))
        await tier.scanned()
        assert physical_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes


async def test_the_cap_holds_when_the_ledger_is_deleted_while_two_instances_run(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=16) as one, opened(tmp_path, cap_chunks=16) as other:
        await asyncio.gather(one.scanned(), other.scanned())
        await fill(one, range(1, 17))
        most = 0
        for start in (100, 200, 300):
            shutil.rmtree(chunks_of(tmp_path) / ".tiercache")
            for number in range(start, start + 40):
                for tier in (one, other):
                    try:
                        await tier.write(*chunk(number + 1000 * (tier is other)), CHUNK_BYTES)
                    except TierUnavailable:
                        await tier.scanned()
                    most = max(most, physical_bytes(chunks_of(tmp_path)))
        assert most <= one.settings.cap_bytes
        assert await is_hit(one, 339) or await is_hit(other, 1339)
        assert tier_total(one, other) == tier_total(other, one) == allocated_bytes(chunks_of(tmp_path))


async def test_a_write_that_met_the_loss_of_the_ledger_stores_nothing_before_the_chunks_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began under the old count, and another write opened the directory anew while it made room."""
    async with opened(tmp_path) as tier, opened(tmp_path) as other:
        await fill(tier, range(1, 4))
        await fill(other, range(11, 12))  # which uses bytes, so that nobody can count them all now
        directory, make_room = tier.directories.all[0], tier.directories.make_room

        async def beside_another_write(*arguments: Any) -> Any:
            monkeypatch.setattr(tier.directories, "make_room", make_room)
            (chunks_of(tmp_path) / ".tiercache" / "ledger").unlink()
            with contextlib.suppress(TierUnavailable):
                await tier.directories.reopen(directory, directory.files)
            assert not directory.files.capacity.trusted
            return await make_room(*arguments)

        monkeypatch.setattr(tier.directories, "make_room", beside_another_write)
        with pytest.raises(TierUnavailable, match="being counted"):
            await tier.write(*chunk(5), CHUNK_BYTES)
        assert not Path(tier.path(chunk(5)[0])).exists()


async def test_a_file_time_in_the_future_does_not_raise_the_cap(tmp_path: Path) -> None:
    """A clock that was wrong when a chunk was written, and is right again."""
    async with opened(tmp_path, cap_chunks=16) as tier:
        await fill(tier, range(1, 17))
    in_ten_days = time.time() + 864_000
    for path in chunks_of(tmp_path).glob("[0-9a-f][0-9a-f]/*"):
        os.utime(path, (in_ten_days, in_ten_days))
    async with scanned(tmp_path, cap_chunks=16) as tier:
        await fill(tier, range(101, 117))
        assert physical_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes


async def test_a_file_that_a_failed_write_leaves_is_removed_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scanned(tmp_path, durable=True) as tier:
        await fill(tier, range(1, 3))

        with monkeypatch.context() as device:
            device.setattr(os, "fdatasync", fails)
            device.setattr(os, "unlink", fails)
            with pytest.raises(OSError, match="Input/output error"):
                await tier.write(*chunk(3), CHUNK_BYTES)
        chunks = chunks_of(tmp_path)
        assert half_written(chunks)
        # Counted until it is removed.
        await until(lambda: not half_written(chunks) and tier_total(tier) == allocated_bytes(chunks))


async def test_a_read_that_ends_after_close_begins_no_scan(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=16) as tier:
        await tier.scanned()
    (directory,) = tier.directories.all
    directory.next_scan_s = 0.0
    tier.directories.scan_soon(directory)
    assert directory.scanning is None


async def test_what_is_removed_is_gone_from_every_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    async with opened(first) as tier:
        await fill(tier, range(1, 21))
    async with open_tier(DiskTier(FileSettings((first, second), 256 * FILE_BYTES), FINGERPRINT)) as both:
        for number in range(1, 11):  # before it is known that they lie in the first one
            await both.write(*chunk(number), CHUNK_BYTES)
        for number in range(1, 21):
            await both.remove(chunk(number)[0])
        await both.scanned()
        assert [number for number in range(1, 21) if await is_hit(both, number)] == []
    assert list(tmp_path.glob("*/tiercache-chunks/[0-9a-f][0-9a-f]/*")) == []


async def test_a_lowered_cap_is_kept_before_the_first_write_and_writes_go_on_meanwhile(tmp_path: Path) -> None:
    async with opened(tmp_path, cap_chunks=600) as tier:
        await fill(tier, range(1, 500))
    async with opened(tmp_path, cap_chunks=20) as tier:
        while not tier.directories.all[0].scanned:
            await asyncio.sleep(0)
        await tier.scanned()
        assert allocated_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes
    async with opened(tmp_path, cap_chunks=600) as tier:
        await fill(tier, range(1, 500))
    async with opened(tmp_path, cap_chunks=20) as tier:
        await fill(tier, range(1001, 1009))
        await tier.scanned()
        assert [number for number in range(1001, 1009) if not await is_hit(tier, number)] == []
        assert allocated_bytes(chunks_of(tmp_path)) <= tier.settings.cap_bytes


# Single files


@needs_fuse
async def test_unreadable_files_cost_themselves_and_can_be_stored_again(mount: FragileMount) -> None:
    """Also several in a row."""
    async with opened(mount.path, direct=False) as tier:
        await fill(tier, range(1, 13))
        bad = range(3, 11)
        mount.make_unreadable(*(chunk(number)[0].hex() for number in bad))
        for _ in range(4):
            for number in range(1, 13):
                assert await is_hit(tier, number) == (number not in bad), "a miss, and no failure of the tier"
        assert tier.statistics().corrupt == len(bad)
        assert not any(Path(tier.path(chunk(number)[0])).exists() for number in bad)
        mount.make_unreadable()
        await fill(tier, bad)
        assert all([await is_hit(tier, number) for number in range(1, 13)])


@needs_fuse
async def test_a_device_that_reads_nothing_is_a_failure_of_the_tier(mount: FragileMount) -> None:
    async with opened(mount.path, direct=False) as tier:
        await fill(tier, range(1, 12))
        mount.make_unreadable("")
        failures = 0
        for number in range(1, 9):
            try:
                assert not await is_hit(tier, number)
            except OSError:
                failures += 1
        assert failures >= 5, "so the breaker opens"
        mount.make_unreadable()
        assert sum([await is_hit(tier, number) for number in range(1, 12)]) >= 9, "and the chunks are still there"


# Locks, room and modes

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


async def test_a_peer_that_is_frozen_with_the_lock_costs_seconds_and_not_the_threads(tmp_path: Path) -> None:
    async with scanned(tmp_path) as tier:
        await fill(tier, range(1, 3))
        async with running("-c", HOLDER, chunks_of(tmp_path) / ".tiercache" / "ledger") as peer, asyncio.timeout(25):
            stop_process(peer.process.pid)
            with pytest.raises(TierUnavailable, match="kept its lock"):
                await fill(tier, range(3, 4))
            assert await tier.remove(chunk(1)[0])
            assert await is_hit(tier, 2)
            with pytest.raises(TierUnavailable, match="kept its lock"):
                async with opened(tmp_path):
                    pass
            await tier.close()


async def test_closed_beside_a_frozen_holder_of_the_lock_nothing_stays_open_once_the_write_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, flock = threading.Event(), fcntl.flock

    def watched(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except BlockingIOError:
            waits.set()
            raise

    async with scanned(tmp_path) as tier:
        with (chunks_of(tmp_path) / ".tiercache" / "ledger").open("r+b") as frozen:
            flock(frozen, fcntl.LOCK_EX)
            monkeypatch.setattr(fcntl, "flock", watched)
            writing = asyncio.create_task(tier.write(*chunk(1), CHUNK_BYTES))
            assert await asyncio.to_thread(waits.wait, 10)
            await tier.close()
            assert not writing.done(), "it waits for the lock"
        await asyncio.wait([writing], timeout=20)
        assert isinstance(writing.exception(), CacheClosed)
    assert not list((chunks_of(tmp_path) / ".tiercache" / "tmp").iterdir()), "no lock"
    assert not half_written(chunks_of(tmp_path))


@pytest.mark.needs("mount")
async def test_a_device_without_a_free_byte_is_served_and_then_evicted(small_device: Path) -> None:
    async with opened(small_device, cap_chunks=1000) as tier:
        await fill(tier, range(1, 31))
    fill_up(small_device)
    async with scanned(small_device, cap_chunks=1000) as tier:
        assert [number for number in range(1, 31) if not await is_hit(tier, number)] == []
        await fill(tier, range(101, 104))
        assert await is_hit(tier, 103)


@pytest.mark.parametrize(("access", "file_mode", "directory_mode"), [("owner", 0o600, 0o700), ("group", 0o660, 0o2770)])
async def test_what_is_stored_is_nobody_elses(tmp_path: Path, access: str, file_mode: int, directory_mode: int) -> None:
    os.umask(os.umask(0o022))
    place = tmp_path / "fresh"
    for _ in range(2):
        async with opened(place, file_access=access) as tier:
            await fill(tier, range(1, 11))
            os.truncate(tier.path(chunk(1)[0]), 4096)
            assert not await is_hit(tier, 1)
            wrong = {
                str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode))
                for path in [place, *place.rglob("*")]
                if stat.S_IMODE(path.stat().st_mode) != (directory_mode if path.is_dir() else file_mode)
            }
            assert wrong == {}
        for name in ["", ".tiercache", "00", ".tiercache/ledger"]:
            (chunks_of(place) / name).chmod(0o755)


@pytest.mark.parametrize(("access", "file_mode"), [("owner", 0o600), ("group", 0o660)])
async def test_chunks_that_are_there_get_the_mode_at_the_opening(tmp_path: Path, access: str, file_mode: int) -> None:
    """An earlier version's, or from before `file_access` was changed."""
    async with opened(tmp_path / "kv") as tier:
        await fill(tier, range(1, 11))
        paths = [Path(tier.path(chunk(number)[0])) for number in range(1, 11)]
    for number, path in enumerate(paths):
        path.chmod(0o644 if number % 2 else 0o600)
    async with scanned(tmp_path / "kv", file_access=access) as tier:
        assert all([await is_hit(tier, number) for number in range(1, 11)])
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {file_mode}
