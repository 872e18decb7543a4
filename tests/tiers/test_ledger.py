"""The count of a directory's bytes, shared by instances, with and without allowances."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT, small_device
from tiercache.testing.processes import stop_process
from tiercache.tiers.files.ledger import Ledger
from tiercache.tiers.files.record import Record, read_record
from tiercache.tiers.files.volume import Volume

__all__ = ["small_device"]

REPOSITORY = Path(__file__).parents[2]
CAP = 1000


@contextmanager
def opened(place: Path, allowance: int = 0, cap: int = CAP) -> Iterator[Ledger]:
    with tempfile.NamedTemporaryFile(dir=place) as pledge:
        ledger = Ledger(place / "ledger", cap, allowance, pledge.fileno())
        yield ledger
        ledger.close()


def counted(place: Path) -> int:
    """What the file says."""
    with opened(place) as ledger:
        return ledger.counted_bytes


def test_a_charge_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        assert ledger.charge(CAP - 1)
        assert not ledger.charge(2)
        assert ledger.used_bytes == counted(tmp_path) == CAP - 1
        assert ledger.charge(1)


def test_what_others_have_taken_off_because_the_record_was_deleted_is_not_taken_off_again(tmp_path: Path) -> None:
    with opened(tmp_path) as other, (tmp_path / "pledge").open("w+b") as pledge:
        ledger = Ledger(tmp_path / "ledger", CAP, pledge=pledge.fileno())
        assert other.charge(300)
        other.settle(300)
        assert ledger.charge(200)  # for a file that will not be made
        (tmp_path / "pledge").unlink()
        assert other.reckon(other.mark(), 300, 0, lambda: 0) == -200
        ledger.correct(-200)
        ledger.close()
        assert counted(tmp_path) == 300


class _Turns:
    """The lock of a ledger, which one thread gets only when another has had it."""

    def __init__(self, ledger: Ledger, waits: str) -> None:
        self._lock = ledger._lock
        self._waits = waits
        self.waiting, self.may_go_on = threading.Event(), threading.Event()

    def acquire(self, timeout: float) -> bool:
        if threading.current_thread().name == self._waits:
            self.waiting.set()
            assert self.may_go_on.wait(10.0)
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


def test_what_one_writer_has_freed_makes_room_for_one_file_and_not_for_two(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        assert ledger.charge(CAP)
        ledger.settle(CAP)
        ledger.announce(100)
        turns = ledger._lock = _Turns(ledger, "evicts")  # type: ignore[assignment]
        evicts = threading.Thread(target=lambda: ledger.charge(100, 100, 100), name="evicts")
        evicts.start()
        assert turns.waiting.wait(10.0)
        ledger.charge(100)
        turns.may_go_on.set()
        evicts.join()
        assert ledger.counted_bytes == CAP


def test_what_others_did_is_known_after_a_refresh_or_a_change(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        one.charge(600)
        assert other.used_bytes == 0, "memory only"
        assert not other.charge(500)
        assert other.used_bytes == 600
        one.correct(-500)
        assert other.refresh()
        assert other.used_bytes == 100


def test_a_refresh_never_waits_for_the_lock(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        one.charge(10)
        with one.locked():
            assert other.refresh() is False
        assert other.used_bytes == 0


def test_an_allowance_is_charged_in_steps_and_spent_alone(tmp_path: Path) -> None:
    with opened(tmp_path, allowance=100) as ledger:
        for spent in range(10, 101, 10):
            assert ledger.charge(10)
            assert ledger.used_bytes == spent
            assert counted(tmp_path) == 100
        ledger.correct(-30)
        assert (ledger.used_bytes, counted(tmp_path)) == (70, 100)
        ledger.correct(-70)
        assert ledger.charge(100)
        assert (ledger.used_bytes, counted(tmp_path)) == (100, 100)
    assert counted(tmp_path) == 100


def test_what_is_credited_beyond_an_allowance_is_everybodys(tmp_path: Path) -> None:
    with opened(tmp_path, allowance=100) as ledger:
        ledger.charge(800)
        ledger.correct(-500)
        assert ledger.used_bytes == 300
        assert counted(tmp_path) == 400


def test_bytes_freed_to_make_room_are_everybodys_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, allowance=100) as ledger:
        ledger.charge(90)
        ledger.release(50)
        assert counted(tmp_path) == 50


def test_steps_shrink_with_the_room_so_that_the_last_bytes_can_be_used(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ledgers = [stack.enter_context(opened(tmp_path, allowance=500)) for _ in range(4)]
        for ledger in ledgers:
            assert ledger.charge(1)
        assert counted(tmp_path) < CAP * 0.6
        assert ledgers[0].charge(400)


def test_unspent_allowance_comes_back_at_the_end_and_after_idleness(tmp_path: Path) -> None:
    with opened(tmp_path, allowance=100) as ledger:
        ledger.charge(10)
        ledger.refresh()
        assert counted(tmp_path) == 100, "it may be spending"
        ledger.refresh()
        assert counted(tmp_path) == ledger.used_bytes == 10
        ledger.charge(5)
        assert counted(tmp_path) > 15
    assert counted(tmp_path) == 15


def test_the_pledge_is_a_little_less_than_what_is_unspent(tmp_path: Path) -> None:
    with (tmp_path / "pledge").open("w+b") as pledge:
        ledger = Ledger(tmp_path / "ledger", 10_000, 1000, pledge.fileno())
        for _ in range(95):
            ledger.charge(10)
            assert 0 <= 1000 - ledger.used_bytes - read_record(pledge.fileno()).pledged_bytes <= 125
        ledger.close()
        assert read_record(pledge.fileno()).pledged_bytes == 0


def test_writes_that_overlap_leave_the_record_at_their_most_until_all_have_ended(tmp_path: Path) -> None:
    with (tmp_path / "pledge").open("w+b") as pledge:
        ledger = Ledger(tmp_path / "ledger", 10_000, pledge=pledge.fileno())

        def standing() -> tuple[int, int]:
            record = read_record(pledge.fileno())
            return record.outstanding_bytes, record.owed_bytes

        ledger.charge(100)
        for _ in range(5):
            ledger.announce(50)
            ledger.charge(100, freed_bytes=50, announced_bytes=50)
            assert standing() == (200, 50)
            ledger.settle(100)
            assert standing() == (200, 50), "one is under way"
        ledger.settle(100)
        assert standing() == (0, 0)
        ledger.charge(100)
        ledger.release(30)
        assert standing() == (100, 0), "credits are not part of a stream of writes"
        ledger.correct(-100)
        assert standing() == (0, 0)
        ledger.close()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.lists(st.tuples(st.integers(0, 2), st.integers(-150, 150)), max_size=60))
def test_the_file_counts_what_is_used_and_what_is_unspent(allowance: int, changes: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = Path(directory)
        pledges = [stack.enter_context((place / str(number)).open("w+b")) for number in range(3)]
        ledgers = [Ledger(place / "ledger", CAP, allowance, pledge.fileno()) for pledge in pledges]
        used = [0, 0, 0]
        for number, amount in changes:
            ledger = ledgers[number]
            if amount > 0:
                used[number] += amount if ledger.charge(amount) else 0
            elif amount < 0:
                freed = min(-amount, used[number])
                used[number] -= freed
                ledger.correct(-freed)
            else:
                ledger.refresh()
            count = counted(place)
            assert sum(used) + sum(read_record(pledge.fileno()).pledged_bytes for pledge in pledges) <= count <= CAP
        for ledger in ledgers:
            ledger.close()
        assert counted(place) == sum(used)


ROUNDS = 100
BUSY = """
import sys
from pathlib import Path
import random
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT
from tiercache.errors import TierFull
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.changes import Victims
from tiercache.tiers.files.volume import Volume

