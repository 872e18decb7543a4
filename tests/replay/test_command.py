"""`tiercache replay` as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tiercache.cli import app

EXCERPT = Path(__file__).parent / "excerpts" / "mooncake_conversation.jsonl"


def said(status: int, *arguments: object) -> str:
    """What the command prints before it ends with this status."""
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def replayed(place: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that it writes of the excerpt."""
    assert "400 requests" in said(0, EXCERPT, *options, "--json", place / "rows.json")
    (found,) = json.loads((place / "rows.json").read_text())
    return list(found["rows"])


def test_a_sweep_beside_its_bounds(tmp_path: Path) -> None:
    rows = replayed(tmp_path, "--sweep", "5%,20%", "--policy", "LRU,lfu")
    assert [row["name"] for row in rows] == ["no cache", "LRU", "LFU", "LRU", "LFU", "optimal", "optimal", "infinite"]
    assert rows[0]["hit"] == 0
    hits = [row["hit"] for row in rows if row["name"] == "LRU"]
    assert hits == sorted(hits)


def test_flash_with_admissions_and_announcements(tmp_path: Path) -> None:
    options = ["--flash", "all", "--admission", "all,second_touch", "--prefetch", "none,hints", "--no-bounds"]
    rows = {row["name"]: row for row in replayed(tmp_path, *options)}
    assert set(rows) == {"LRU, all", "LRU, all, hints", "LRU, second_touch", "LRU, second_touch, hints"}
    assert rows["LRU, second_touch"]["flash_written_blocks"] < rows["LRU, all"]["flash_written_blocks"]
    assert rows["LRU, all, hints"]["precision"] > 0.8


def test_bad_lines_are_named_and_the_exit_status_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(EXCERPT.read_text() + "{oops\n")
    assert "line 401" in said(1, path, "--no-bounds")
    assert "line 401" in said(2, path, "--no-bounds", "--strict")


def test_bad_lines_are_named_if_no_line_is_good(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5}\n')
    output = said(2, EXCERPT, path, "--no-bounds")
    assert f"{path}: line 1: Object missing required field" in output
    assert "error: the trace holds no request that can be replayed" in output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--policy", "ARC"], "--policy: expected one or more of LRU, FIFO, LFU, MRU, found 'ARC'"),
        (["--admission", "some"], "--admission: expected one or more of all, second_touch, live_session, found 'some'"),
        (["--prefetch", "magic"], "--prefetch: expected one or more of none, hints, sessions, found 'magic'"),
        (["--sweep", "lots"], "size: expected 10%, 64GB, a number of blocks or all, found 'lots'"),
        (["--sweep", "9" * 400], "size: expected less than 1e+18, found '999"),
        (["--noisy", "inf"], "Input should be less than or equal to 1000000"),
        (["--measure-from", "1"], "--measure-from: expected a part from 0 to below 1, found 1"),
        (["--json", "/dev/full", "--no-bounds"], "error: /dev/full: No space left on device"),
        (["--json", "/"], "/ is a directory; expected the name of a file"),
        (["--plot", "picture.foo"], "--plot: expected a name that ends in .png, .svg, .pdf, found picture.foo"),
        (["--real", ".", "--plot", "picture.png"], "--real: no picture is made of it; expected no --plot"),
        (["--sweep", ","], "--sweep: expected at least one value, found none"),
        (["--prefetch", "none+hints"], "--prefetch: none goes with no other, found 'none+hints'"),
    ],
)
def test_wrong_arguments_are_one_sentence(options: list[str], problem: str) -> None:
    assert problem in said(2, EXCERPT, *options)


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    assert "cannot be read" in said(2, tmp_path / "none")


def test_a_picture(tmp_path: Path) -> None:
    for number, options in enumerate((["--sweep", "5%,20%"], ["--flash", "all", "--admission", "all,second_touch"])):
        file = tmp_path / f"{number}.png"
        said(0, EXCERPT, *options, "--plot", file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_panel_for_each_of_two_traces_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("tiercache.replay.command.plot", lambda sections, path: drawn.extend(sections) or "")
    paths = [tmp_path / name / "trace.jsonl" for name in ("monday", "tuesday")]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"time_s": 0, "blocks": [1, 2]}\n')
    said(0, *paths, "--plot", tmp_path / "picture.png")
    assert drawn == ["trace.jsonl", str(paths[1])]
