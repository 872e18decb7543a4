"""The table of vLLM's offloading: what counts as a wrong answer. Engines: when it is run."""

from __future__ import annotations

from pathlib import Path

from tests.bench.vllm.offloading import Side, is_right, table
from tests.bench.vllm.offloading_engines import Answer

RIGHT = Answer([1, 2, 3, 4, 5], [-0.1, -0.2, -0.3, -0.4, -0.5], 0, 0.1)


def test_an_answer_may_differ_as_much_as_a_recompute_does() -> None:
    assert is_right(Answer([1, 2, 3, 4, 9], [-0.2, -0.2, -0.3, -0.4, -2.0], 384, 0.1), RIGHT)
    assert not is_right(Answer([1, 2, 3, 9, 5], RIGHT.logprobs, 384, 0.1), RIGHT)
    assert not is_right(Answer(RIGHT.tokens, [-0.1, -0.2, -0.5, -0.4, -0.5], 384, 0.1), RIGHT)
    assert not is_right(Answer(RIGHT.tokens, [float("nan")] * 5, 384, 0.1), RIGHT)


def test_the_table_has_medians_and_extremes(tmp_path: Path) -> None:
    sides = [Side(name, tmp_path, {"a flipped bit": "x"}, {"computed": [0.1, 0.3, 0.2]}) for name in ("fs", "tiercache")]
    assert table(sides).splitlines()[2:] == [
        "| a flipped bit | x | x |",
        "| computed | 200 ms (100 .. 300) | 200 ms (100 .. 300) |",
    ]
