"""`tiercache export` and `tiercache import`: chunks move whole, verified on both sides, and within the cap."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.cli.conftest import LAYOUT, chunk_paths, config_for, tiercache
from tests.tiers.test_disk import flip
from tiercache import Config, Layout, TierCache
from tiercache.commands.stat import survey
from tiercache.core.header import Header

FILE_BYTES = 4096 + LAYOUT.chunk_bytes
OTHER = Layout("other", chunk_tokens=64, bytes_per_token=1024)


def contents(directory: Path) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in chunk_paths(directory)}


@pytest.fixture
def exported(directory: Path, tmp_path: Path) -> Path:
    file = tmp_path / "kv.export"
    assert tiercache("export", directory, "-o", file).returncode == 0
    return file


def is_counted_right(directory: Path) -> bool:
    found = survey(directory)
    return bool(found["ledger_bytes"] == found["counted_bytes"]) and not found["unfinished"]


async def test_exported_chunks_are_hits_where_they_are_imported(directory: Path, exported: Path, tmp_path: Path) -> None:
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1)
    assert run.returncode == 0
    assert run.stdout == f"6 chunks imported, 0.4 MiB of layout {LAYOUT.fingerprint.hex()[:16]}; 0 left out\n"
    assert exported.stat().st_mode & 0o777 == 0o600
    assert contents(tmp_path / "new") == contents(directory)
    assert is_counted_right(tmp_path / "new")
    async with TierCache.open(config_for(tmp_path / "new"), LAYOUT) as cache:
        for number in range(6):
            async with cache.get(number.to_bytes(24, "big")) as lease:
                assert lease is not None and np.all(np.frombuffer(lease.view, np.uint8) == number)


def test_a_pipe_needs_no_file(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiercache"]
    importing = [*command, "import", "-", tmp_path / "new", "--max-size", "0.1"]
    with subprocess.Popen([*command, "export", directory, "-o", "-"], stdout=subprocess.PIPE) as export:
        run = subprocess.run(importing, stdin=export.stdout, check=False, timeout=60)
    assert (run.returncode, export.returncode) == (0, 0)
    assert contents(tmp_path / "new") == contents(directory)


async def test_a_chunk_that_is_stored_again_with_more_bytes_during_an_export_is_exported(tmp_path: Path) -> None:
    keys = [number.to_bytes(24, "big") for number in range(20)]
    async with TierCache.open(config_for(tmp_path / "kv"), LAYOUT) as cache:
        await cache.put_many(keys, [np.ones(8000, np.uint8)] * 20)
        await cache.flush()
        newest = max(chunk_paths(tmp_path / "kv"), key=lambda path: (path.stat().st_mtime, path))
        command = [sys.executable, "-m", "tiercache", "export", tmp_path / "kv", "-o", "-"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
            assert export.stdout is not None and export.stderr is not None
            begin = await asyncio.to_thread(export.stdout.read, 1)  # it has listed all, and the pipe holds a part
            await cache.forget([bytes.fromhex(newest.name)])
            await cache.put(bytes.fromhex(newest.name), np.ones(LAYOUT.chunk_bytes, np.uint8))
            await cache.flush()
            stream = begin + await asyncio.to_thread(export.stdout.read)
            said = export.stderr.read().decode()
    assert (export.returncode, said.partition(",")[0]) == (0, "20 chunks exported"), said
    (tmp_path / "kv.export").write_bytes(stream)
    assert tiercache("import", tmp_path / "kv.export", tmp_path / "new", "--max-size", 0.1).returncode == 0
    assert contents(tmp_path / "new") == contents(tmp_path / "kv")


async def test_both_work_beside_a_running_cache_and_what_is_there_stays(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "kv.export"
    async with (
        TierCache.open(config_for(directory), LAYOUT) as source,
        TierCache.open(config_for(tmp_path / "new"), LAYOUT) as target,
    ):
        await target.put((0).to_bytes(24, "big"), np.full(LAYOUT.chunk_bytes, 99, np.uint8))
        await target.flush()
        assert tiercache("export", directory, "-o", file).returncode == 0
        run = tiercache("import", file, tmp_path / "new", "--max-size", 0.1, "--json")
        found = json.loads(run.stdout)
        assert (run.returncode, found["chunks"], found["present"]) == (0, 5, 1)
        target.clear_hot()
        for number, value in [(0, 99), *((number, number) for number in range(1, 6))]:
            async with target.get(number.to_bytes(24, "big")) as lease:
                assert lease is not None and lease.view[0] == value
        async with source.get((3).to_bytes(24, "big")) as lease:
            assert lease is not None
    assert is_counted_right(tmp_path / "new")


async def test_compressed_chunks_move_as_they_are(tmp_path: Path) -> None:
    def config(directory: Path) -> Config:
        return config_for(directory).changed({"disk_compression": "zstd"})

    payload = np.arange(LAYOUT.chunk_bytes, dtype=np.uint32).view(np.uint8)[: LAYOUT.chunk_bytes]
    async with TierCache.open(config(tmp_path / "kv"), LAYOUT) as cache:
        await cache.put(bytes(24), payload)
    (path,) = chunk_paths(tmp_path / "kv")
    assert path.stat().st_size < FILE_BYTES
    assert tiercache("export", tmp_path / "kv", "-o", tmp_path / "kv.export").returncode == 0
    assert tiercache("import", tmp_path / "kv.export", tmp_path / "new", "--max-size", 0.1).returncode == 0
    assert contents(tmp_path / "new") == contents(tmp_path / "kv")
    async with TierCache.open(config(tmp_path / "new"), LAYOUT) as cache, cache.get(bytes(24)) as lease:
        assert lease is not None and np.array_equal(lease.view, payload)


async def test_of_several_layouts_one_is_chosen(directory: Path, tmp_path: Path) -> None:
    async with TierCache.open(config_for(directory), OTHER) as cache:
        await cache.put((7).to_bytes(24, "big"), np.full(OTHER.chunk_bytes, 7, np.uint8))
    file = tmp_path / "kv.export"
    run = tiercache("export", directory, "-o", file)
    assert run.returncode == 2 and not file.exists()
    assert f"{OTHER.fingerprint.hex()[:16]} (1 chunks)" in run.stderr
    run = tiercache("export", directory, "-o", file, "--layout", OTHER.fingerprint.hex()[:16])
    assert run.stdout.startswith("1 chunks exported")


def test_a_bad_chunk_is_left_out_and_stays(directory: Path, tmp_path: Path) -> None:
    payload, header = chunk_paths(directory)[2:4]
    flip(payload, 4096 + 77)
    flip(header, 20)
    run = tiercache("export", directory, "-o", tmp_path / "kv.export", "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["chunks"]) == (1, 4)
    assert sorted(line.split(": ")[1] for line in found["bad"]) == ["header checksum", "payload checksum"]
    assert payload.exists() and header.exists()
    assert tiercache("import", tmp_path / "kv.export", tmp_path / "new", "--max-size", 0.1).returncode == 0


def changed(exported: Path, at: int, content: bytes) -> Path:
    """Change some bytes of an export."""
    whole = bytearray(exported.read_bytes())
    whole[at : at + len(content)] = content
    exported.write_bytes(whole)
    return exported


def header(**fields: Any) -> bytes:
    """The header of a chunk, with a valid checksum."""
    values = {"key": bytes(24), "fingerprint": LAYOUT.fingerprint, "payload_bytes": 1, "payload_checksum": 0}
    return Header(**{**values, **fields}).pack()


def test_a_corrupt_payload_is_left_out(exported: Path, tmp_path: Path) -> None:
    key = Header.unpack(exported.read_bytes()[3 * FILE_BYTES :]).key
    changed(exported, 3 * FILE_BYTES + 4096 + 77, b"?")
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1, "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["chunks"], found["problem"]) == (1, 5, "")
    assert found["bad"][0].startswith(f"{key.hex()}: payload checksum: expected")
    assert len(contents(tmp_path / "new")) == 5
    assert is_counted_right(tmp_path / "new")


@pytest.mark.parametrize(
    "content",
    [
        b"?",
        bytes(20) + b"?",
        header(fingerprint=OTHER.fingerprint),
        header(payload_bytes=5 << 30),
        header(payload_bytes=(1 << 64) - 1),
    ],
    ids=["magic", "key", "layout", "large", "absurd"],
)
def test_behind_a_damaged_or_foreign_header_the_import_goes_on(exported: Path, tmp_path: Path, content: bytes) -> None:
    changed(exported, 3 * FILE_BYTES, content)
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 100, "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["chunks"]) == (1, 5)
    assert found["problem"] == "expected 6 chunks, found 5; copy or export the file again"
    assert len(contents(tmp_path / "new")) == 5
    assert is_counted_right(tmp_path / "new")


@pytest.mark.parametrize("key", [b"../../../../tmp/evil!", bytes(23), b"/"])
def test_what_is_no_key_is_left_out(exported: Path, tmp_path: Path, key: bytes) -> None:
    changed(exported, 3 * FILE_BYTES, header(key=key, payload_bytes=LAYOUT.chunk_bytes))
    before = set(tmp_path.rglob("*"))
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1, "--json")
    assert (run.returncode, len(json.loads(run.stdout)["bad"])) == (1, 1)
    assert len(contents(tmp_path / "new")) == 5
    assert {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before} == {"new"}


def test_a_large_hostile_file_takes_little_memory(exported: Path, tmp_path: Path) -> None:
    """A header that promises 3 GiB, of which the file has 16 MiB."""
    changed(exported, 3 * FILE_BYTES, header(payload_bytes=3 << 30))
    with exported.open("ab") as file:
        file.truncate(16 << 20)
    command = [sys.executable, "-m", "tiercache", "import", exported, tmp_path / "new", "--max-size", "100"]
    run = subprocess.run(["/usr/bin/env", "bash", "-c", f"ulimit -v {2 << 20}; exec \"$@\"", "-", *command], check=False,
                         capture_output=True, text=True, timeout=120)  # fmt: skip
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("cut", [6 * FILE_BYTES, 5 * FILE_BYTES, 5 * FILE_BYTES + 50, FILE_BYTES + 4096, FILE_BYTES + 9000])
def test_a_file_that_is_cut_is_said(exported: Path, tmp_path: Path, cut: int) -> None:
    exported.write_bytes(exported.read_bytes()[:cut])
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1)
    assert (run.returncode, run.stderr) == (1, "error: the file is cut: it has no end; copy or export it again\n")
    assert len(contents(tmp_path / "new")) == cut // FILE_BYTES
    assert is_counted_right(tmp_path / "new")


def test_what_follows_the_end_is_said(exported: Path, tmp_path: Path) -> None:
    exported.write_bytes(exported.read_bytes() * 2)  # as `cat A B` makes it
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1)
    assert (run.returncode, run.stderr) == (1, "error: more follows behind its end: import several exports one by one\n")
    assert len(contents(tmp_path / "new")) == 6


async def test_a_directory_above_the_cap_gets_nothing_and_loses_nothing(directory: Path, exported: Path) -> None:
    chunk_paths(directory)[0].unlink()
    async with TierCache.open(config_for(directory), LAYOUT) as cache:
        await cache.tiers[0].scanned()  # type: ignore[attr-defined]
    run = tiercache("import", exported, directory, "--max-size", 2 * FILE_BYTES / 2**30)
    assert run.returncode == 1
    assert "the directory is full" in run.stderr
    assert len(contents(directory)) == 5


@pytest.mark.parametrize("content", [b"", b"no export", bytes(10240)])
def test_what_is_no_export_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    run = tiercache("import", tmp_path / "file", tmp_path / "new", "--max-size", 0.1)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


KILLED = """
import importlib, os, signal, sys

