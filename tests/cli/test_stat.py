"""What `tiercache stat` counts in a real directory."""

import json
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.cli.conftest import LAYOUT, chunk_paths, tiercache
from tiercache.commands.stat import survey


def test_chunks_are_counted_by_layout(directory: Path) -> None:
    found = survey(directory)
    assert found["chunks"] == 6
    assert found["layouts"][LAYOUT.fingerprint.hex()]["payload_bytes"] == 6 * LAYOUT.chunk_bytes
    assert found["occupied_bytes"] == sum(path.stat().st_blocks * 512 for path in chunk_paths(directory))
    assert found["newest_s"] <= found["median_age_s"] <= found["oldest_s"]
    assert (found["unreadable"], found["unfinished"], found["foreign"]) == ([], 0, 0)
    assert found["ledger_bytes"] == found["counted_bytes"] > found["occupied_bytes"]


def test_a_missing_ledger_is_said_and_not_made(directory: Path) -> None:
    ledger = chunks_of(directory) / ".tiercache" / "ledger"
    ledger.unlink()
    assert survey(directory)["ledger_bytes"] is None
    assert not ledger.exists()


def test_what_is_no_chunk_is_counted_apart(directory: Path) -> None:
    first, second = chunk_paths(directory)[:2]
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-4096])
    (first.parent / "README").write_text("not ours")
    (chunks_of(directory) / ".tiercache" / "tmp").mkdir(exist_ok=True)
    (chunks_of(directory) / ".tiercache" / "tmp" / "someone.7").write_bytes(bytes(8192))
    (first.parent / f"{'a' * 32}.7").write_bytes(bytes(8192))
    before = survey(directory)["counted_bytes"]
    (directory / next(name for name in ("fe", "fd") if not (directory / name).exists())).write_bytes(bytes(8192))
    found = survey(directory)
    assert found["counted_bytes"] == before, "another program's file has the name of a directory of chunks"
    assert found["chunks"] == 4
    assert [str(first) in line or str(second) in line for line in found["unreadable"]] == [True, True]
    assert (found["foreign"], found["unfinished"]) == (1, 2)


def test_the_command_says_the_same_in_words_and_in_json(directory: Path) -> None:
    assert "6 chunks" in tiercache("stat", directory).stdout
    assert json.loads(tiercache("stat", directory, "--json").stdout)["chunks"] == 6


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_a_directory_that_is_not_ours_is_one_sentence(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for wrong in (tmp_path, tmp_path / "absent", file):
        run = tiercache(command, wrong)
        assert run.returncode == 2
        assert run.stderr.startswith("error: ")
        assert len(run.stderr.splitlines()) == 1
