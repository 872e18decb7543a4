"""The byte counter of a directory that processes share, and what each of them has reserved."""

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_stack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers.processes import stop_process
from tests.tiers.conftest import fill_up
from tests.tiers.opened import fails
from tests.tiers.others import REPOSITORY
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT, physical_bytes
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.access import OWNER
from tiercache.tiers.files.capacity import Capacity, CounterLost, counted_in
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.owners import Owner

CAP = 1000


def made(place: Path, step: int = 0, cap: int = CAP, *, synced: bool = False) -> Capacity:
    (place / ".tiercache" / "tmp").mkdir(parents=True, exist_ok=True)
    owner = Owner(place, ())
    owner.settle(OWNER)
    return Capacity(counter(place), cap, step, owner, synced=synced)


@contextmanager
def opened(place: Path, step: int = 0, cap: int = CAP) -> Iterator[Capacity]:
    capacity = made(place, step, cap)
    capacity.trust()
    yield capacity
    capacity.close()


def counter(place: Path) -> Path:
    return place / ".tiercache" / "ledger"


def locks(place: Path) -> list[Path]:
    return list((place / ".tiercache" / "tmp").glob("*.lock"))


def remove_dead(place: Path) -> int:
    """Remove what dead processes left. Return the number of files."""
    owner = Owner(place, ())
    owner.settle(OWNER)
    try:
        return owner.remove_dead()
    finally:
        owner.leave()


def write(capacity: Capacity, amount: int) -> bool:
    """What a write of so many bytes does."""
    if not capacity.reserve(amount):
        return False
    capacity.commit(amount)
    capacity.settle(amount)
    return True


def delete(capacity: Capacity, amount: int) -> None:
    with capacity.deleting() as freeing, freeing(amount):
        pass


def idle(capacity: Capacity) -> None:
    """As after a second in which nothing was written, and another one."""
    capacity.catch_up()
    capacity.catch_up()


def test_steps_shrink_with_the_room_so_that_the_last_bytes_can_be_used(tmp_path: Path) -> None:
    with ExitStack() as stack:
        several = [stack.enter_context(opened(tmp_path, step=500)) for _ in range(4)]
        for capacity in several:
            assert write(capacity, 1)
        counted_bytes = counted_in(counter(tmp_path))
        assert counted_bytes is not None and counted_bytes < CAP * 0.6
        assert write(several[0], 400)


def let_enter(function: str, number: int) -> None:
    """Let other threads run until so many have called `function` and have not returned."""

    def entered() -> int:
        stacks = (walk_stack(frame) for frame in sys._current_frames().values())
        return sum(any(frame.f_code.co_name == function for frame, _ in stack) for stack in stacks)

    while entered() < number:
        time.sleep(0)


def test_writes_that_waited_for_the_count_together_reserve_one_step(tmp_path: Path) -> None:
    """A mount that hangs for a moment makes them wait."""
    with opened(tmp_path, step=100) as capacity, counter(tmp_path).open() as other, ThreadPoolExecutor(8) as threads:
        fcntl.flock(other, fcntl.LOCK_EX)
        writes = [threads.submit(write, capacity, 10) for _ in range(8)]
        let_enter("_charge", 8)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert all(written.result() for written in writes)
        assert counted_in(counter(tmp_path)) == 100


def test_what_was_freed_for_a_file_suffices_for_it_above_a_lowered_cap(tmp_path: Path) -> None:
    with opened(tmp_path) as capacity:
        write(capacity, CAP)
    with opened(tmp_path, cap=CAP // 2) as capacity:
        assert not write(capacity, 100)
        with capacity.deleting(reuse_bytes=100) as freeing, freeing(150):
            pass
        assert capacity.reserve(100)
        capacity.cancel(100)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.lists(st.tuples(st.integers(0, 2), st.integers(-150, 150)), max_size=60))
