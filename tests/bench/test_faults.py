"""The matrix of faults, with the stores that need no peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.bench.faults.matrix import FAULTS
from tests.needs import is_there, needs_fuse
from tests.readme.blocks import REPOSITORY

CHUNKS = 8


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    place = tmp_path_factory.mktemp("faults")
    command = f"-m tests.bench.faults --only tiercache,plain-files --chunks {CHUNKS} --json found.json --directory {place}"
    there = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *command.split()], cwd=place, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hits kept" in done.stdout
    return {(cell["fault"], cell["store"]): cell for cell in json.loads((place / "found.json").read_text())}


@pytest.mark.parametrize("fault", FAULTS)
def test_tiercache_serves_nothing_wrong_and_raises_nothing(cells: Any, fault: str) -> None:
    cell = cells[fault, "tiercache"]
    if fault == "failed load" and not (is_there("fuse3") and is_there("/dev/fuse")):
        assert "fuse" in cell["cannot"]
    elif fault == "full disk" and not is_there("mount"):
        assert "mount" in cell["cannot"]
    else:
        assert not cell["cannot"]
        assert cell["wrong"] == 0 and cell["errors"] == []
        assert cell["hits"] + cell["missed"] == cell["chunks"]


@pytest.mark.parametrize(
    ("fault", "hits"),
    [("nothing", CHUNKS), ("flipped bit", 6), ("truncated file", 6), ("swapped files", 6), ("two writers", CHUNKS)],
)
def test_tiercache_keeps_every_chunk_whose_file_is_whole(cells: Any, fault: str, hits: int) -> None:
    assert cells[fault, "tiercache"]["hits"] == hits


@needs_fuse
def test_a_failed_load_fails_the_reads_of_every_store(cells: Any) -> None:
    assert (cells["failed load", "tiercache"]["hits"], cells["failed load", "tiercache"]["missed"]) == (6, 2)
    assert len(cells["failed load", "plain-files"]["errors"]) == 2


@pytest.mark.needs("mount")
def test_a_full_disk_has_room_for_half_of_the_chunks(cells: Any) -> None:
    assert 0 < cells["full disk", "tiercache"]["hits"] <= CHUNKS // 2
    assert cells["full disk", "plain-files"]["errors"]


def test_writers_are_killed_in_the_middle(cells: Any) -> None:
    for store in ("tiercache", "plain-files"):
        cell = cells["kill -9 in a write", store]
        assert not cell["note"].startswith("0 of")
        assert 0 < cell["hits"] < cell["chunks"]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.startswith("other ")])
def test_chunks_of_another_identity_are_found_by_no_one_but_plain_files(cells: Any, fault: str) -> None:
    assert cells[fault, "tiercache"]["missed"] == CHUNKS
    assert cells[fault, "plain-files"]["wrong"] == CHUNKS


@pytest.mark.parametrize("fault", ["flipped bit", "truncated file", "swapped files"])
def test_the_harness_finds_the_wrong_bytes_of_a_store_that_verifies_nothing(cells: Any, fault: str) -> None:
    cell = cells[fault, "plain-files"]
    assert (cell["wrong"], cell["hits"]) == (2, 6)
