"""Traces as they are read: three formats, and what is said of bad lines."""

import gzip
import json
import os
from pathlib import Path

import pytest

from tiercache.replay.bounds import survey
from tiercache.replay.formats import Trace, TraceError

EXCERPTS = Path(__file__).parent / "excerpts"


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def mooncake(time_ms: float, *ids: int) -> dict[str, object]:
    return {"timestamp": time_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}


def test_mooncake_counts_milliseconds_and_blocks_of_512_tokens(tmp_path: Path) -> None:
    _, request = Trace(written(tmp_path / "t", mooncake(0, 1), mooncake(1500, 1, 2)))
    assert (request.time_s, request.block_tokens, request.input_tokens) == (1.5, 512, 1024)
    assert len(set(request.keys)) == 2


def session(name: str, *turns: tuple[float, list[int]], scope: str = "local") -> dict[str, object]:
    requests = [
        {"t": t, "in": 64 * len(ids), "out": 5, "hash_ids": ids, "api_time": 2.0, "stop": "tool_use"} for t, ids in turns
    ]
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": requests}


def test_agentic_sessions_run_side_by_side_and_share_no_block(tmp_path: Path) -> None:
    path = written(tmp_path / "t", session("a", (0, [1]), (10, [1, 2])), session("b", (0, [1]), (5, [1, 2])))
    requests = list(Trace(path))
    assert [(request.time_s, request.session[-1:]) for request in requests if request.session] == [
        (0, "a"), (0, "b"), (5, "b"), (10, "a")
    ]  # fmt: skip
    assert requests[0].keys != requests[1].keys
    assert requests[0].keys[0] == requests[3].keys[0]
    assert requests[0].duration_s == 2.0


def test_ids_of_a_global_scope_are_shared(tmp_path: Path) -> None:
    path = written(tmp_path / "t", session("a", (0, [1]), scope="global"), session("b", (0, [1]), scope="global"))
    first, second = Trace(path)
    assert first.keys == second.keys


def test_sessions_can_begin_one_after_the_other(tmp_path: Path) -> None:
    path = written(tmp_path / "t", *(session(str(number), (0, [1]), (8, [2])) for number in range(3)))
    times = [request.time_s for request in Trace(path, session_interval_s=5.0)]
    assert times == [0, 5, 8, 10, 13, 18]


def test_our_own_format(tmp_path: Path) -> None:
    full = {
        "time_s": 2.5, "blocks": ["a", 7], "block_tokens": 16, "input_tokens": 20, "output_tokens": 9, "session": "s",
        "step": "plan", "duration_s": 4.5, "ended": "tool", "lead_s": 3.0,
    }  # fmt: skip
    first, second = Trace(written(tmp_path / "t", {"time_s": 1, "blocks": ["a", "b"]}, full))
    assert (first.input_tokens, first.block_tokens, first.session) == (512, 256, None)
    assert first.keys[0] == second.keys[0]
    assert (second.time_s, second.duration_s, second.lead_s) == (1.5, 4.5, 3.0)


def test_gzip_is_seen_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(json.dumps(mooncake(0, 1)).encode()))
    assert len(list(Trace(path))) == 1


BAD = {
    "not JSON": ("{oops", "line 2: "),
    "a missing field": ({"timestamp": 5}, "line 2: Object missing required field `input_length`"),
    "a wrong type": ({**mooncake(5, 1), "hash_ids": "x"}, "line 2: Expected `array`, got `str` - at `$.hash_ids`"),
    "a huge id": (mooncake(5, 1 << 64), "line 2: int too big to convert"),
    "deep nesting": ('{"timestamp": 5, "more": ' + "[" * 100_000, "line 2: maximum recursion depth exceeded"),
    "a huge length": ({**mooncake(5, 1), "input_length": 10**400}, "line 2: Expected `int` <= "),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_lines_are_skipped_with_their_number_or_refused(bad: str, tmp_path: Path) -> None:
    line, problem = BAD[bad]
    path = written(tmp_path / "t", mooncake(3, 1), line, "", mooncake(9, 2))
    trace = Trace(path)
    assert [request.time_s for request in trace] == [0, pytest.approx(0.006)]
    assert trace.skipped == 1 and problem in trace.problems[0]
    with pytest.raises(TraceError, match="line 2"):
        list(Trace(path, strict=True))


def test_a_line_before_its_time_is_skipped(tmp_path: Path) -> None:
    trace = Trace(written(tmp_path / "t", mooncake(3000, 1), mooncake(2000, 1), mooncake(4000, 1)))
    assert [request.time_s for request in trace] == [0, 1.0]
    assert trace.problems == [f"{trace.path}: line 2: time: 2 s is before 3 s, of the line before it"]


def test_a_bad_session_is_skipped_as_a_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "t", session("a", (0, [1])), session("b", (5, [1]), (4, [2])), session("c", (1, [1])))
    trace = Trace(path)
    assert len(list(trace)) == 2
    assert "line 2: requests[1].t: 4 s is before 5 s" in trace.problems[0]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"hash_ids": [1, 1 << 64]}, "found 18446744073709551616"),
    ],
)
def test_a_session_that_cannot_be_replayed_is_skipped(wrong: dict[str, object], problem: str, tmp_path: Path) -> None:
    turn = {"t": 0, "in": 10, "out": 1, "hash_ids": [1]}
    sessions = [{"id": "a", "requests": [turn]}, {"id": "b", "requests": [turn | wrong]}]
    trace = Trace(written(tmp_path / "t", *sessions))
    assert len(list(trace)) == 1
    assert problem in trace.problems[0]


def test_few_problems_are_kept_and_all_counted(tmp_path: Path) -> None:
    trace = Trace(written(tmp_path / "t", mooncake(0, 1), *["{"] * 100))
    assert len(list(trace)) == 1
    assert trace.skipped == 100
    assert len(trace.problems) == 20


@pytest.mark.parametrize("line", [b'{"note": "\xff"}', b"[" * 100_000], ids=["no UTF-8", "deep nesting"])
def test_a_bad_first_line_is_skipped(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(line + b"\n" + json.dumps(mooncake(0, 1)).encode())
    trace = Trace(path)
    assert len(list(trace)) == 1 and trace.skipped == 1


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "hello\n"])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match="expected mooncake, agentic or tiercache"):
        Trace(path)


def test_a_pipe_is_refused() -> None:
    read, write = os.pipe()
    os.write(write, b"".join(json.dumps(mooncake(number, number)).encode() + b"\n" for number in range(3)))
    os.close(write)
    try:
        with pytest.raises(TraceError, match="expected a file, found a pipe, which can be read only once"):
            Trace(Path(f"/dev/fd/{read}"))
    finally:
        os.close(read)


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(TraceError, match="cannot be read"):
        Trace(path)


def test_a_gzip_that_ends_too_soon_is_said_so_when_it_is_met(tmp_path: Path) -> None:
    lines = "".join(json.dumps(mooncake(number, number)) + "\n" for number in range(5000))
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-2000])
    with pytest.raises(TraceError, match="cannot be read to its end"):
        list(Trace(path))


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    path = written(tmp_path / "t", *({"time_s": 1.7e9 + second, "blocks": [second]} for second in (0, 5, 20)))
    assert [request.time_s for request in Trace(path)] == [0, 5, 20]
    assert survey(Trace(path)).span_s == 20


def test_a_trace_can_be_repeated_with_blocks_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "t", mooncake(1000, 1), mooncake(2000, 2))
    requests = list(Trace(path, repeat=2, limit=3))
    assert [request.time_s for request in requests] == [0, 1, 1]
    assert requests[0].keys != requests[2].keys