def test_the_file_counts_what_is_used_and_what_is_reserved(step: int, changes: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = Path(directory)
        several = [stack.enter_context(opened(place, step)) for _ in range(3)]
        used = [0, 0, 0]
        for number, amount in changes:
            capacity = several[number]
            if amount > 0:
                used[number] += amount if write(capacity, amount) else 0
            elif amount < 0:
                freed = min(-amount, used[number])
                used[number] -= freed
                delete(capacity, freed)
            else:
                capacity.catch_up()
            for each in several:
                each.refresh()
            reserved = sum(each.counted_bytes - each.used_bytes for each in several)
            assert sum(used) + reserved == several[0].counted_bytes <= CAP
        for each in several:
            each.close()
        assert counted_in(counter(place)) == sum(used)


# Recounts


def test_a_recount_counts_what_gets_its_name_meanwhile(tmp_path: Path) -> None:
    with opened(tmp_path) as capacity:
        write(capacity, 300)
        assert capacity.reserve(100)
        capacity.commit(100)
        mark = capacity.mark()
        capacity.settle(100)  # in a directory that is scanned already
        write(capacity, 50)
        assert capacity.recount(mark, 300) == 0
        assert capacity.recount(mark, 200) == -100
        assert capacity.used_bytes == 350


def test_a_recount_does_not_take_off_twice_what_is_being_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as capacity:
        write(capacity, 300)
        with capacity.deleting() as freeing:
            mark = capacity.mark()
            with freeing(100):
                pass
            assert capacity.recount(mark, 200) == 0, "it is gone, and not yet taken off"
        assert capacity.used_bytes == 200


@pytest.mark.parametrize("when", ["before", "meanwhile", "deletes meanwhile"])
def test_nothing_is_recounted_while_another_process_uses_or_deletes_bytes(tmp_path: Path, when: str) -> None:
    with opened(tmp_path, step=100) as capacity, opened(tmp_path, step=100) as other:
        write(other, 300)
        if when != "before":
            idle(other)
        mark = capacity.mark()
        if when == "meanwhile":
            write(other, 10)
            idle(other)
        with other.deleting() if when == "deletes meanwhile" else nullcontext():
            assert capacity.recount(mark, 0) == 0
        idle(other)
        assert capacity.recount(capacity.mark(), 0) < 0
        assert capacity.used_bytes == 0


def test_files_deleted_by_others_do_not_stay_counted_beside_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are always active, so nothing would ever be recounted."""
    with opened(tmp_path) as one, opened(tmp_path) as other:
        assert write(one, 400) and write(other, 500)
        found_bytes = 90
        assert one.recount(one.mark(), found_bytes) == 0
        assert other.refresh() and not other.trusted, "nothing is written now"
        for capacity in (one, other):
            idle(capacity)
        assert one.recount(one.mark(), found_bytes) == found_bytes - 900
        assert counted_in(counter(tmp_path)) == found_bytes, "trusted again"

        # A process that is stopped in a write does not keep the others from writing.
        began_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began_s + 1000.0)
        assert write(one, 400) and write(other, 500)
        assert one.recount(one.mark(), found_bytes) == 0
        assert counted_in(counter(tmp_path)) is None
        monkeypatch.setattr(time, "monotonic", lambda: began_s + 1030.0)
        assert one.recount(one.mark(), found_bytes) == 0
        assert counted_in(counter(tmp_path)) == found_bytes + 900


def test_other_hosts_see_that_bytes_are_used_before_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not synced may stay in this host's memory: a recount elsewhere would take nobody for active."""
    seen: list[tuple[bytes, int | None]] = []
    capacity = made(tmp_path, step=100, synced=True)
    capacity.trust()

    def sync(descriptor: int) -> None:
        seen.append((os.pread(descriptor, 64, 0), counted_in(counter(tmp_path))))

    monkeypatch.setattr(os, "fdatasync", sync)
    write(capacity, 10)
    record, counted_bytes = seen[0]
    assert counted_bytes == 0, "before the counter is changed"
    assert record == b"1", "active"
    capacity.close()


# Files that were lost, or never had a content


@pytest.mark.parametrize("content", [b"", b"short", b"another magic and"])
def test_a_file_without_a_count_is_not_trusted(tmp_path: Path, content: bytes) -> None:
    counter(tmp_path).parent.mkdir()
    counter(tmp_path).write_bytes(content)
    for knows in (False, True):
        capacity = made(tmp_path)
        assert not capacity.trusted, "who comes second knows no more"
        assert capacity.used_bytes == 0
        if knows:
            capacity.trust()
        capacity.close()
    capacity = made(tmp_path)
    assert capacity.trusted
    capacity.close()


@pytest.mark.parametrize("loss", [lambda path: os.truncate(path, 0), os.unlink], ids=["emptied", "deleted"])
def test_a_count_that_is_lost_meanwhile_is_noticed(tmp_path: Path, loss: object) -> None:
    with opened(tmp_path) as capacity:
        write(capacity, 500)
        loss(counter(tmp_path))  # type: ignore[operator]
        with pytest.raises(CounterLost):
            write(capacity, 1)


def test_a_process_whose_lock_file_is_deleted_while_it_waits_for_the_count_gives_nothing_back(tmp_path: Path) -> None:
    """A recount that ended before it got the count may have left out its bytes."""
    with opened(tmp_path) as capacity, counter(tmp_path).open() as other, ThreadPoolExecutor(1) as threads:
        assert write(capacity, 100)
        fcntl.flock(other, fcntl.LOCK_EX)
        deleting = threads.submit(delete, capacity, 100)
        let_enter("lock_within", 1)
        for lock in locks(tmp_path):
            lock.unlink()
        fcntl.flock(other, fcntl.LOCK_UN)
        deleting.result()
        assert counted_in(counter(tmp_path)) == 100


def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path, cap=CAP * 1000) as capacity:
        write(capacity, 20_000)
        lock = tmp_path / ".tiercache" / "tmp" / f"{'ab' * 16}.lock"
        lock.write_bytes(b"1")
        temporary = lock.with_suffix(".0")
        temporary.write_bytes(bytes(8192))
        assert capacity.recount(capacity.mark(), 0) == 0, "its file may get its name at any moment"
        assert remove_dead(tmp_path) == 1
        assert not lock.exists() and not temporary.exists()
        assert capacity.used_bytes == 20_000
        assert capacity.recount(capacity.mark(), 0) < 0


