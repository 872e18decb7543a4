"""Predictors on virtual time: the same calls, the same predictions."""

import pytest

from tiercache.core.prediction import Gaps, Hints, Prediction, Sessions, Workflows

KEYS = [b"0", b"1", b"2"]


def test_gaps_know_when_half_have_ended() -> None:
    gaps = Gaps()
    for gap_s in (1, 2, 4, 8, 16, 32, 64, 128):
        gaps.add(gap_s)
    assert 8 <= gaps.quantile(0.5) <= 16
    assert gaps.probability(0, 0, 1000) == pytest.approx(1)
    assert gaps.probability(0, 0, 10) == pytest.approx(0.5, abs=0.05)


def test_gaps_that_have_lasted_long_last_longer() -> None:
    gaps = Gaps()
    for gap_s in [5] * 90 + [500] * 10:
        gaps.add(gap_s)
    assert gaps.quantile(0.5) < 10
    assert gaps.quantile(0.5, idle_s=30) > 400
    assert gaps.probability(30, 30, 100) == 0


def test_who_never_comes_back_counts() -> None:
    gaps = Gaps()
    for _ in range(10):
        gaps.add(5)
        gaps.add_lost()
    assert gaps.probability(0, 0, 1e6) == pytest.approx(0.5)
    gaps.forget_lost()
    assert gaps.probability(0, 0, 1e6) > 0.5


def test_those_that_were_lost_fade_with_the_others() -> None:
    gaps = Gaps(limit=8)
    for _ in range(200):
        gaps.add(1.0)
        gaps.add_lost()
    assert gaps.probability(0.0, 0.0, 10.0) == pytest.approx(0.5, abs=0.1)


def test_old_gaps_fade() -> None:
    gaps = Gaps(limit=100)
    for _ in range(100):
        gaps.add(1000)
    for _ in range(500):
        gaps.add(1)
    assert gaps.quantile(0.95) < 10
    assert gaps.count <= 101


def test_nothing_known_says_nothing() -> None:
    gaps = Gaps()
    assert gaps.probability(0, 0, 100) == 0
    assert gaps.quantile(0.5, idle_s=7) == 7
    assert not gaps.ends_after(0)


def test_a_chance_is_of_those_that_have_not_come_yet() -> None:
    prediction = Prediction("p", "s", KEYS, 0.8, 10.0, 20.0, 40.0)
    assert prediction.chance(0, 20) == pytest.approx(0.4)
    assert prediction.chance(0, 100) == pytest.approx(0.8)
    assert prediction.chance(20, 100) == pytest.approx(0.4 / 0.6)
    assert prediction.chance(0, 5) == 0


def test_a_hint_is_believed_for_as_long_as_it_says() -> None:
    hints = Hints()
    prediction = hints.announce(KEYS, 100.0, due_in_s=5.0, ttl_s=30.0, priority=2)
    assert (prediction.expected_s, prediction.priority) == (105.0, 2)
    assert prediction.latest_s + prediction.grace_s == 135.0
    assert prediction.subject != hints.announce(KEYS, 100.0).subject
    assert hints.announce(KEYS, 100.0, subject="mine").subject == "mine"


def sessions_with(gaps_s: list[float], kind: str = "tool") -> Sessions:
    """One session of the population for each gap."""
    sessions = Sessions()
    for number, gap_s in enumerate(gaps_s):
        sessions.arrived(f"other{number}", 0.0)
        sessions.finished(f"other{number}", KEYS, 1.0, kind)
        sessions.arrived(f"other{number}", 1.0 + gap_s)
    return sessions


def test_a_finished_turn_predicts_the_next_one() -> None:
    sessions = sessions_with([10.0] * 20)
    sessions.arrived("mine", 100.0)
    prediction = sessions.finished("mine", KEYS, 110.0, "tool")
    assert prediction is not None
    assert prediction.keys == KEYS
    assert prediction.expected_s == pytest.approx(120, abs=2)
    assert prediction.probability > 0.9


def test_nothing_is_said_before_enough_is_known() -> None:
    sessions = sessions_with([10.0] * 3)
    assert sessions.finished("mine", KEYS, 0.0, "tool") is None


def test_how_a_turn_ended_matters() -> None:
    sessions = sessions_with([2.0] * 20, "tool")
    for number in range(20):
        sessions.arrived(f"person{number}", 0.0)
        sessions.finished(f"person{number}", KEYS, 0.0, "end_turn")
        sessions.arrived(f"person{number}", 600.0)
    tool, person = (sessions.finished(name, KEYS, 1000.0, name) for name in ("tool", "end_turn"))
    assert tool is not None and person is not None
    assert tool.expected_s < 1005 < 1400 < person.expected_s