place, first, cap, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
volume = Volume(place, cap, FINGERPRINT, direct=False, durable=False, allowance_bytes=4 * FILE_BYTES)
volume.open()
print("ready", flush=True)
choose = random.Random(first)
mine = []
for number in range(first, first + rounds):
    print(number, flush=True)
    sys.stdin.readline()
    key, payload = chunk(number)
    try:
        mine.append((key, volume.write(key, payload, CHUNK_BYTES, Victims())))
    except TierFull:
        for _ in range(choose.randint(1, 5)):
            if mine:
                volume.delete(*mine.pop(0))
sys.stdin.readline()
volume.close()
"""


def busy(place: Path, first: int, cap: int, rounds: int = ROUNDS) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", BUSY, *map(str, (place, first, cap, rounds))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def physical_bytes(place: Path) -> int:
    """Chunks, and what is half-written."""
    files = [*place.glob("00/*"), *place.glob(".tiercache/tmp/*.*[0-9]")]
    return sum(path.lstat().st_blocks * 512 for path in files)


def physical_bytes_now(place: Path, children: "list[subprocess.Popen[str]]") -> int:
    """As they are at one moment: the processes stand still while we count."""
    for child in children:
        stop_process(child.pid)
    found = physical_bytes(place)
    for child in children:
        child.send_signal(signal.SIGCONT)
    return found


def test_processes_with_allowances_never_exceed_the_cap_together(tmp_path: Path) -> None:
    cap = 20 * FILE_BYTES + 4096
    children = [busy(tmp_path, first, cap) for first in (1000, 2000, 3000)]
    most = 0
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for _ in range(ROUNDS):
        for child in children:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline()
            child.stdin.write("go on\n")
            child.stdin.flush()
        most = max(most, physical_bytes_now(tmp_path, children))
    for child in children:
        child.communicate("end\n")
        assert child.returncode == 0
    assert cap // 2 < most <= cap
    volume = Volume(tmp_path, cap, FINGERPRINT, direct=False, durable=False)
    volume.open()
    assert volume.ledger.used_bytes == physical_bytes(tmp_path) + (tmp_path / "00").stat().st_blocks * 512
    volume.close()


def test_the_allowance_of_a_killed_process_is_given_back_while_others_live(tmp_path: Path) -> None:
    cap = 1000 * FILE_BYTES
    volume = Volume(tmp_path, cap, FINGERPRINT, direct=False, durable=False)
    volume.open()
    with busy(tmp_path, 1, cap, rounds=2) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert [child.stdout.readline() for _ in range(3)] == ["ready\n", "1\n", "2\n"]
        child.kill()
    volume.ledger.refresh()
    charged = volume.ledger.used_bytes
    assert charged >= 4 * FILE_BYTES
    volume.remove_stale_writers()
    left = volume.ledger.used_bytes - physical_bytes(tmp_path) - (tmp_path / "00").stat().st_blocks * 512
    assert 0 <= left <= FILE_BYTES / 2, "all but an eighth of an allowance"
    volume.close()


@pytest.mark.needs("mount")
def test_a_full_device_does_not_keep_what_is_left_of_a_killed_process(small_device: Path) -> None:
    cap = 1000 * FILE_BYTES
    with busy(small_device, 1, cap, rounds=2) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert [child.stdout.readline() for _ in range(3)] == ["ready\n", "1\n", "2\n"]
        child.kill()
    with pytest.raises(OSError, match="No space"), (small_device / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    volume = Volume(small_device, cap, FINGERPRINT, direct=False, durable=False)
    volume.open()
    assert len(list(small_device.glob(".tiercache/tmp/*.lock"))) == 1, "the other one is dead"
    there = physical_bytes(small_device) + (small_device / "00").stat().st_blocks * 512
    assert volume.ledger.used_bytes > there, "what it had charged and not used could not be given back"
    reckoning = volume.begin_reckoning()
    volume.reckon(reckoning, volume.surveyor.scan("00").counted_bytes)
    assert volume.ledger.used_bytes == there
    volume.close()


@pytest.mark.parametrize("content", [b"", b"short", b"another magic and"])
def test_a_file_without_a_count_is_not_trusted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger").write_bytes(content)
    with opened(tmp_path) as ledger:
        assert not ledger.trusted
        assert ledger.used_bytes == 0
    with opened(tmp_path) as ledger:
        assert not ledger.trusted, "whoever comes second knows no more"
        ledger.trust()
    with opened(tmp_path) as ledger:
        assert ledger.trusted


def test_a_count_that_is_lost_meanwhile_goes_on_from_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.charge(500)
        os.truncate(tmp_path / "ledger", 0)
        assert not ledger.charge(501)
        assert ledger.charge(500)


def test_a_closed_ledger_holds_no_lock(tmp_path: Path) -> None:
    with opened(tmp_path, allowance=100) as ledger:
        ledger.charge(10)
        ledger.close()
        ledger.close()
        with pytest.raises(OSError, match="closed"):
            ledger.charge(1)
    with (tmp_path / "ledger").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_was_written_by_a_call_that_failed_is_not_credited_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may lose the answer to a write that it has done."""
    pwrite = os.pwrite

    def done_and_failed(*call: object) -> int:
        pwrite(*call)  # type: ignore[arg-type]
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failed(*call: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for fails, left in (done_and_failed, 400), (failed, 400):
        ledger = Ledger(tmp_path / "ledger", CAP)
        assert ledger.charge(800 - ledger.counted_bytes)
        monkeypatch.setattr(os, "pwrite", fails)
        ledger.release(400)
        monkeypatch.undo()
        assert ledger.refresh()
        assert counted(tmp_path) == left
        ledger.close()


def test_a_record_that_was_written_by_a_call_that_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with tempfile.TemporaryFile(dir=tmp_path) as file:
        record = Record(file.fileno(), 0, synced=True)
        record.update(0, 100, 0)
        monkeypatch.setattr(os, "fdatasync", failed)
        with pytest.raises(OSError, match="Input/output"):
            record.update(0, 10, 0)
        monkeypatch.undo()
        record.update(0, 100, 0)
        assert read_record(file.fileno()).outstanding_bytes == 100