def test_a_directory_of_an_earlier_version_is_opened(tmp_path: Path) -> None:
    (tmp_path / ".tiercache" / "tmp").mkdir(parents=True)
    counter(tmp_path).write_bytes(struct.pack("<8sQQQ", b"TIERLEDG", 300, 1000, 700))
    lock = tmp_path / ".tiercache" / "tmp" / f"{'ab' * 16}.lock"
    lock.write_bytes(struct.pack("<8sQQQ", b"TIERRECD", 100, 50, 50))
    with opened(tmp_path, step=50) as capacity:
        assert capacity.used_bytes == 300
        assert not capacity.mark().is_alone, "nobody knows what it does"
        remove_dead(tmp_path)
        assert not lock.exists()
        assert capacity.used_bytes == 300, "a scan finds what it had reserved"
        assert capacity.recount(capacity.mark(), 200) == -100


def test_closed_beside_a_write_that_is_under_way_it_ends_with_that(tmp_path: Path) -> None:
    with opened(tmp_path, step=100) as capacity:
        assert capacity.reserve(10)
        capacity.close()
        assert len(locks(tmp_path)) == 1
        with pytest.raises(CounterLost):
            capacity.commit(10)
        capacity.cancel(10)
        assert locks(tmp_path) == []
        assert counted_in(counter(tmp_path)) == 0


def test_closed_beside_a_deletion_that_is_under_way_it_gives_back_what_that_frees(tmp_path: Path) -> None:
    with opened(tmp_path) as capacity:
        write(capacity, 100)
        with capacity.deleting() as freeing:
            capacity.close()
            assert locks(tmp_path), "others could recount while bytes become free"
            with freeing(60):
                pass
        assert counted_in(counter(tmp_path)) == 40
        assert not locks(tmp_path)


def test_a_deletion_that_begins_in_a_closed_one_beside_another_gives_back_what_it_frees(tmp_path: Path) -> None:
    """A detached tier still deletes what a `forget` has queued."""
    with opened(tmp_path) as capacity:
        write(capacity, 100)
        with capacity.deleting(forced=True) as freeing:
            capacity.close()
            with capacity.deleting(forced=True) as freeing_later, freeing_later(40):
                pass
            with freeing(60):
                pass
        assert counted_in(counter(tmp_path)) == 0
        with pytest.raises(CounterLost), capacity.deleting(forced=True):
            pass


