"""A simulated disk answers as a real tmpfs does, and loses in a power cut what was not synced, and nothing else."""

import errno
import fcntl
import os
import random
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torture.simulation.files import Disk, FileCalls, Torn
from tests.torture.simulation.inodes import File
from tiercache.tiers.files.access import rename_new

ROOT = "/simulated/disk0"
MEBIBYTE = 2**20

NAMES = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "l", "l/a", "none/a", "d/../a", "l/../b", "d/./e"]
LOOKED_UP = [*NAMES, "d/..", "d/.", ".", "l/..", "none/.", "d/", "a/", "l/"]
TARGETS = ["a", "d", "d/e", "l", "none", f"{ROOT}/d", f"{ROOT}/a", "d/../b"]
FLAGS = [
    os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_APPEND, os.O_RDWR, os.O_RDONLY | os.O_NOFOLLOW, os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, os.O_RDONLY | os.O_TRUNC, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
]  # fmt: skip
name = st.sampled_from(NAMES)
looked_up = st.sampled_from(LOOKED_UP)
slot = st.integers(0, 3)
offset = st.sampled_from([0, 1, 100, 4095, 4096, 5000, 8192, 20000])
length = st.sampled_from([0, 1, 17, 4096, 4097, 9000])
content = st.builds(lambda size, seed: random.Random(seed).randbytes(size), length, st.integers(0, 9))
lock = st.sampled_from([fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN])

OPERATIONS = st.one_of(
    st.tuples(st.just("open"), slot, name, st.sampled_from(FLAGS), st.sampled_from([0o600, 0o666, 0o755])),
    st.tuples(st.just("close"), slot),
    st.tuples(st.just("write"), slot, content),
    st.tuples(st.just("pread"), slot, length, offset),
    st.tuples(st.just("pwrite"), slot, content, offset),
    st.tuples(st.just("preadv"), slot, st.lists(length.filter(bool), min_size=1, max_size=3), offset),
    st.tuples(st.just("pwritev"), slot, st.lists(content, max_size=3), offset),
    st.tuples(st.just("ftruncate"), slot, offset),
    st.tuples(st.just("fallocate"), slot, st.just(0), offset, length),
    st.tuples(st.sampled_from(["fsync", "fdatasync", "fstat", "listdir", "scandir"]), slot),
    st.tuples(st.just("flock"), slot, lock),
    st.tuples(st.sampled_from(["stat", "lstat", "readlink", "listdir", "scandir"]), looked_up),
    st.tuples(st.just("unlink"), name),
    st.tuples(st.just("mkdir"), name, st.sampled_from([0o700, 0o777])),
    st.tuples(st.sampled_from(["rename", "replace", "rename_new", "link", "samefile"]), name, name),
    st.tuples(st.just("symlink"), st.sampled_from(TARGETS), name),
    st.tuples(st.sampled_from(["stat_at", "unlink_at", "mkdir_at", "open_at"]), slot, name),
    st.tuples(st.just("rename_at"), slot, name, slot, name),
)


