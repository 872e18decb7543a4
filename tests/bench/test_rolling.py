"""What the rolling restart concludes; the servers themselves take minutes to start."""

from __future__ import annotations

from tests.bench.vllm.rolling import AFTER, RESTARTS, STEADY, Sample, findings


def test_what_is_said_of_each_goal() -> None:
    before = [Sample(float(number), STEADY, "A", 0.1, 100, 90) for number in range(50)]
    restarts = [Sample(60.0 + number, RESTARTS, "B", 0.11, 100, 90) for number in range(50)]
    after = [Sample(120.0, AFTER, "A", 0.2, 100, 50), Sample(130.0, AFTER, "B", None, 100, 0)]
    said = findings([*before, *restarts, *after], {"A": 119.0, "B": 60.0})
    assert [line.partition(":")[0] for line in said] == ["missed", "missed", "reached", "reached", "missed"]
    assert said[0] == "missed: 1 of 102 requests failed, the goal is 0"
