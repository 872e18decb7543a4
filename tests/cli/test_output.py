"""What the commands print at 80 columns and in a pipe: every word whole, nothing cut."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import COLUMNS, in_terminal, tiercache

REPOSITORY = Path(__file__).parents[2]


def commands(directory: Path) -> dict[str, list[object]]:
    trace = REPOSITORY / "tests/replay/excerpts/mooncake_conversation.jsonl"
    return {
        "doctor": ["doctor", "--path", directory],
        "config explain": ["config", "explain", REPOSITORY / "examples/configs/local_disk.yaml"],
        "stat": ["stat", directory],
        "verify": ["verify", directory],
        "bench": ["bench", "--quick", "--pairs", 1, "--only", "core", "--directory", directory.parent],
        "replay": ["replay", trace, "--sweep", "10%", "--flash", "20%", "--prefetch", "hints"],
    }


@pytest.mark.parametrize("name", ["doctor", "config explain", "stat", "verify", "bench", "replay"])
def test_nothing_is_cut_in_a_narrow_terminal_or_a_pipe(directory: Path, name: str) -> None:
    lines = in_terminal(*commands(directory)[name])
    assert lines
    assert all(len(line) <= COLUMNS for line in lines)
    piped = tiercache(*commands(directory)[name]).stdout
    assert "…" not in "".join(lines) + piped


def test_every_word_of_the_doctor_is_whole(tmp_path: Path) -> None:
    findings = json.loads(tiercache("doctor", "--path", tmp_path, "--json").stdout)
    said = {word for one in findings for word in f"{one['found']} {one['advice']}".split() if not re.search(r"\d", word)}
    printed = set(" ".join(in_terminal("doctor", "--path", tmp_path)).split())
    assert {word for word in said if len(word) < COLUMNS - 10} <= printed
    assert said <= set(tiercache("doctor", "--path", tmp_path).stdout.split())


def test_a_piped_table_of_figures_stays_a_table(directory: Path) -> None:
    lines = tiercache(*commands(directory)["bench"]).stdout.splitlines()
    assert lines[1].startswith("┃ figure") and "ours / it" in lines[1]