class Side:
    """The calls on one of the two, with what they answer put in a form that can be compared."""

    def __init__(self, system: Any, root: str) -> None:
        self.system = system
        self.root = root
        self.slots: dict[int, int] = {}

    def do(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self, f"do_{call}", lambda *rest: self._plain(call, *rest))(*arguments)
        except OSError as error:
            named = () if call in ("rename_new", "samefile") else (error.filename, error.filename2)
            return (errno.errorcode[error.errno or 0], *[self._relative(path) for path in named])

    def leave(self) -> None:
        for descriptor in self.slots.values():
            self.system.close(descriptor)

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting = [""]
        while waiting:
            path = waiting.pop()
            status = self.system.lstat(self.root + path)
            found[path] = self._status(status)
            if stat.S_ISDIR(status.st_mode):
                waiting += [f"{path}/{each}" for each in self.system.listdir(self.root + path)]
            elif stat.S_ISREG(status.st_mode):
                descriptor = self.system.open(self.root + path, os.O_RDONLY)
                found[path] += (self.system.pread(descriptor, MEBIBYTE, 0),)
                self.system.close(descriptor)
        return found

    def do_open(self, slot: int, path: str, flags: int, mode: int) -> None:
        self._keep(slot, self.system.open(f"{self.root}/{path}", flags, mode))

    def do_open_at(self, slot: int, path: str) -> None:
        self._keep(slot, self.system.open(path, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._place(slot)))

    def do_rename_at(self, slot: int, path: str, to_slot: int, to: str) -> None:
        self.system.rename(path, to, src_dir_fd=self._place(slot), dst_dir_fd=self._place(to_slot))

    def do_close(self, slot: int) -> None:
        self.system.close(self.slots.pop(slot, 999_999))

    def do_preadv(self, slot: int, lengths: list[int], offset: int) -> Any:
        buffers = [bytearray(length) for length in lengths]
        return self.system.preadv(self._place(slot), buffers, offset), buffers

    def do_fstat(self, slot: int) -> Any:
        return self._status(self.system.fstat(self._place(slot)))

    def do_stat_at(self, slot: int, path: str) -> Any:
        return self._status(self.system.stat(path, dir_fd=self._place(slot), follow_symlinks=False))

    def do_unlink_at(self, slot: int, path: str) -> None:
        self.system.unlink(path, dir_fd=self._place(slot))

    def do_mkdir_at(self, slot: int, path: str) -> None:
        self.system.mkdir(path, 0o700, dir_fd=self._place(slot))

    def do_stat(self, path: str) -> Any:
        return self._status(self.system.stat(self._place(path)))

    def do_lstat(self, path: str) -> Any:
        return self._status(self.system.lstat(Path(self._place(path))))

    def do_listdir(self, place: int | str) -> Any:
        return sorted(self.system.listdir(self._place(place)))

    def do_scandir(self, place: int | str) -> Any:
        with self.system.scandir(self._place(place)) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
            return [(each.name, self._relative(each.path), self._status(each.stat(follow_symlinks=False))) for each in found]

    def do_readlink(self, path: str) -> Any:
        return self._relative(self.system.readlink(self._place(path)))

    def do_symlink(self, target: str, path: str) -> None:
        self.system.symlink(target.replace(ROOT, self.root), self._place(path))

    def do_samefile(self, one: str, other: str) -> bool:
        return os.path.samestat(*(self.system.stat(self._place(path)) for path in (one, other)))

    def _plain(self, call: str, first: int | str, *rest: Any) -> Any:
        places = [self._place(each) if isinstance(each, str) else each for each in rest]
        return getattr(self.system, call)(self._place(first), *places)

    def _place(self, place: int | str) -> Any:
        """The descriptor in a slot, or one that nobody has opened; or the path below the root."""
        return self.slots.get(place, 999_999) if isinstance(place, int) else f"{self.root}/{place}"

    def _keep(self, slot: int, descriptor: int) -> None:
        if slot in self.slots:
            self.system.close(self.slots[slot])
        self.slots[slot] = descriptor

    def _status(self, status: os.stat_result) -> Any:
        sizes = (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_blocks)
        if stat.S_ISLNK(status.st_mode):
            sizes = (0, 0)  # it says where the root is
        return status.st_mode, status.st_nlink, status.st_uid, status.st_gid, *sizes

    def _relative(self, path: object) -> object:
        return path.replace(self.root, "ROOT") if isinstance(path, str) else None


class Real:
    """`os` and what of C tiercache calls beside it."""

    flock = staticmethod(fcntl.flock)
    rename_new = staticmethod(rename_new)
    fallocate = staticmethod(lambda descriptor, mode, offset, length: os.posix_fallocate(descriptor, offset, length))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@given(st.lists(OPERATIONS, max_size=60))
