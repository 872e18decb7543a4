"""`tiercache export` and `tiercache import`: chunks move whole, verified on both sides, and within the cap."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import LAYOUT, chunk_paths, config_for, tiercache
from tests.tiers.test_disk import flip
from tiercache import Config, Layout, TierCache
from tiercache.commands.stat import survey

FILE_BYTES = 4096 + LAYOUT.chunk_bytes
OTHER = Layout("other", chunk_tokens=64, bytes_per_token=1024)


def contents(directory: Path) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in chunk_paths(directory)}


@pytest.fixture
def exported(directory: Path, tmp_path: Path) -> Path:
    file = tmp_path / "kv.tar"
    assert tiercache("export", directory, "-o", file).returncode == 0
    return file


def rewritten(exported: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]) -> Path:
    """The archive with other members."""
    changed = exported.with_name("changed.tar")
    with tarfile.open(exported) as old, tarfile.open(changed, "w") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            member, content = change(member, file.read())
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return changed


def is_chunk(member: tarfile.TarInfo, number: int) -> bool:
    return member.name.endswith(number.to_bytes(24, "big").hex())


async def is_counted_right(directory: Path) -> bool:
    found = await survey(directory)
    return bool(found["ledger_bytes"] == found["counted_bytes"]) and not found["unfinished"]


async def test_exported_chunks_are_hits_where_they_are_imported(
    directory: Path, exported: Path, tmp_path: Path
) -> None:
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1)
    assert (run.returncode, run.stdout) == (
        0,
        f"6 chunks imported, 0.4 MiB of layout {LAYOUT.fingerprint.hex()[:16]}; 0 left out\n",
    )
    assert exported.stat().st_mode & 0o777 == 0o600
    assert contents(tmp_path / "new") == contents(directory)
    assert await is_counted_right(tmp_path / "new")
    async with TierCache.open(config_for(tmp_path / "new"), LAYOUT) as cache:
        for number in range(6):
            async with cache.get(number.to_bytes(24, "big")) as lease:
                assert lease is not None and np.all(np.frombuffer(lease.view, np.uint8) == number)


def test_a_pipe_needs_no_file(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiercache"]
    with subprocess.Popen([*command, "export", directory, "-o", "-"], stdout=subprocess.PIPE) as export:
        run = subprocess.run(
            [*command, "import", "-", tmp_path / "new", "--max-size", "0.1"],
            stdin=export.stdout,
            check=False,
            timeout=60,
        )
    assert (run.returncode, export.returncode) == (0, 0)
    assert contents(tmp_path / "new") == contents(directory)


async def test_both_work_beside_a_running_cache_and_what_is_there_stays(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "kv.tar"
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
    assert await is_counted_right(tmp_path / "new")


async def test_compressed_chunks_move_as_they_are(tmp_path: Path) -> None:
    def config(directory: Path) -> Config:
        values = {"max_local_cpu_size": 0.01, "local_disk": str(directory), "max_local_disk_size": 0.1}
        return Config.load(environ={}, overrides=values | {"disk_compression": "zstd"})

    payload = np.arange(LAYOUT.chunk_bytes, dtype=np.uint32).view(np.uint8)[: LAYOUT.chunk_bytes]
    async with TierCache.open(config(tmp_path / "kv"), LAYOUT) as cache:
        await cache.put(bytes(24), payload)
    (path,) = chunk_paths(tmp_path / "kv")
    assert path.stat().st_size < FILE_BYTES
    assert tiercache("export", tmp_path / "kv", "-o", tmp_path / "kv.tar").returncode == 0
    assert tiercache("import", tmp_path / "kv.tar", tmp_path / "new", "--max-size", 0.1).returncode == 0
    assert contents(tmp_path / "new") == contents(tmp_path / "kv")
    async with TierCache.open(config(tmp_path / "new"), LAYOUT) as cache, cache.get(bytes(24)) as lease:
        assert lease is not None and np.array_equal(lease.view, payload)


async def test_of_several_layouts_one_is_chosen(directory: Path, tmp_path: Path) -> None:
    async with TierCache.open(config_for(directory), OTHER) as cache:
        await cache.put((7).to_bytes(24, "big"), np.full(OTHER.chunk_bytes, 7, np.uint8))
    file = tmp_path / "kv.tar"
    run = tiercache("export", directory, "-o", file)
    assert run.returncode == 2 and not file.exists()
    assert f"{OTHER.fingerprint.hex()[:16]} (1 chunks)" in run.stderr
    run = tiercache("export", directory, "-o", file, "--layout", OTHER.fingerprint.hex()[:16])
    assert run.stdout.startswith("1 chunks exported")


def test_a_bad_chunk_is_left_out_and_stays(directory: Path, tmp_path: Path) -> None:
    payload, header = chunk_paths(directory)[2:4]
    flip(payload, 4096 + 77)
    flip(header, 20)
    run = tiercache("export", directory, "-o", tmp_path / "kv.tar", "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["chunks"]) == (1, 4)
    assert sorted(line.split(": ")[1] for line in found["bad"]) == ["header checksum", "payload checksum"]
    assert payload.exists() and header.exists()
    assert tiercache("import", tmp_path / "kv.tar", tmp_path / "new", "--max-size", 0.1).returncode == 0


@pytest.mark.parametrize("at", [4096 + 77, 0, 20, 50], ids=["payload", "magic", "key", "layout"])
async def test_a_corrupt_member_is_left_out(exported: Path, tmp_path: Path, at: int) -> None:
    def change(member: tarfile.TarInfo, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if is_chunk(member, 3):
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        return member, content

    run = tiercache("import", rewritten(exported, change), tmp_path / "new", "--max-size", 0.1, "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["chunks"], len(found["bad"]), found["problem"]) == (1, 5, 1, "")
    assert "expected" in found["bad"][0]
    assert len(contents(tmp_path / "new")) == 5
    assert await is_counted_right(tmp_path / "new")


async def test_chunks_of_another_layout_are_left_out(directory: Path, exported: Path, tmp_path: Path) -> None:
    def change(member: tarfile.TarInfo, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
        return member, content.replace(LAYOUT.fingerprint.hex().encode(), OTHER.fingerprint.hex().encode())

    run = tiercache("import", rewritten(exported, change), tmp_path / "new", "--max-size", 0.1, "--json")
    assert (run.returncode, len(json.loads(run.stdout)["bad"])) == (1, 6)
    assert contents(tmp_path / "new") == {}


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/tmp/evil",
        "00/../../evil",
        "00/" + "0" * 47,
        "01/" + "0" * 47 + "3",
        "0" * 48,
        "quarantine/" + "0" * 48,
    ],
)
def test_members_with_other_names_are_left_out(exported: Path, tmp_path: Path, name: str) -> None:
    def change(member: tarfile.TarInfo, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
        member.name = name if is_chunk(member, 3) else member.name
        return member, content

    changed, before = rewritten(exported, change), set(tmp_path.rglob("*"))
    run = tiercache("import", changed, tmp_path / "new", "--max-size", 0.1, "--json")
    assert (run.returncode, len(json.loads(run.stdout)["bad"])) == (1, 1)
    assert len(contents(tmp_path / "new")) == 5
    assert {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before} == {"new"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_and_other_kinds_of_members_are_left_out(exported: Path, tmp_path: Path, kind: bytes) -> None:
    def change(member: tarfile.TarInfo, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
        if is_chunk(member, 3):
            member.type, member.linkname, content = kind, "/etc/passwd", b""
        return member, content

    run = tiercache("import", rewritten(exported, change), tmp_path / "new", "--max-size", 0.1)
    assert run.returncode == 1
    assert len(contents(tmp_path / "new")) == 5


@pytest.mark.parametrize("cut", [-1024, -20 * 512, FILE_BYTES + 3 * 512, 3 * 512 + 3 * (FILE_BYTES + 512) - 512])
async def test_a_file_that_is_cut_is_said(exported: Path, tmp_path: Path, cut: int) -> None:
    whole = exported.read_bytes()
    end = whole.rindex(b"end.json")
    exported.write_bytes(whole[: cut if cut > 0 else end + 1024 + cut])
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1)
    assert run.returncode == 1
    assert "error: " in run.stderr
    assert await is_counted_right(tmp_path / "new")


@pytest.mark.parametrize("content", [b"", b"no tar", bytes(10240)])
def test_what_is_no_export_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    run = tiercache("import", tmp_path / "file", tmp_path / "new", "--max-size", 0.1)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_an_export_replaces_no_file_and_leaves_none_behind(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert tiercache("export", directory, "-o", tmp_path / "there").returncode == 2
    assert (tmp_path / "there").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tiercache.json").write_text("{}")
    run = tiercache("export", tmp_path / "empty", "-o", tmp_path / "none")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "none").exists()


async def test_an_import_stops_at_the_cap(exported: Path, tmp_path: Path) -> None:
    cap_bytes = 3 * (FILE_BYTES + 4096) + 4096
    run = tiercache("import", exported, tmp_path / "new", "--max-size", cap_bytes / 2**30, "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert "the directory is full" in found["problem"]
    assert 0 < found["chunks"] == len(contents(tmp_path / "new")) < 6
    there = await survey(tmp_path / "new")
    assert there["counted_bytes"] <= cap_bytes
    assert await is_counted_right(tmp_path / "new")


def test_nothing_is_written_where_chunks_are_not_counted(directory: Path, exported: Path, tmp_path: Path) -> None:
    ledger = directory / ".tiercache" / "ledger"
    ledger.unlink()
    chunk_paths(directory)[0].unlink()
    run = tiercache("import", exported, directory, "--max-size", 0.1)
    assert run.returncode == 1
    assert "let a cache open it" in run.stderr
    assert len(contents(directory)) == 5


KILLED = """
import importlib, os, signal, sys
from pathlib import Path