def test_nothing_is_deleted_that_a_closed_count_keeps(tmp_path: Path) -> None:
    """Neither after the end, nor at an end for which an idle process waits."""
    with opened(tmp_path) as capacity:
        write(capacity, 100)
        idle(capacity)
        with counter(tmp_path).open("r+b") as file, ThreadPoolExecutor(1) as threads:
            fcntl.flock(file, fcntl.LOCK_EX)
            reserving = threads.submit(capacity.reserve, 10)
            while not capacity._files.locked():
                pass
            capacity.close()
            with pytest.raises(CounterLost), capacity.deleting(forced=True):
                pass
            fcntl.flock(file, fcntl.LOCK_UN)
            assert reserving.result()
            capacity.cancel(10)
        assert locks(tmp_path) == []
        assert counted_in(counter(tmp_path)) == 100


def test_a_recount_knows_the_size_of_a_file_while_it_is_unlinked(tmp_path: Path) -> None:
    """Another process may have stored the chunk in another size than the index of this one has."""
    with opened(tmp_path) as capacity:
        write(capacity, 900)
        mark = capacity.mark()
        with capacity.deleting() as freeing, freeing(800):
            assert capacity.recount(mark, 100) == 0, "it is gone, and not yet taken off"
        assert capacity.used_bytes == 100


def test_what_cannot_be_given_back_at_the_end_is_found_by_a_scan(tmp_path: Path) -> None:
    with opened(tmp_path, step=100) as capacity:
        write(capacity, 10)
        with counter(tmp_path).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            capacity.close()
    assert counted_in(counter(tmp_path)) == 100
    with opened(tmp_path) as capacity:
        assert capacity.recount(capacity.mark(), 10) == -90
        assert len(locks(tmp_path)) == 1


def test_a_reservation_that_fails_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes wait together. The first one charges a step, and the counter cannot be written for the second."""
    pwrites = iter([os.pwrite])
    with opened(tmp_path, step=100) as capacity, counter(tmp_path).open() as other, ThreadPoolExecutor(2) as threads:
        write(capacity, 60)
        fcntl.flock(other, fcntl.LOCK_EX)
        writes = [threads.submit(write, capacity, 90) for _ in range(2)]
        let_enter("_charge", 2)
        monkeypatch.setattr(os, "pwrite", lambda *call: next(pwrites, fails)(*call))
        fcntl.flock(other, fcntl.LOCK_UN)
        failures = [written.exception() for written in writes]
        assert sorted(map(type, failures), key=str) == [type(None), OSError]
        assert (capacity.used_bytes, capacity._in_flight_bytes) == (150, 0)
        with pytest.raises(OSError, match="Input/output error"):
            capacity.reserve(90)  # 50 of which are left of the step
        assert (capacity.used_bytes, capacity._in_flight_bytes) == (150, 0)
        monkeypatch.undo()


def test_what_a_failed_call_has_written_is_not_given_back_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may lose the answer to a write that it has done."""
    pwrite = os.pwrite

    def done_and_failed(*call: object) -> None:
        pwrite(*call)  # type: ignore[arg-type]
        fails()

    for way in (done_and_failed, fails):
        with opened(tmp_path) as capacity:
            write(capacity, 800 - capacity.counted_bytes)
            monkeypatch.setattr(os, "pwrite", way)
            delete(capacity, 400)
            monkeypatch.undo()
            idle(capacity)
            assert capacity.used_bytes == counted_in(counter(tmp_path)) == 400


# Real processes

BUSY = """
import sys
from pathlib import Path
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT, physical_bytes
from tiercache.errors import TierFull
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.chunk_files import ChunkFiles

place, first, cap, step = Path(sys.argv[1]), *map(int, sys.argv[2:])
directory = ChunkFiles(place, cap, FINGERPRINT, direct=False, durable=False, step_bytes=step)
directory.open()
mine = []
print("ready", flush=True)
for number in range(first, first + 100_000):
    key, payload = chunk(number)
    while True:
        try:
            mine.append((key, directory.write(key, payload, CHUNK_BYTES)))
            break
        except TierFull:
            if not mine:
                break
            directory.delete_all([mine.pop(0)], FILE_BYTES)
    if number % 7 == 0 and mine:
        directory.delete(mine.pop(0)[0])
    print(number, flush=True)
"""