def test_the_sessions_own_gaps_have_a_say_in_when() -> None:
    sessions = sessions_with([10.0] * 50)
    now_s = 0.0
    for _ in range(20):
        sessions.arrived("slow", now_s)
        sessions.finished("slow", KEYS, now_s, "tool")
        now_s += 100.0
    sessions.arrived("slow", now_s)
    prediction = sessions.finished("slow", KEYS, now_s, "tool")
    assert prediction is not None
    assert prediction.expected_s - now_s > 50


def test_the_longer_it_stays_away_the_less_it_is_expected() -> None:
    sessions = sessions_with([10.0] * 95 + [1000.0] * 5)
    for number in range(20):
        sessions.arrived(f"gone{number}", 0.0)
        sessions.finished(f"gone{number}", KEYS, 0.0, "tool")
        assert sessions.predict(f"gone{number}", 60.0) is not None
    sessions.finished("mine", KEYS, 0.0, "tool")
    early, late = sessions.predict("mine", 1.0), sessions.predict("mine", 60.0)
    assert early is not None and late is not None
    assert late.probability < 0.5 < early.probability


def test_a_running_or_a_finished_session_is_not_predicted() -> None:
    sessions = sessions_with([10.0] * 20)
    sessions.finished("mine", KEYS, 100.0, "tool")
    sessions.arrived("mine", 105.0)
    assert sessions.predict("mine", 106.0) is None
    sessions.finished("mine", KEYS, 110.0, "tool")
    sessions.over("mine")
    assert sessions.predict("mine", 111.0) is None


def test_sessions_are_bounded() -> None:
    sessions = Sessions(limit=5)
    for number in range(50):
        sessions.arrived(str(number), float(number))
    assert len(sessions) == 5


def workflow(runs: int) -> Workflows:
    """plan -> code, and every third time -> review; each step has a prompt of its own."""
    workflows = Workflows()
    for run in range(runs):
        start_s = 100.0 * run
        for step, at_s in (("plan", 0), ("review" if run % 3 == 0 else "code", 20)):
            workflows.arrived(str(run), step, [step.encode(), b"%d" % run], start_s + at_s)
            workflows.finished(str(run), step, start_s + at_s + 5)
        workflows.over(str(run))
    return workflows


def test_a_step_predicts_those_that_follow_it_with_the_prefix_that_they_share() -> None:
    workflows = workflow(30)
    workflows.arrived("new", "plan", [b"plan", b"new"], 10_000.0)
    found = workflows.finished("new", "plan", 10_005.0)
    assert [(prediction.subject, list(prediction.keys)) for prediction in found] == [
        ("new>code", [b"code"]),
        ("new>review", [b"review"]),
    ]
    assert [round(prediction.probability, 1) for prediction in found] == [0.7, 0.3]
    assert found[0].expected_s == pytest.approx(10_020, abs=2)


def test_the_last_step_predicts_nothing() -> None:
    workflows = workflow(30)
    workflows.arrived("new", "code", [b"code"], 10_000.0)
    assert workflows.finished("new", "code", 10_005.0) == []


def test_two_runs_are_not_a_habit() -> None:
    workflows = workflow(2)
    workflows.arrived("new", "plan", [b"plan"], 10_000.0)
    assert workflows.finished("new", "plan", 10_005.0) == []


def test_the_same_history_gives_the_same_predictions() -> None:
    def tell() -> list[Prediction | None]:
        sessions = sessions_with([1.0, 5.0, 25.0] * 10)
        return [sessions.finished("mine", KEYS, 100.0, "tool"), sessions.predict("mine", 130.0)]

    assert tell() == tell()


def test_memory_is_bounded_whoever_is_told_of_and_in_whatever_words() -> None:
    sessions = Sessions(limit=10)
    for number in range(1000):
        sessions.finished(f"s{number}", [b"k"], float(number), kind=f"kind {number}")
    assert len(sessions) == 10, "also those that never said that they began"
    assert len(sessions._population) <= 257
    workflows = Workflows(limit=2000)
    for number in range(1000):
        workflows.arrived("run", f"step {number}", [b"k"], float(number))
        workflows.finished("run", "hub", float(number))
    assert len(workflows._steps["hub"].followed) <= 64