from tiercache.commands.moving import import_command

module = importlib.import_module(sys.argv[3])
function, calls = getattr(module, sys.argv[4]), []

def killed(*arguments, **options):
    found = function(*arguments, **options)
    calls.append(found)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(module, sys.argv[4], killed)
import_command(sys.argv[1], Path(sys.argv[2]), 0.1, False)
"""


@pytest.mark.parametrize(
    ("module", "function", "left"),
    [
        ("tiercache.commands.moving", "write_chunk_file", (2, 1)),
        ("tiercache.tiers.files.chunk_files", "publish", (3, 0)),
    ],
)
async def test_a_killed_import_leaves_nothing_that_the_next_one_does_not_count(
    exported: Path, tmp_path: Path, module: str, function: str, left: tuple[int, int]
) -> None:
    command = [sys.executable, "-c", KILLED, exported, tmp_path / "new", module, function]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    there = await survey(tmp_path / "new")
    assert (there["chunks"], there["unfinished"]) == left
    assert there["ledger_bytes"] >= there["counted_bytes"] + there["unfinished_bytes"]
    async with TierCache.open(config_for(tmp_path / "new"), LAYOUT) as cache:
        await cache.tiers[0].scanned()  # type: ignore[attr-defined]
    assert await is_counted_right(tmp_path / "new")
    run = tiercache("import", exported, tmp_path / "new", "--max-size", 0.1, "--json")
    assert (run.returncode, json.loads(run.stdout)["chunks"]) == (0, 6 - left[0])
    assert await is_counted_right(tmp_path / "new")
