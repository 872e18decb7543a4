"""What the demo writes, and what it calls wrong."""

from dataclasses import replace

import pytest

from tiercache.demo.question import Answer
from tiercache.demo.report import Run, problems, same_text


@pytest.fixture
def runs() -> dict[str, Run]:
    def run(name: str, tier: str, ttft_s: float, hit_tokens: int) -> Run:
        return Run(name, tier, Answer(f"chatcmpl-{name}", ttft_s, 6043, hit_tokens, "It is about Python."))

    return {
        "cold": run("cold", "", 14.2, 0),
        "cpu": run("cpu", "cpu", 0.15, 6016),
        "disk_restart": run("disk_restart", "disk", 0.2, 6016),
        "prefix_cache": run("prefix_cache", "vllm", 0.14, 6016),
    }


def change(run: Run, **changes: object) -> Run:
    return replace(run, answer=replace(run.answer, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "disk_restart"])
def test_a_missing_hit_is_a_problem(runs: dict[str, Run], name: str) -> None:
    runs[name] = change(runs[name], hit_tokens=0)
    assert [problem for problem in problems(runs) if "expected 6016 tokens hit, found 0" in problem]


def test_a_hit_in_the_wrong_tier_is_a_problem(runs: dict[str, Run]) -> None:
    runs["disk_restart"] = replace(runs["disk_restart"], tier="cpu")
    assert problems(runs) == ["warm, disk after restart: expected a hit in disk, found cpu"]


def test_a_reference_that_came_from_our_tiers_is_no_reference(runs: dict[str, Run]) -> None:
    runs["prefix_cache"] = replace(runs["prefix_cache"], tier="cpu")
    assert problems(runs) == ["vLLM's own prefix cache: the hit came from cpu"]


def test_a_cold_run_that_hit_is_a_problem(runs: dict[str, Run]) -> None:
    runs["cold"] = change(runs["cold"], hit_tokens=128)
    assert problems(runs) == ["the cold run was not cold: 128 tokens hit"]


def test_a_different_answer_is_a_problem_that_shows_both(runs: dict[str, Run]) -> None:
    runs["cpu"] = change(runs["cpu"], text="A lie.")
    assert not same_text(runs)
    (problem,) = problems(runs)
    assert "'A lie.'" in problem and "'It is about Python.'" in problem


def test_a_cold_answer_may_differ(runs: dict[str, Run]) -> None:
    """A recompute splits the prefill differently, in any engine."""
    runs["cold"] = change(runs["cold"], text="It is about a language.")
    assert same_text(runs)
    assert problems(runs) == []
