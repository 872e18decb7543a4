"""A start with `shm_name`: what lies there already, and other starts at the same moment."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.memory.arena import Arena, ArenaSettings, _sweep_dead_arenas

SIZE = 4 << 20
NOBODY = 65534
CRASH = """
import os, pathlib, signal, sys
from tiercache.memory import arena
arena.SHM_DIRECTORY = pathlib.Path(sys.argv[1])
mapped = arena.Arena(arena.ArenaSettings(size_bytes=int(sys.argv[2]), shm_name="kv"))
mapped.memory[:] = 9
os.kill(os.getpid(), signal.SIGKILL)
"""
as_root = pytest.mark.needs("root")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the arena `kv`, in a directory that no other start sweeps."""
    monkeypatch.setattr("tiercache.memory.arena.SHM_DIRECTORY", tmp_path)
    return tmp_path / "tiercache.kv"


def start(path: Path) -> Arena:
    return Arena(ArenaSettings(size_bytes=SIZE, shm_name=path.name.removeprefix("tiercache.")))


def crash(path: Path) -> None:
    subprocess.run([sys.executable, "-c", CRASH, str(path.parent), str(SIZE)], check=False)
    assert path.read_bytes() == b"\x09" * SIZE


def writable_by_all(path: Path, mode: int = 0o666) -> None:
    path.write_bytes(b"theirs")
    path.chmod(mode)


def writable_by_group(path: Path) -> None:
    writable_by_all(path, 0o660)


def given_away(path: Path) -> None:
    writable_by_all(path, 0o600)
    os.chown(path, NOBODY, NOBODY)


def symbolic_link(path: Path) -> None:
    path.symlink_to(path.with_name(f"{path.name}-target"))


@pytest.mark.parametrize(
    "make",
    [pytest.param(given_away, marks=as_root), writable_by_all, writable_by_group, symbolic_link, os.mkfifo, os.mkdir],
)
def test_a_name_that_is_no_dead_arenas_is_refused_and_left_alone(make: Callable[[Path], None], path: Path) -> None:
    make(path)
    before = path.lstat()
    expected = rf"^shm_name: {path} is in use by a living process, or is no file that only user {os.geteuid()} may write"
    with pytest.raises(ConfigError, match=expected):
        start(path)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)
    assert list(path.parent.iterdir()) == [path]


def test_what_a_crashed_process_left_is_neither_reused_nor_leaked(path: Path) -> None:
    crash(path)
    again = start(path)
    assert not again.memory.any(), "bytes of a dead process mean nothing"
    again.close()
    crash(path)
    start(path.with_name(f"{path.name}-other")).close()
    assert not path.exists(), "the next start sweeps what crashed processes left"


def test_a_file_that_a_sweep_removes_before_it_is_locked_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, swept = fcntl.flock, []

    def lock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(descriptor)
            _sweep_dead_arenas()
            assert not list(path.parent.iterdir())
        flock(descriptor, operation)

    monkeypatch.setattr("tiercache.memory.arena.fcntl.flock", lock)
    arena = start(path)
    assert path.stat().st_size == SIZE
    arena.close()
    assert not list(path.parent.iterdir())


@as_root
def test_a_start_of_another_name_leaves_files_of_other_users_alone(path: Path) -> None:
    given_away(path)
    start(path.with_name(f"{path.name}-other")).close()
    assert path.read_bytes() == b"theirs"


def test_an_arena_that_was_replaced_by_hand_is_not_removed_at_close(path: Path) -> None:
    first = start(path)
    path.unlink()
    second = start(path)
    first.close()
    assert path.exists(), "the name belongs to the second arena"
    second.close()
    assert not path.exists()


@pytest.fixture
def before_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens before each lock that is asked for on the file that had the name first, in order; the locks are real."""
    steps: list[Callable[[], object]] = []
    flock = fcntl.flock
    crash(path)
    inode = path.stat().st_ino

    def lock(descriptor: int, operation: int) -> None:
        if steps and os.fstat(descriptor).st_ino == inode:
            steps.pop(0)()
        flock(descriptor, operation)

    monkeypatch.setattr("tiercache.memory.arena.fcntl.flock", lock)
    return steps


@pytest.mark.parametrize("moment", ["removing what is left", "taking the name"])
def test_of_two_starts_after_a_crash_one_has_the_name(
    moment: str, path: Path, before_lock: list[Callable[[], object]]
) -> None:
    arenas: list[Arena] = []
    if moment == "taking the name":
        dying = os.open(path, os.O_RDWR)
        fcntl.flock(dying, fcntl.LOCK_EX)
        before_lock[:] = [lambda: None, lambda: (os.close(dying), arenas.append(start(path)))]
    else:
        before_lock[:] = [lambda: arenas.append(start(path))]
    with pytest.raises(ConfigError, match="in use by a living process"):
        start(path)
    first, = arenas  # fmt: skip
    first.memory[:4] = 7
    assert path.read_bytes()[:4] == b"\7\7\7\7", "the first start has the name still"
    first.close()
    assert not path.exists()


def test_a_file_that_another_start_only_looks_at_is_not_in_use(path: Path, before_lock: list[Callable[[], object]]) -> None:
    looking = os.open(path, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    before_lock[:] = [lambda: None, lambda: None, lambda: os.close(looking)]
    start(path).close()
    assert not path.exists()