def busy(place: Path, first: int, cap: int, step: int) -> "subprocess.Popen[str]":
    """A process that writes chunks, and deletes its own when there is no room."""
    command = [sys.executable, "-c", BUSY, *map(str, (place, first, cap, step))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def follow(child: "subprocess.Popen[str]", chunks: int) -> None:
    for _ in range(chunks):
        assert child.stdout is not None and child.stdout.readline()


def kill(child: "subprocess.Popen[str]") -> None:
    with child:
        child.kill()


def physical_bytes_now(place: Path, children: "list[subprocess.Popen[str]]") -> int:
    """As they are at one moment: the processes stand still while we count."""
    for child in children:
        stop_process(child.pid)
    found = physical_bytes(place)
    for child in children:
        child.send_signal(signal.SIGCONT)
    return found


def directory_bytes(place: Path) -> int:
    return (place / "00").stat().st_blocks * 512


def new_directory_bytes(place: Path) -> int:
    """What the counter has of a directory until a scan. One of 100 chunks has grown to 16 KiB on ext4."""
    directory = place.with_name("empty")
    directory.mkdir()
    try:
        return directory.stat().st_blocks * 512
    finally:
        directory.rmdir()


def test_killed_at_any_instant_processes_stay_below_the_cap_and_lose_about_a_step_each(tmp_path: Path) -> None:
    """A step, and what was freed or reserved for a file that is not there yet. After a restart nothing is lost."""
    cap, step = 128 * FILE_BYTES, 6 * FILE_BYTES
    choose = random.Random()
    children = [busy(tmp_path, 100_000 * number, cap, step) for number in range(1, 4)]
    most, killed = 0, 0
    survivor = ChunkFiles(tmp_path, cap, FINGERPRINT, direct=False, durable=False, step_bytes=step)
    survivor.open()
    try:
        for child in children:
            follow(child, 60)
        while children:
            for child in children:
                follow(child, choose.randint(1, 30))
            most = max(most, physical_bytes_now(tmp_path, children))
            kill(children.pop(choose.randrange(len(children))))
            killed += 1
            if killed <= 9:
                children.append(busy(tmp_path, 100_000 * (killed + 3), cap, step))
                follow(children[-1], 1)
        assert cap // 2 < most <= cap
        paths = list(tmp_path.glob("??/*"))[:4]
        assert paths
        for path in paths:
            assert survivor.delete(bytes.fromhex(path.name))
        survivor.write(*chunk(1), CHUNK_BYTES)
        survivor.capacity.refresh()
        there = physical_bytes(tmp_path) + new_directory_bytes(tmp_path)
        used = survivor.capacity.used_bytes
        assert there <= used <= there + killed * (step + 2 * FILE_BYTES), (there, used, killed, step)
        assert len(locks(tmp_path)) == 1
    finally:
        for child in children:
            kill(child)
        survivor.close()
    files = ChunkFiles(tmp_path, cap, FINGERPRINT, direct=False, durable=False, step_bytes=step)
    files.open()
    mark, directories = files.begin_scan()
    files.capacity.recount(mark, sum(files.scan(name).counted_bytes for name in directories))
    assert files.capacity.counted_bytes == physical_bytes(tmp_path) + directory_bytes(tmp_path)
    files.close()


@pytest.mark.needs("mount")
def test_a_full_device_does_not_keep_what_is_left_of_a_killed_process(small_device: Path) -> None:
    cap, step = 1000 * FILE_BYTES, 10 * FILE_BYTES
    child = busy(small_device, 1, cap, step)
    follow(child, 3)
    kill(child)
    fill_up(small_device)
    files = ChunkFiles(small_device, cap, FINGERPRINT, direct=False, durable=False)
    files.open()
    assert len(locks(small_device)) == 1, "the other one is dead"
    there = physical_bytes(small_device) + directory_bytes(small_device)
    assert there <= files.capacity.used_bytes <= there + step + 2 * FILE_BYTES, "what it had reserved is still counted"
    mark, _ = files.begin_scan()
    files.capacity.recount(mark, files.scan("00").counted_bytes)
    assert files.capacity.used_bytes == there
    files.close()
