"""How a chunk gets its name while other instances publish the same one."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.others import REPOSITORY
from tests.tiers.test_disk import FINGERPRINT, allocated_bytes
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import directory
from tiercache.tiers.files.access import rename_new
from tiercache.tiers.files.capacity import Capacity, CounterLost
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import Publish, link_new

WAYS: dict[str, tuple[Publish, ...]] = {"renameat2": (rename_new,), "link": (link_new,), "lock": ()}


def opened(root: Path, ways: tuple[Publish, ...]) -> ChunkFiles:
    """Files of a process in which files are published in these ways."""
    directory.WAYS = ways
    files = ChunkFiles(root, 1 << 30, FINGERPRINT, direct=None, durable=False)
    files.open()
    return files


@pytest.fixture(autouse=True)
def own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "WAYS", directory.WAYS)


@pytest.fixture(params=WAYS)
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ChunkFiles, ChunkFiles]]:
    files = opened(tmp_path, WAYS[request.param]), opened(tmp_path, WAYS[request.param])
    yield files
    for one in files:
        one.close()


def temporaries(root: Path) -> list[Path]:
    return list((root / ".tiercache" / "tmp").glob("*.[0-9]*"))


def test_what_cannot_be_published_takes_no_bytes(two: tuple[ChunkFiles, ChunkFiles]) -> None:
    """A file of another program is where the directory of the chunk should be."""
    one, _ = two
    key, payload = chunk(1)
    Path(one.path(key)).parent.write_bytes(b"")
    used_bytes = one.capacity.used_bytes
    with pytest.raises(NotADirectoryError):
        one.write(key, payload, CHUNK_BYTES)
    assert temporaries(one.root) == []
    assert (one.capacity.used_bytes, one.capacity._in_flight_bytes) == (used_bytes, 0)


def test_the_first_to_publish_a_chunk_keeps_the_name(two: tuple[ChunkFiles, ChunkFiles]) -> None:
    one, other = two
    key, payload = chunk(1)
    occupied_bytes = one.write(key, payload, CHUNK_BYTES)
    inode = Path(one.path(key)).stat().st_ino
    assert other.write(key, payload, CHUNK_BYTES) == occupied_bytes
    assert Path(one.path(key)).stat().st_ino == inode
    assert temporaries(one.root) == []
    assert other.capacity.used_bytes == allocated_bytes(one.root)
    into = page_aligned(CHUNK_BYTES)
    assert other.read(key, into) == CHUNK_BYTES
    assert np.array_equal(into, payload)


def test_a_chunk_deleted_meanwhile_can_be_published_again(two: tuple[ChunkFiles, ChunkFiles]) -> None:
    one, other = two
    key, payload = chunk(1)
    occupied_bytes = one.write(key, payload, CHUNK_BYTES)
    assert other.delete(key)
    assert one.write(key, payload, CHUNK_BYTES) == occupied_bytes
    assert one.capacity.used_bytes == allocated_bytes(one.root)


def test_a_chunk_deleted_just_when_its_name_was_taken_can_be_published(
    two: tuple[ChunkFiles, ChunkFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    key, payload = chunk(1)
    occupied_bytes = one.write(key, payload, CHUNK_BYTES)
    name = directory._name

    def deleted(temporary: str, path: str, capacity: Capacity) -> None:
        monkeypatch.setattr(directory, "_name", name)
        with pytest.raises(FileExistsError):
            name(temporary, path, capacity)
        assert one.delete(key)
        raise FileExistsError(path)

    monkeypatch.setattr(directory, "_name", deleted)
    assert other.write(key, payload, CHUNK_BYTES) == occupied_bytes
    assert Path(one.path(key)).exists()


def test_a_way_that_the_file_system_lacks_is_followed_by_the_next(tmp_path: Path) -> None:
    def unknown(temporary: str, path: str) -> None:
        raise OSError(22, "Invalid argument", path)

    files = opened(tmp_path, (unknown, rename_new))
    files.write(*chunk(1), CHUNK_BYTES)
    directory.WAYS = (unknown, unknown)
    files.write(*chunk(2), CHUNK_BYTES)
    assert files.capacity.used_bytes == allocated_bytes(tmp_path)
    files.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.tiers.test_publishing import opened
from tiercache.testing import chunk
from tiercache.tiers.files import directory
from tiercache.testing.contract import CHUNK_BYTES

make = os.mkdir

def between_two_names(temporary, path):
    os.link(temporary, path)
    os.kill(os.getpid(), signal.SIGKILL)

def after_a_directory(path, mode=0o777):
    make(path, mode)
    if os.path.basename(path) == "00":
        os.kill(os.getpid(), signal.SIGKILL)

files = opened(Path(sys.argv[1]), ())
if sys.argv[2] == "after a directory":
    os.mkdir = after_a_directory
files.write(*chunk(1), CHUNK_BYTES)
directory.WAYS = (between_two_names,)
files.write(*chunk(2), CHUNK_BYTES)
"""


@pytest.mark.parametrize("when", ["between two names", "after a directory"])
def test_what_a_killed_process_has_published_stays_and_is_counted_once(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), when]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -9
    assert (tmp_path / "00").is_dir()
    files = opened(tmp_path, ())
    assert temporaries(tmp_path) == []
    if when == "after a directory":
        assert files.capacity.used_bytes >= allocated_bytes(tmp_path)
    into = page_aligned(CHUNK_BYTES)
    for number in (1, 2) if when == "between two names" else ():
        assert files.read(chunk(number)[0], into) == CHUNK_BYTES
    mark, _ = files.begin_scan()
    files.capacity.recount(mark, files.scan("00").counted_bytes)
    assert files.capacity.used_bytes == allocated_bytes(tmp_path)
    files.close()


def test_a_writer_makes_no_directory_where_a_deleted_root_was_made_anew(tmp_path: Path) -> None:
    """It would be counted nowhere: the writer's counter was deleted with the root."""
    root, (key, payload) = tmp_path / "chunks", chunk(1)
    before = ChunkFiles(root, 1 << 30, FINGERPRINT, direct=None, durable=False, step_bytes=1 << 20, beside=True)
    after = ChunkFiles(root, 1 << 30, FINGERPRINT, direct=None, durable=False, step_bytes=1 << 20, beside=True)
    before.open()
    pending = before.begin_write(key, CHUNK_BYTES)
    shutil.rmtree(root)
    after.open()
    with pytest.raises(CounterLost):
        before.make(pending, lambda path: Path(path).write_bytes(payload))
    before.discard(pending)
    assert not Path(pending.path).parent.exists()
    for files in before, after:
        files.close()
