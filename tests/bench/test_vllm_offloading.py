"""The table of vLLM's offloading: what counts as a wrong answer, and what is done to files. Engines: when it is run."""

from __future__ import annotations

from pathlib import Path

from tests.bench.vllm.offloading import Side, flip, is_right, table, truncate
from tests.bench.vllm.offloading_engines import Answer

RIGHT = Answer([1, 2, 3, 4, 5], [-0.1, -0.2, -0.3, -0.4, -0.5], 0, 0.1)


def test_an_answer_may_differ_as_much_as_a_recompute_does() -> None:
    assert is_right(Answer([1, 2, 3, 4, 9], [-0.2, -0.2, -0.3, -0.4, -2.0], 384, 0.1), RIGHT)
    assert not is_right(Answer([1, 2, 3, 9, 5], RIGHT.logprobs, 384, 0.1), RIGHT)
    assert not is_right(Answer(RIGHT.tokens, [-0.1, -0.2, -0.5, -0.4, -0.5], 384, 0.1), RIGHT)
    assert not is_right(Answer(RIGHT.tokens, [float("nan")] * 5, 384, 0.1), RIGHT)


def test_a_flipped_bit_is_one_in_the_exponent_of_a_number(tmp_path: Path) -> None:
    file = tmp_path / "chunk"
    file.write_bytes(bytes(4096))
    flip(file)
    changed = [(place, byte) for place, byte in enumerate(file.read_bytes()) if byte]
    assert changed == [(2051, 0x40)] and changed[0][0] % 4 == 3


def test_a_truncated_file_has_half_of_its_length(tmp_path: Path) -> None:
    file = tmp_path / "chunk"
    file.write_bytes(bytes(4096))
    truncate(file)
    assert file.stat().st_size == 2048


def test_chunks_are_neither_small_nor_half_made(tmp_path: Path) -> None:
    for name, size in (("chunk", 1 << 20), ("config.json", 100), ("chunk_1.tmp", 1 << 20)):
        (tmp_path / name).write_bytes(bytes(size))
    side = Side("fs", tmp_path)
    assert [path.name for path in side.chunks()] == ["chunk"]
    assert side.occupied_bytes() >= 2 << 20


def test_the_table_has_medians_and_extremes(tmp_path: Path) -> None:
    sides = [Side(name, tmp_path, {"a flipped bit": "x"}, {"computed": [0.1, 0.3, 0.2]}) for name in ("fs", "tiercache")]
    assert table(sides).splitlines()[2:] == [
        "| a flipped bit | x | x |",
        "| computed | 200 ms (100 .. 300) | 200 ms (100 .. 300) |",
    ]
