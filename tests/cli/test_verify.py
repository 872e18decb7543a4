"""`tiercache verify`: what is whole passes, what is not is deleted."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.chunks import chunks_of
from tests.cli.conftest import LAYOUT, chunk_paths, config_for, in_terminal, tiercache
from tests.tiers.test_disk import flip
from tiercache import TierCache
from tiercache.cli import app
from tiercache.tiers.files.chunk_files import ChunkFiles


def test_whole_chunks_pass(directory: Path) -> None:
    run = tiercache("verify", directory, "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 0
    assert (found["checked"], found["checked_bytes"]) == (6, 6 * LAYOUT.chunk_bytes)
    assert found["bad"] == found["unreadable"] == []


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda path: flip(path, 4096 + 77), "payload checksum"),
        (lambda path: flip(path, 0), "magic"),
        (lambda path: flip(path, 20), "header checksum"),
        (lambda path: path.write_bytes(b""), "header"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "length"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(4096)), "length"),
        (lambda path: path.write_bytes(chunk_paths(path.parents[2])[0].read_bytes()), "key"),
    ],
    ids=["payload", "magic", "header", "empty", "cut", "longer", "another chunk"],
)
def test_damage_is_found_and_deleted(directory: Path, damage: Callable[[Path], object], field: str) -> None:
    path = chunk_paths(directory)[3]
    damage(path)
    run = tiercache("verify", directory, "--json")
    (line,) = json.loads(run.stdout)["bad"]
    assert run.returncode == 1
    assert line.startswith(f"{path}: {field}: expected ")
    assert not path.exists()
    assert tiercache("verify", directory).returncode == 0


def test_words_and_no_bar_in_a_pipe(directory: Path) -> None:
    flip(chunk_paths(directory)[0], 5000)
    run = tiercache("verify", directory)
    assert "6 chunks checked" in run.stdout
    assert "1 bad" in run.stdout
    assert run.stderr == ""


def test_progress_in_a_terminal(directory: Path) -> None:
    assert "verifying" in "\n".join(in_terminal("verify", directory, errors=True))


def test_looking_changes_nothing(directory: Path) -> None:
    def picture() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}

    before = picture()
    assert tiercache("verify", directory).returncode == 0
    assert tiercache("stat", directory).returncode == 0
    assert picture() == before


async def test_a_cache_that_uses_the_directory_goes_on(directory: Path) -> None:
    async with TierCache.open(config_for(directory), LAYOUT) as cache:
        bad = chunk_paths(directory)[0]
        flip(bad, 6000)
        assert tiercache("verify", directory).returncode == 1
        async with cache.get(bytes.fromhex(bad.name)) as lease:
            assert lease is None
        key = bytes.fromhex(chunk_paths(directory)[0].name)
        async with cache.get(key) as lease:
            assert lease is not None
        await cache.put(bytes.fromhex(bad.name), np.ones(LAYOUT.chunk_bytes, np.uint8))
        await cache.flush()
    assert tiercache("verify", directory).returncode == 0


def test_pipes_under_chunks_names_are_reported_and_not_waited_for(directory: Path) -> None:
    for path in chunk_paths(directory)[:2]:
        path.unlink()
        os.mkfifo(path)
    run = tiercache("verify", directory)
    assert run.returncode == 1
    assert "2 unreadable" in run.stdout


def test_verify_keeps_the_access_that_was_chosen(directory: Path) -> None:
    for path in (chunks_of(directory) / ".tiercache", chunks_of(directory) / ".tiercache" / "tmp"):
        path.chmod(0o2770)
    flip(chunk_paths(directory)[0], 6000)
    assert tiercache("verify", directory).returncode == 1
    assert (chunks_of(directory) / ".tiercache").stat().st_mode & 0o7777 == 0o2770


@pytest.mark.needs("root")
def test_a_part_that_this_user_cannot_read_is_no_success(directory: Path) -> None:
    closed = chunk_paths(directory)[0].parent
    os.chown(closed, 65534, 65534)
    closed.chmod(0o700)
    dropped = "-dac_override,-dac_read_search"
    without_rights = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]
    command = [*without_rights, sys.executable, "-m", "tiercache", "verify", directory]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 2, run.stdout
    assert run.stderr == f"error: {directory} cannot be verified: [Errno 13] Permission denied: '{closed}'\n"


def test_another_format_is_one_sentence(directory: Path) -> None:
    flip(chunk_paths(directory)[0], 5000)
    (chunks_of(directory) / "tiercache.json").write_text('{"format": 99}')
    run = tiercache("verify", directory)
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: {directory} cannot be verified: {directory}")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("step", ["open", "delete"])
def test_a_bad_chunk_that_cannot_be_deleted_is_named_and_the_others_are_checked(
    directory: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(ChunkFiles, step, refuse)
    for path in chunk_paths(directory)[:2]:
        flip(path, 5000)
    run = CliRunner().invoke(app, ["verify", str(directory)])
    assert run.exit_code == 1
    assert run.stdout.count("payload checksum: expected ") == run.stdout.count("; it could not be deleted") == 2
    assert "6 chunks checked" in run.stdout and "0 bad, 2 unreadable" in run.stdout
    assert "deleted: " not in run.stdout.replace("it could not be deleted: ", "")
