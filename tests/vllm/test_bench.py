"""`python -m tests.bench --only vllm` with real servers, tiny: what is measured has names, pairs and a clean end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.vllm.goals import GOALS, compared_with_goals
from tests.bench.vllm.measure import measure_vllm
from tests.bench.vllm.workload import Amounts
from tests.needs import needs_fuse, takes_minutes
from tiercache.bench.figures import Figures
from tiercache.bench.workload import Plan

pytestmark = takes_minutes

TINY = Amounts(2, 3, 4, 6, 0.03, 1, 1, 1, 4, 5, 0.03, 64, 2)
RUN = ("total_s", "tokens_per_s", "ttft_mean_ms", "ttft_p99_ms", "cpu_s")
STATES = ("well", "slow", "hanging", "well_again")


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def figures(model: str, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> Figures:
    found = Figures()
    plan = Plan(1, True, tmp_path_factory.mktemp("bench"), said.append)
    measure_vllm(found, plan, TINY, Path(model))
    return found


@pytest.mark.parametrize(
    ("workload", "others"),
    [
        ("new", ["alone"]),
        ("engine_hits", ["alone"]),
        ("documents", ["alone", "ceiling"]),
        ("hang_ups", ["ceiling"]),
        *(pytest.param(f"disk_{state}", ["alone"], marks=needs_fuse) for state in STATES),
    ],
)
def test_each_workload_is_measured_beside_its_rivals(figures: Figures, workload: str, others: list[str]) -> None:
    for what in RUN:
        name = f"vllm.{workload}.{what}"
        assert len(figures.samples[name]) == 1, name
        for other in others:
            assert figures.ratio(name, f"{other}.{name}"), name
            assert f"{other}.{name}" in figures.compared[name]


def test_each_workload_hits_what_it_says(figures: Figures) -> None:
    for name in ("vllm", "alone.vllm"):
        assert figures.samples[f"{name}.new.hit_part"] == [0]
        assert figures.samples[f"{name}.engine_hits.hit_part"][0] > 0.9
    assert figures.samples["ceiling.vllm.documents.hit_part"][0] > 0.1
    assert figures.samples["vllm.documents.hit_part"][0] > 0.1


@needs_fuse
def test_the_slow_disk_is_slow_and_the_others_are_not(figures: Figures) -> None:
    (well_ms,), (slow_ms,) = (figures.samples[f"vllm.disk_{state}.file_read_ms"] for state in ("well", "slow"))
    assert slow_ms > 20 * well_ms


def test_steps_with_64_waiting_requests_and_figures_for_every_goal_were_seen(figures: Figures, said: list[str]) -> None:
    (count,), (median_ms,) = figures.samples["vllm.step_count"], figures.samples["vllm.step_median_ms"]
    assert count >= 10
    assert 0 < median_ms <= figures.samples["vllm.step_p99_ms"][0]
    assert len(compared_with_goals(figures)) == len(GOALS)
    assert "vLLM: documents, pair 1 of 1" in said
