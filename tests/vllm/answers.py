"""How answers of engines are compared."""

from __future__ import annotations

from typing import Any


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) < 1e-5 for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


def close_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """What vLLM's own recompute gives: it splits the prefill differently, so its numbers differ by up to 0.05."""
    return one["tokens"][:4] == other["tokens"][:4] and all(
        abs(a - b) < 0.15 for a, b in zip(one["logprobs"][:4], other["logprobs"][:4], strict=True)
    )


def assert_hits(answers: list[dict[str, Any]], oracle: list[dict[str, Any]]) -> None:
    """Assert that the same tokens were found and that the answers are the same."""
    for ours, theirs in zip(answers, oracle, strict=True):
        assert ours["cached"] == theirs["cached"], (ours, theirs)
        assert same_answer(ours, theirs), (ours, theirs)


def assert_wrong_hits(answers: list[dict[str, Any]], oracle: list[dict[str, Any]]) -> None:
    """Assert that as much was found and that no answer is the same: with reversed bytes, else hits would prove nothing."""
    for ours, theirs in zip(answers, oracle, strict=True):
        assert ours["cached"] == theirs["cached"], (ours, theirs)
        assert not same_answer(ours, theirs), ours
