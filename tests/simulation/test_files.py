"""A simulated disk answers as a real tmpfs does, and loses in a power cut what was not synced, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core.keys import KEY_BYTES
from tiercache.testing.contract import page_aligned
from tiercache.testing.simulation.files import Disk, FileCalls, Torn
from tiercache.tiers.files import directory as directory_module
from tiercache.tiers.files import format as chunk_format
from tiercache.tiers.files.chunk_files import ChunkFiles

ROOT = "/simulated/disk0"
MEBIBYTE = 2**20

NAMES = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "l", "l/a", "none/a", "d/../a", "l/../b", "d/./e"]
LOOKED_UP = [*NAMES, "d/..", "d/.", ".", "l/..", "none/.", "d/", "a/", "l/"]
TARGETS = ["a", "d", "d/e", "l", "none", f"{ROOT}/d", f"{ROOT}/a", "d/../b"]
FLAGS = [
    os.O_RDONLY,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_APPEND,
    os.O_RDWR,
    os.O_RDONLY | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
]
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
    st.tuples(st.just("read"), slot, length),
    st.tuples(st.just("write"), slot, content),
    st.tuples(st.just("pread"), slot, length, offset),
    st.tuples(st.just("pwrite"), slot, content, offset),
    st.tuples(st.just("preadv"), slot, st.lists(length.filter(bool), min_size=1, max_size=3), offset),
    st.tuples(st.just("pwritev"), slot, st.lists(content, max_size=3), offset),
    st.tuples(st.just("ftruncate"), slot, offset),
    st.tuples(st.just("fallocate"), slot, offset, length),
    st.tuples(st.sampled_from(["fsync", "fdatasync", "fstat", "listdir_of", "scandir_of"]), slot),
    st.tuples(st.just("flock"), slot, lock),
    st.tuples(st.just("fchmod"), slot, st.sampled_from([0o600, 0o660])),
    st.tuples(
        st.sampled_from(["stat", "lstat", "readlink", "listdir", "scandir", "exists", "lexists", "isdir"]), looked_up
    ),
    st.tuples(st.sampled_from(["rmdir", "unlink"]), name),
    st.tuples(st.just("access"), looked_up, st.sampled_from([os.F_OK, os.R_OK, os.X_OK])),
    st.tuples(st.just("chmod"), name, st.sampled_from([0o600, 0o755, 0o2770, 0o700])),
    st.tuples(st.just("mkdir"), name, st.sampled_from([0o700, 0o777])),
    st.tuples(st.just("makedirs"), name, st.booleans()),
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
            named = () if call in ("rename_new", "makedirs", "samefile") else (error.filename, error.filename2)
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
        self._keep(slot, self.system.open(path, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.slots.get(slot, 999_999)))

    def do_rename_at(self, slot: int, path: str, to_slot: int, to: str) -> None:
        source, target = self.slots.get(slot, 999_999), self.slots.get(to_slot, 999_999)
        self.system.rename(path, to, src_dir_fd=source, dst_dir_fd=target)

    def do_close(self, slot: int) -> None:
        self.system.close(self.slots.pop(slot, 999_999))

    def do_preadv(self, slot: int, lengths: list[int], offset: int) -> Any:
        buffers = [bytearray(length) for length in lengths]
        return self.system.preadv(self.slots.get(slot, 999_999), buffers, offset), buffers

    def do_fstat(self, slot: int) -> Any:
        return self._status(self.system.fstat(self.slots.get(slot, 999_999)))

    def do_listdir_of(self, slot: int) -> Any:
        return sorted(self.system.listdir(self.slots.get(slot, 999_999)))

    def do_scandir_of(self, slot: int) -> Any:
        return self._entries(self.slots.get(slot, 999_999))

    def do_stat_at(self, slot: int, path: str) -> Any:
        return self._status(self.system.stat(path, dir_fd=self.slots.get(slot, 999_999), follow_symlinks=False))

    def do_unlink_at(self, slot: int, path: str) -> None:
        self.system.unlink(path, dir_fd=self.slots.get(slot, 999_999))

    def do_mkdir_at(self, slot: int, path: str) -> None:
        self.system.mkdir(path, 0o700, dir_fd=self.slots.get(slot, 999_999))

    def do_stat(self, path: str) -> Any:
        return self._status(self.system.stat(f"{self.root}/{path}"))

    def do_lstat(self, path: str) -> Any:
        return self._status(self.system.lstat(Path(f"{self.root}/{path}")))

    def do_listdir(self, path: str) -> Any:
        return sorted(self.system.listdir(f"{self.root}/{path}"))

    def do_scandir(self, path: str) -> Any:
        return self._entries(f"{self.root}/{path}")

    def do_readlink(self, path: str) -> Any:
        return self._relative(self.system.readlink(f"{self.root}/{path}"))

    def do_makedirs(self, path: str, exist_ok: bool) -> None:
        self.system.makedirs(f"{self.root}/{path}", exist_ok=exist_ok)

    def do_symlink(self, target: str, path: str) -> None:
        self.system.symlink(target.replace(ROOT, self.root), f"{self.root}/{path}")

    def do_exists(self, path: str) -> Any:
        return self._found(self.system.stat, path)

    def do_lexists(self, path: str) -> Any:
        return self._found(self.system.lstat, path)

    def do_isdir(self, path: str) -> bool:
        return stat.S_ISDIR(self.system.stat(f"{self.root}/{path}").st_mode)

    def do_samefile(self, one: str, other: str) -> bool:
        first, second = (self.system.stat(f"{self.root}/{path}") for path in (one, other))
        return os.path.samestat(first, second)

    def _plain(self, call: str, *arguments: Any) -> Any:
        if arguments and isinstance(arguments[0], int):
            return getattr(self.system, call)(self.slots.get(arguments[0], 999_999), *arguments[1:])
        paths = [f"{self.root}/{each}" if isinstance(each, str) else each for each in arguments]
        return getattr(self.system, call)(*paths)

    def _keep(self, slot: int, descriptor: int) -> None:
        if slot in self.slots:
            self.system.close(self.slots[slot])
        self.slots[slot] = descriptor

    def _found(self, call: Callable[[str], object], path: str) -> bool:
        try:
            call(f"{self.root}/{path}")
        except OSError:
            return False
        return True

    def _entries(self, place: str | int) -> Any:
        found = []
        with self.system.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                kinds = (entry.is_dir(), entry.is_file(), entry.is_symlink(), entry.is_dir(follow_symlinks=False))
                below = self._status(entry.stat(follow_symlinks=False))
                found.append((entry.name, self._relative(entry.path), kinds, below))
        return found

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
    rename_new = staticmethod(directory_module.rename_new)
    fallocate = staticmethod(lambda descriptor, offset, length: os.posix_fallocate(descriptor, offset, length))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class Simulated:
    def __init__(self, calls: FileCalls) -> None:
        self.calls = calls

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        self.calls.fallocate(descriptor, 0, offset, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calls, name)


@given(st.lists(OPERATIONS, max_size=60))
@settings(max_examples=400, deadline=None)
def test_it_answers_each_call_as_a_tmpfs_does(operations: list[tuple[Any, ...]]) -> None:
    place = tempfile.mkdtemp(dir="/dev/shm")
    os.chmod(place, 0o755)
    real, simulated = Side(Real(), place), Side(Simulated(FileCalls([Disk(ROOT, 64 * MEBIBYTE)])), ROOT)
    try:
        for operation in operations:
            assert simulated.do(*operation) == real.do(*operation), operation
        assert simulated.everything() == real.everything()
    finally:
        real.leave()
        shutil.rmtree(place)


Calls = tuple[Disk, FileCalls]


@pytest.fixture
def made() -> Calls:
    """A disk of 64 MiB that can lose its power, and the calls of the process "one"."""
    disk = Disk(ROOT, 64 * MEBIBYTE, can_lose_power=True)
    calls = FileCalls([disk])
    calls.process = "one"
    return disk, calls


def stored(calls: FileCalls, name: str, content: bytes, *, sync: bool = False) -> int:
    """The descriptor of a new file."""
    descriptor = calls.open(f"{ROOT}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    calls.pwrite(descriptor, content, 0)
    if sync:
        calls.fdatasync(descriptor)
    return descriptor


def test_a_lock_is_between_open_files_of_any_process(made: Calls) -> None:
    _, calls = made
    mine = stored(calls, "lock", b"")
    calls.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    calls.process = "two"
    theirs = calls.open(f"{ROOT}/lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        calls.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
    calls.process = "one"
    calls.flock(mine, fcntl.LOCK_SH)
    calls.process = "two"
    calls.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_who_waits_for_a_lock_lets_others_run_until_it_is_free(made: Calls) -> None:
    _, calls = made
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


def test_each_process_has_descriptors_of_its_own(made: Calls) -> None:
    _, calls = made
    mine = stored(calls, "mine", b"mine")
    calls.process = "two"
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.fstat(mine)
    assert stored(calls, "theirs", b"theirs") == mine == 1_000_000
    calls.process = "one"
    assert calls.pread(mine, 9, 0) == b"mine"
    assert calls.owns(mine) and not calls.owns(2) and calls.owns(f"{ROOT}/mine") and not calls.owns(f"{ROOT}0/mine")


def test_a_number_is_given_again_once_it_is_closed(made: Calls) -> None:
    _, calls = made
    first, second = stored(calls, "a", b"a"), stored(calls, "b", b"b")
    calls.close(first)
    assert calls.open(f"{ROOT}/b", os.O_RDONLY) == first != second


def test_a_file_without_a_name_lasts_until_it_is_closed(made: Calls) -> None:
    disk, calls = made
    descriptor = stored(calls, "a", bytes(8192))
    calls.unlink(f"{ROOT}/a")
    assert disk.occupied_bytes == 3 * 4096
    assert calls.pread(descriptor, 4, 0) == bytes(4) and calls.fstat(descriptor).st_nlink == 0
    calls.close(descriptor)
    assert disk.occupied_bytes == 4096


def test_who_dies_leaves_locks_and_nameless_files_and_nothing_else(made: Calls) -> None:
    disk, calls = made
    calls.flock(stored(calls, "kept", bytes(4096)), fcntl.LOCK_EX)
    stored(calls, "nameless", bytes(4096))
    calls.unlink(f"{ROOT}/nameless")
    before = disk.digest()
    calls.die("one")
    assert disk.occupied_bytes == 2 * 4096 and disk.digest() == before
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


def test_holes_take_no_room(made: Calls) -> None:
    disk, calls = made
    descriptor = stored(calls, "a", b"")
    calls.ftruncate(descriptor, 2**40)
    calls.pwrite(descriptor, b"x", 10 * 4096)
    assert calls.fstat(descriptor).st_blocks == 8 and calls.fstat(descriptor).st_size == 2**40
    assert calls.pread(descriptor, 3, 10 * 4096 - 1) == b"\0x\0" and disk.occupied_bytes == 2 * 4096


def test_without_direct_io_opening_says_so_and_leaves_the_file_that_was_to_be_made() -> None:
    calls = FileCalls([Disk(ROOT, MEBIBYTE, direct=False)])
    with pytest.raises(OSError, match="Invalid argument"):
        calls.open(f"{ROOT}/a", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    assert calls.listdir(ROOT) == ["a"]


def test_direct_io_wants_whole_blocks(made: Calls) -> None:
    _, calls = made
    descriptor = calls.open(f"{ROOT}/a", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert calls.pwritev(descriptor, [bytes(4096), bytes(4096)], 4096) == 8192
    with pytest.raises(OSError, match="Invalid argument"):
        calls.pwrite(descriptor, bytes(100), 0)
    with pytest.raises(OSError, match="Invalid argument"):
        calls.preadv(descriptor, [bytearray(4096)], 512)


def test_a_call_does_as_little_as_it_is_told(made: Calls) -> None:
    disk, calls = made
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
    assert disk.content(f"{ROOT}/a") == b"abc34567X9"


def test_a_fault_leaves_no_trace(made: Calls) -> None:
    disk, calls = made
    descriptor = stored(calls, "a", b"a")
    before = disk.digest()

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
    assert disk.digest() == before and disk.open_descriptors == 1


def test_who_runs_before_a_call_may_take_the_descriptor_away(made: Calls) -> None:
    _, calls = made
    descriptor = stored(calls, "a", b"a")
    calls.before = lambda call, disk, target: calls.die("one") if call == "pread" else None
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.pread(descriptor, 1, 0)


def test_a_directory_that_was_moved_is_not_found_where_it_was(made: Calls) -> None:
    _, calls = made
    calls.makedirs(f"{ROOT}/d/e")
    stored(calls, "d/e/a", b"a")
    calls.rename(f"{ROOT}/d", f"{ROOT}/f")
    assert calls.stat(f"{ROOT}/f/e/a").st_size == 1
    with pytest.raises(FileNotFoundError):
        calls.stat(f"{ROOT}/d/e/a")


def test_nothing_is_renamed_or_linked_to_another_disk() -> None:
    calls = FileCalls([Disk(ROOT, MEBIBYTE), Disk("/simulated/disk1", MEBIBYTE)])
    stored(calls, "a", b"a")
    for call in (calls.rename, calls.rename_new, calls.link):
        with pytest.raises(OSError, match="cross-device"):
            call(f"{ROOT}/a", "/simulated/disk1/a")
    assert calls.stat(ROOT).st_dev != calls.stat("/simulated/disk1").st_dev


def test_times_are_those_of_the_clock() -> None:
    clock = [1.5]
    calls = FileCalls([Disk(ROOT, MEBIBYTE, lambda: clock[0])])
    descriptor = stored(calls, "a", b"a")
    clock[0] = 2.25
    calls.pwrite(descriptor, b"b", 0)
    assert calls.stat(f"{ROOT}/a").st_mtime_ns == 2_250_000_000 and calls.stat(ROOT).st_mtime == 1.5


def test_runs_that_did_the_same_have_the_same_digest_and_a_flipped_bit_shows() -> None:
    disks = [Disk(ROOT, MEBIBYTE) for _ in range(2)]
    for disk in disks:
        calls = FileCalls([disk])
        calls.mkdir(f"{ROOT}/d")
        stored(calls, "d/a", b"content")
    assert disks[0].digest() == disks[1].digest()
    disks[0].flip_bit(f"{ROOT}/d/a", 1)
    assert disks[0].content(f"{ROOT}/d/a") == b"cnntent" and disks[0].digest() != disks[1].digest()


def without_power(disk: Disk, calls: FileCalls, seed: int) -> dict[str, bytes | None]:
    """The paths below the root after a power cut, and the contents of those that are files."""
    calls.die("one")
    disk.cut_power(random.Random(seed))
    assert disk.occupied_bytes == sum(inode.block_count * 4096 for _, inode in disk.walk())
    found: dict[str, bytes | None] = {}
    for path, inode in disk.walk():
        kept = stat.S_ISREG(inode.mode)
        found[path[len(ROOT) + 1 :]] = disk.content(path) if kept else None
        assert inode.links == (1 if kept else 2 + sum(stat.S_ISDIR(below.mode) for below in inode.names.values()))
    return found


SEEDS = range(500)
NEW, OLD = random.Random(1).randbytes(8192), random.Random(2).randbytes(8192)


def test_what_was_synced_survives_a_power_cut() -> None:
    for seed in SEEDS:
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        calls.mkdir(f"{ROOT}/d")
        stored(calls, "d/a", NEW, sync=True)
        stored(calls, "d/b", OLD)
        calls.rename(f"{ROOT}/d/b", f"{ROOT}/d/c")
        assert without_power(disk, calls, seed)["d/a"] == NEW


def test_a_rename_that_was_not_synced_has_happened_or_not(made: Calls) -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        stored(calls, "new", NEW, sync=True)
        stored(calls, "old", OLD, sync=True)
        calls.replace(f"{ROOT}/new", f"{ROOT}/old")
        found = without_power(disk, calls, seed)
        assert found in ({"": None, "new": NEW, "old": OLD}, {"": None, "old": NEW})
        outcomes.add(len(found))
    assert outcomes == {2, 3}


def test_a_rename_survives_once_the_file_or_its_directory_is_synced() -> None:
    for seed in SEEDS:
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        stored(calls, "first", b"")
        descriptor = stored(calls, "a", NEW, sync=True)
        calls.rename(f"{ROOT}/a", f"{ROOT}/b")
        calls.fsync(descriptor if seed % 2 else calls.open(ROOT, os.O_RDONLY | os.O_DIRECTORY))
        assert without_power(disk, calls, seed) == {"": None, "first": b"", "b": NEW}


def test_names_survive_in_their_order() -> None:
    seen = set()
    for seed in SEEDS:
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        stored(calls, "0", b"")
        calls.mkdir(f"{ROOT}/1")
        calls.link(f"{ROOT}/0", f"{ROOT}/1/2")
        calls.unlink(f"{ROOT}/0")
        calls.die("one")
        disk.cut_power(random.Random(seed))
        seen.add(tuple(sorted(path[len(ROOT) :] for path, _ in disk.walk())))
    assert seen == {("",), ("", "/0"), ("", "/0", "/1"), ("", "/0", "/1", "/1/2"), ("", "/1", "/1/2")}


def test_blocks_that_were_not_synced_are_new_old_or_torn_and_new_ones_perhaps_zero() -> None:
    seen: dict[str, set[str]] = {"over": set(), "fresh": set()}
    sizes = set()
    for seed in SEEDS:
        disk = Disk(ROOT, MEBIBYTE, can_lose_power=True)
        calls = FileCalls([disk])
        calls.process = "one"
        descriptor = stored(calls, "a", OLD, sync=True)
        calls.pwrite(descriptor, NEW + NEW, 4096)
        found = without_power(disk, calls, seed)["a"]
        assert found is not None and found[:4096] == OLD[:4096]
        sizes.add(len(found))
        seen["over"].add(_kind(found[4096:8192], NEW[:4096], OLD[4096:]))
        if len(found) > 8192:
            seen["fresh"].add(_kind(found[8192:12288], NEW[4096:], bytes(4096)))
    assert sizes == {8192, 20480} and seen == {"over": {"new", "old", "torn"}, "fresh": {"new", "old", "torn"}}


def _kind(found: bytes, new: bytes, old: bytes) -> str:
    if found in (new, old):
        return "new" if found == new else "old"
    assert any(found == new[:cut] + old[cut:] for cut in range(512, 4096, 512))
    return "torn"


def test_a_disk_goes_on_after_a_power_cut_and_has_what_survived_for_good(made: Calls) -> None:
    disk, calls = made
    for name in "abcdef":
        stored(calls, name, NEW)
        calls.unlink(f"{ROOT}/a") if name == "d" else None
    once = without_power(disk, calls, 1)
    assert without_power(disk, calls, 2) == once
    calls.mkdir(f"{ROOT}/more")
    assert disk.find(f"{ROOT}/more").links == 2


def test_power_is_not_cut_while_somebody_has_a_file_open(made: Calls) -> None:
    disk, calls = made
    stored(calls, "a", b"a")
    with pytest.raises(RuntimeError, match="1 descriptors are open"):
        disk.cut_power(random.Random(0))


OF_OS = [
    "access", "chmod", "close", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir",
    "open", "posix_fadvise", "pread", "preadv", "pwrite", "pwritev", "read", "readlink", "remove", "rename", "replace",
    "rmdir", "scandir", "stat", "statvfs", "symlink", "unlink", "utime", "write",
]  # fmt: skip


@contextlib.contextmanager
def in_the_place_of_os(calls: FileCalls, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls with a simulated path or descriptor go to `calls`."""

    def routed(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            at = options.get("dir_fd") or options.get("src_dir_fd") or target
            return (simulated if calls.owns(target) or calls.owns(at) else real)(target, *rest, **options)

        return call

    def like_c(call: Callable[..., None]) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            try:
                call(*arguments)
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            return 0

        return answer

    with patch.context() as patched:
        for name in [
            "open",
            "close",
            "read",
            "write",
            "pread",
            "pwrite",
            "preadv",
            "pwritev",
            "fdatasync",
            "fsync",
            "ftruncate",
            "posix_fadvise",
            "fstat",
            "stat",
            "lstat",
            "access",
            "chmod",
            "fchmod",
            "mkdir",
            "rmdir",
            "unlink",
            "remove",
            "rename",
            "replace",
            "link",
            "symlink",
            "readlink",
            "listdir",
            "scandir",
            "statvfs",
            "utime",
        ]:
            patched.setattr(os, name, routed(getattr(calls, name), getattr(os, name)))
        patched.setattr(fcntl, "flock", routed(calls.flock, fcntl.flock))
        patched.setattr(
            chunk_format,
            "_fallocate",
            like_c(lambda descriptor, mode, at, length: calls.fallocate(descriptor, mode, at.value, length.value)),
        )
        patched.setattr(
            directory_module, "_renameat2", like_c(lambda at, old, to, new, flags: calls.rename_new(old, new))
        )
        yield


def test_a_volume_lives_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(ROOT, 64 * MEBIBYTE, can_lose_power=True)
    calls = FileCalls([disk])
    calls.process = "one"
    fingerprint, key = bytes(16), bytes(range(KEY_BYTES))
    payload, room = page_aligned(8192), page_aligned(8192)
    payload[:] = np.frombuffer(NEW, dtype=np.uint8)
    with in_the_place_of_os(calls, monkeypatch):
        files = ChunkFiles(Path(ROOT) / "cache", 32 * MEBIBYTE, fingerprint, direct=None, durable=True)
        files.open()
        assert files.direct
        assert files.write(key, payload, 8000) == 3 * 4096
        assert files.read(key, room) == 8000 and room[:8000].tobytes() == NEW[:8000]
        assert len(files.scanner.scan(key.hex()[:2]).keys) == 1
        directory = calls.open(f"{ROOT}/cache/{key.hex()[:2]}", os.O_RDONLY)
        calls.fsync(directory)

        calls.die("one")
        disk.cut_power(random.Random(7))
        calls.process = "two"
        again = ChunkFiles(Path(ROOT) / "cache", 32 * MEBIBYTE, fingerprint, direct=None, durable=True)
        again.open()
        assert again.read(key, room) == 8000 and room[:8000].tobytes() == NEW[:8000]
        disk.flip_bit(again.path(key), 5000)
        with pytest.raises(Exception, match="checksum"):
            again.read(key, room)
        assert again.read(key, room) is None
        again.close()
    assert disk.open_descriptors == 0