@settings(max_examples=400, deadline=None)
def test_it_answers_each_call_as_a_tmpfs_does(operations: list[tuple[Any, ...]]) -> None:
    place = tempfile.mkdtemp(dir="/dev/shm")
    os.chmod(place, 0o755)
    real, simulated = Side(Real(), place), Side(FileCalls([Disk(ROOT, 64 * MEBIBYTE)]), ROOT)
    try:
        for operation in operations:
            assert simulated.do(*operation) == real.do(*operation), operation
        assert simulated.everything() == real.everything()
    finally:
        real.leave()
        shutil.rmtree(place)


@pytest.fixture
def disk() -> Disk:
    return Disk(ROOT, 64 * MEBIBYTE, can_lose_power=True)


@pytest.fixture
def calls(disk: Disk) -> FileCalls:
    """The calls of the process "one"."""
    calls = FileCalls([disk])
    calls.process = "one"
    return calls


def stored(calls: FileCalls, name: str, content: bytes, *, sync: bool = False) -> int:
    """The descriptor of a new file."""
    descriptor = calls.open(f"{ROOT}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    calls.pwrite(descriptor, content, 0)
    if sync:
        calls.fdatasync(descriptor)
    return descriptor


def test_who_waits_for_a_lock_lets_others_run_until_it_is_free(calls: FileCalls) -> None:
    mine = stored(calls, "lock", b"")
    calls.flock(mine, fcntl.LOCK_EX)
    calls.process = "two"
    theirs = calls.open(f"{ROOT}/lock", os.O_RDWR)
    waited = []

    def before(call: str, disk: Disk, target: object) -> None:
        if call == "flock-wait":
            waited.append(target)
            if len(waited) == 3:
                calls.die("one")

    calls.before = before
    calls.flock(theirs, fcntl.LOCK_EX)
    assert waited == [f"{ROOT}/lock"] * 3


def test_each_process_has_descriptors_of_its_own(calls: FileCalls) -> None:
    mine = stored(calls, "mine", b"mine")
    calls.process = "two"
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.fstat(mine)
    assert stored(calls, "theirs", b"theirs") == mine == 1_000_000
    calls.process = "one"
    assert calls.pread(mine, 9, 0) == b"mine"


def test_a_file_without_a_name_lasts_until_it_is_closed(disk: Disk, calls: FileCalls) -> None:
    descriptor = stored(calls, "a", bytes(8192))
    calls.unlink(f"{ROOT}/a")
    assert disk.used_blocks == 3
    assert calls.pread(descriptor, 4, 0) == bytes(4) and calls.fstat(descriptor).st_nlink == 0
    calls.close(descriptor)
    assert disk.used_blocks == 1


def test_who_dies_leaves_locks_and_nameless_files_and_nothing_else(disk: Disk, calls: FileCalls) -> None:
    calls.flock(stored(calls, "kept", bytes(4096)), fcntl.LOCK_EX)
    stored(calls, "nameless", bytes(4096))
    calls.unlink(f"{ROOT}/nameless")
    before = disk.changes
    calls.die("one")
    assert (disk.used_blocks, disk.changes) == (2, before)
    calls.process = "two"
    calls.flock(calls.open(f"{ROOT}/kept", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    calls.process = "one"
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.fstat(1_000_000)


def test_a_full_disk_takes_what_fits_and_then_nothing() -> None:
    disk = Disk(ROOT, 4 * 4096)
    calls = FileCalls([disk])
    descriptor = stored(calls, "a", bytes(4096))
    assert calls.pwrite(descriptor, bytes(5 * 4096), 100) == 3 * 4096 - 100
    with pytest.raises(OSError, match="No space left"):
        calls.pwrite(descriptor, b"x", 3 * 4096)
    with pytest.raises(OSError, match="No space left"):
        calls.mkdir(f"{ROOT}/d")
    assert calls.pwrite(descriptor, b"x", 0) == 1
    assert calls.fstat(descriptor).st_blocks == 24 and calls.statvfs(ROOT).f_bavail == 0
    calls.ftruncate(descriptor, 4097)
    assert disk.free_blocks == 1
    with pytest.raises(OSError, match="No space left"):
        calls.fallocate(descriptor, 0, 0, 4 * 4096)
    assert disk.free_blocks == 1 and calls.fstat(descriptor).st_size == 4097


def test_holes_take_no_room(disk: Disk, calls: FileCalls) -> None:
    descriptor = stored(calls, "a", b"")
    calls.ftruncate(descriptor, 2**40)
    calls.pwrite(descriptor, b"x", 10 * 4096)
    assert calls.fstat(descriptor).st_blocks == 8 and calls.fstat(descriptor).st_size == 2**40
    assert calls.pread(descriptor, 3, 10 * 4096 - 1) == b"\0x\0" and disk.used_blocks == 2


def test_direct_io_wants_whole_blocks(calls: FileCalls) -> None:
    descriptor = calls.open(f"{ROOT}/a", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert calls.pwritev(descriptor, [bytes(4096), bytes(4096)], 4096) == 8192
    with pytest.raises(OSError, match="Invalid argument"):
        calls.pwrite(descriptor, bytes(100), 0)
    with pytest.raises(OSError, match="Invalid argument"):
        calls.preadv(descriptor, [bytearray(4096)], 512)


def test_a_call_does_as_little_as_it_is_told(calls: FileCalls) -> None:
    descriptor = stored(calls, "a", b"0123456789")
    orders: list[object] = []
    calls.before = lambda call, disk, target: orders.pop()
    orders[:] = [4]
    assert calls.pread(descriptor, 9, 0) == b"0123"
    orders[:] = [5]
    assert calls.preadv(descriptor, [bytearray(3), room := bytearray(4)], 0) == 5 and room == b"34\0\0"
    orders[:] = [3]
    assert calls.pwritev(descriptor, [b"ab", b"cd"], 0) == 3
    orders[:] = [Torn(1)]
    with pytest.raises(OSError, match="Input/output error"):
        calls.pwrite(descriptor, b"XY", 8)
    calls.before = lambda call, disk, target: None
    assert calls.pread(descriptor, 99, 0) == b"abc34567X9"


def test_a_fault_leaves_no_trace(disk: Disk, calls: FileCalls) -> None:
    descriptor = stored(calls, "a", b"a")
    before = disk.changes

    def fail(call: str, disk: Disk, target: object) -> None:
        raise OSError(errno.EIO, call, target)

    calls.before = fail
    for call in (
        lambda: calls.pwrite(descriptor, b"b", 0),
        lambda: calls.rename(f"{ROOT}/a", f"{ROOT}/b"),
        lambda: calls.open(f"{ROOT}/b", os.O_CREAT | os.O_WRONLY),
        lambda: calls.close(descriptor),
    ):
        with pytest.raises(OSError, match="Errno 5"):
            call()
    assert (disk.changes, disk.open_descriptors) == (before, 1)


def test_nothing_is_renamed_or_linked_to_another_disk() -> None:
    calls = FileCalls([Disk(ROOT, MEBIBYTE), Disk("/simulated/disk1", MEBIBYTE)])
    stored(calls, "a", b"a")
    for call in (calls.rename, calls.rename_new, calls.link):
        with pytest.raises(OSError, match="cross-device"):
            call(f"{ROOT}/a", "/simulated/disk1/a")
    assert calls.stat(ROOT).st_dev != calls.stat("/simulated/disk1").st_dev


NEW, OLD = random.Random(1).randbytes(8192), random.Random(2).randbytes(8192)
Left = dict[str, bytes | None]
"""Paths below the root, and the contents of those that are files."""


def left_after_power_cuts(write: Callable[[FileCalls, int], object]) -> Iterator[Left]:
    """What is left, for each seed, of what a process wrote before the power was cut."""
    for seed in range(300):
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        write(calls, seed)
        calls.die("one")
        disk.cut_power(random.Random(seed))
        assert disk.used_blocks == sum(inode.block_count for inode in {inode for _, inode in disk.walk()})
        files = {path: isinstance(inode, File) for path, inode in disk.walk()}
        names = Counter(inode for _, inode in disk.walk())
        for path, inode in disk.walk():
            expected = names[inode] if files[path] else 2 + sum(stat.S_ISDIR(each.mode) for each in inode.names.values())
            assert inode.links == expected
        found = {path: inode.read(0, inode.size) if isinstance(inode, File) else None for path, inode in disk.walk()}
        yield {path[len(ROOT) + 1 :]: content for path, content in found.items()}


def test_what_was_synced_survives_a_power_cut() -> None:
    def write(calls: FileCalls, seed: int) -> None:
        calls.mkdir(f"{ROOT}/d")
        stored(calls, "d/a", NEW, sync=True)
        stored(calls, "d/b", OLD)
        calls.rename(f"{ROOT}/d/b", f"{ROOT}/d/c")

    assert all(left["d/a"] == NEW for left in left_after_power_cuts(write))


def test_a_rename_that_was_not_synced_has_happened_or_not() -> None:
    def write(calls: FileCalls, seed: int) -> None:
        stored(calls, "new", NEW, sync=True)
        stored(calls, "old", OLD, sync=True)
        calls.replace(f"{ROOT}/new", f"{ROOT}/old")

    outcomes = list(left_after_power_cuts(write))
    not_yet, happened = {"": None, "new": NEW, "old": OLD}, {"": None, "old": NEW}
    assert not_yet in outcomes and happened in outcomes
    assert all(left in (not_yet, happened) for left in outcomes)


def test_a_rename_survives_once_the_file_or_its_directory_is_synced() -> None:
    def write(calls: FileCalls, seed: int) -> None:
        stored(calls, "first", b"")
        descriptor = stored(calls, "a", NEW, sync=True)
        calls.rename(f"{ROOT}/a", f"{ROOT}/b")
        calls.fsync(descriptor if seed % 2 else calls.open(ROOT, os.O_RDONLY | os.O_DIRECTORY))

    assert all(left == {"": None, "first": b"", "b": NEW} for left in left_after_power_cuts(write))


def test_names_survive_in_their_order() -> None:
    def write(calls: FileCalls, seed: int) -> None:
        stored(calls, "0", b"")
        calls.mkdir(f"{ROOT}/1")
        calls.link(f"{ROOT}/0", f"{ROOT}/1/2")
        calls.unlink(f"{ROOT}/0")

    seen = {tuple(sorted(left)) for left in left_after_power_cuts(write)}
    assert seen == {("",), ("", "0"), ("", "0", "1"), ("", "0", "1", "1/2"), ("", "1", "1/2")}


def test_blocks_that_were_not_synced_are_new_old_or_torn_and_new_ones_perhaps_zero() -> None:
    def write(calls: FileCalls, seed: int) -> None:
        calls.pwrite(stored(calls, "a", OLD, sync=True), NEW + NEW, 4096)

    def kind(found: bytes, new: bytes, old: bytes) -> str:
        if found in (new, old):
            return "new" if found == new else "old"
        assert any(found == new[:cut] + old[cut:] for cut in range(512, 4096, 512))
        return "torn"

    overwritten, appended, sizes = set(), set(), set()
    for left in left_after_power_cuts(write):
        found = left["a"]
        assert found is not None and found[:4096] == OLD[:4096]
        sizes.add(len(found))
        overwritten.add(kind(found[4096:8192], NEW[:4096], OLD[4096:]))
        if len(found) > 8192:
            appended.add(kind(found[8192:12288], NEW[4096:], bytes(4096)))
    assert sizes == {8192, 20480} and overwritten == appended == {"new", "old", "torn"}