name, function, *arguments = sys.argv[1:]
module, calls = importlib.import_module(name), []
real = getattr(module, function)

def killed(*arguments, **options):
    found = real(*arguments, **options)
    calls.append(found)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(module, function, killed)
from tiercache.cli import app
app(arguments)
"""


def killed_in(module: str, function: str, *arguments: object) -> bool:
    """Run a command that is killed where that function has been called for the third time. Return whether it was."""
    command = [sys.executable, "-c", KILLED, f"tiercache.{module}", function, *map(str, arguments)]
    return subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL


def test_an_export_that_is_killed_leaves_no_file_of_that_name(directory: Path, tmp_path: Path) -> None:
    assert killed_in("commands.moving", "read_verified", "export", directory, "-o", tmp_path / "kv.export")
    assert not (tmp_path / "kv.export").exists()
    assert tiercache("export", directory, "-o", tmp_path / "kv.export").returncode == 0


def test_a_full_device_is_one_sentence_and_leaves_no_file(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiercache", "export", directory, "-o", tmp_path / "kv.export"]
    limited = ["bash", "-c", 'ulimit -f 128; trap "" XFSZ; exec "$@"', "-", *command]
    run = subprocess.run(limited, check=False, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_a_reader_that_goes_away_is_one_sentence(directory: Path) -> None:
    command = [sys.executable, "-m", "tiercache", "export", directory, "-o", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read().count("\n") == 1
    assert run.returncode == 2


def test_an_export_replaces_no_file_and_leaves_none_behind(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert tiercache("export", directory, "-o", tmp_path / "there").returncode == 2
    assert (tmp_path / "there").read_text() == "mine"
    chunks_of(tmp_path / "empty").mkdir(parents=True)
    (chunks_of(tmp_path / "empty") / "tiercache.json").write_text("{}")
    run = tiercache("export", tmp_path / "empty", "-o", tmp_path / "none")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "none").exists()


def test_an_import_stops_at_the_cap(exported: Path, tmp_path: Path) -> None:
    cap_bytes = 3 * (FILE_BYTES + 4096) + 4096
    run = tiercache("import", exported, tmp_path / "new", "--max-size", cap_bytes / 2**30, "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert "the directory is full" in found["problem"]
    assert 0 < found["chunks"] == len(contents(tmp_path / "new")) < 6
    there = survey(tmp_path / "new")
    assert there["counted_bytes"] <= cap_bytes
    assert is_counted_right(tmp_path / "new")


def test_nothing_is_written_where_chunks_are_not_counted(directory: Path, exported: Path, tmp_path: Path) -> None:
    ledger = chunks_of(directory) / ".tiercache" / "ledger"
    ledger.unlink()
    chunk_paths(directory)[0].unlink()
    run = tiercache("import", exported, directory, "--max-size", 0.1)
    assert run.returncode == 1
    assert "let a cache open it" in run.stderr
    assert len(contents(directory)) == 5


@pytest.mark.parametrize(
    ("module", "function", "left"),
    [("commands.moving", "write_chunk_file", (2, 1)), ("tiers.files.chunk_files", "publish", (3, 0))],
)
async def test_a_killed_import_leaves_nothing_that_the_next_one_does_not_count(
    exported: Path, tmp_path: Path, module: str, function: str, left: tuple[int, int]
) -> None:
    assert killed_in(module, function, "import", exported, tmp_path / "new", "--max-size", 0.1)
    there = survey(tmp_path / "new")
    assert (there["chunks"], there["unfinished"]) == left
    assert there["ledger_bytes"] >= there["counted_bytes"] + there["unfinished_bytes"]
    async with TierCache.open(config_for(tmp_path / "new"), LAYOUT) as cache:
        await cache.tiers[0].scanned()  # type: ignore[attr-defined]
    assert is_counted_right(tmp_path / "new")
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1, "--json")
    assert (run.returncode, json.loads(run.stdout)["chunks"]) == (0, 6 - left[0])
    assert is_counted_right(tmp_path / "new")
