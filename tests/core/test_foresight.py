"""What sessions and workflows do, as the plan is told of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tiercache.core.foresight import Foresight
from tiercache.core.prefetch import Fetch, PrefetchPlan, PrefetchSettings

KEYS = [bytes([number]) * 24 for number in range(4)]


@pytest.fixture
def foresight() -> Foresight:
    return Foresight(PrefetchPlan(PrefetchSettings(hot_bytes=1000, share_bytes=1000), chunk_bytes=1))


def turns(foresight: Foresight, session: str, *gaps_s: float, kind: str = "") -> float:
    """Turns that take no time, with such gaps between them, from time 0 on. Returns when the last one has ended."""
    now_s = 0.0
    for gap_s in (*gaps_s, None):
        foresight.began(session, KEYS, "", now_s)
        foresight.ended(session, KEYS, "", kind, now_s)
        now_s += gap_s or 0.0
    return now_s


def fetches(foresight: Foresight, now_s: float) -> list[Fetch]:
    found = []
    while (fetch := foresight.plan.next(now_s, lambda key: False)) is not None:
        found.append(fetch)
    return found


def test_session_with_a_known_gap_is_expected(foresight: Foresight) -> None:
    for number in range(20):
        turns(foresight, f"s{number}", 10.0)
    ended_s = turns(foresight, "mine", 10.0)
    assert [fetch.key for fetch in fetches(foresight, ended_s + 9.0)] == KEYS


def test_whoever_has_come_is_not_waited_for(foresight: Foresight) -> None:
    for number in range(20):
        turns(foresight, f"s{number}", 10.0)
        foresight.over(f"s{number}")
    ended_s = turns(foresight, "mine", 10.0)
    assert foresight.think_s is not None
    foresight.began("mine", KEYS, "", ended_s + 5.0)
    assert not fetches(foresight, ended_s + 9.0)
    foresight.think(ended_s + 1e6)
    assert foresight.think_s is None
    assert not fetches(foresight, ended_s + 1e6)


def test_idle_session_is_thought_about_again_at_growing_intervals(foresight: Foresight) -> None:
    """Nine of ten are back after 10 s, one after an hour: who is not back after a minute is of the latter kind."""
    for number in range(100):
        turns(foresight, f"s{number}", 10.0 if number % 10 else 3600.0)
        foresight.over(f"s{number}")
    foresight.began("mine", KEYS, "", 0.0)
    foresight.ended("mine", KEYS, "", "", 0.0)
    times = []
    while foresight.think_s is not None and foresight.think_s < 5000.0:
        times.append(foresight.think_s)
        foresight.think(foresight.think_s)
    assert 2 <= len(times) < 60
    late = [time_s for time_s in times if 60.0 < time_s < 3000.0]
    assert all(later >= 1.2 * sooner for sooner, later in pairwise(late))


def test_what_followed_a_step_is_given_up_when_another_one_comes(foresight: Foresight) -> None:
    for number in range(10):
        run = f"r{number}"
        foresight.began(run, KEYS[:1], "plan", 0.0)
        foresight.ended(run, KEYS[:1], "plan", "", 1.0)
        foresight.began(run, KEYS, "act", 6.0)
        foresight.ended(run, KEYS, "act", "", 7.0)
        foresight.over(run)
    foresight.began("mine", KEYS[:1], "plan", 100.0)
    foresight.ended("mine", KEYS[:1], "plan", "", 101.0)
    assert ("workflows", "mine>act") in foresight.plan._expected.entries
    foresight.began("mine", [], "other", 102.0)
    assert not foresight.plan._expected.entries


def test_sessions_that_came_back_are_known(foresight: Foresight) -> None:
    assert not foresight.began("mine", KEYS, "", 0.0)
    assert not foresight.ended("mine", KEYS, "", "", 1.0)
    assert foresight.began("mine", KEYS, "", 2.0)
    assert foresight.ended("mine", KEYS, "", "", 3.0)
    foresight.over("mine")
    assert not foresight.began("mine", KEYS, "", 4.0)


def test_memory_is_bounded_by_the_number_of_sessions(foresight: Foresight) -> None:
    foresight.sessions.limit = 50
    for number in range(1000):
        turns(foresight, f"s{number}", 10.0)
    assert len(foresight.sessions) == 50
    assert len(foresight._again) <= 50 and len(foresight._alarms) <= 2 * 50 + 65
    assert len(foresight.plan._expected.entries) <= 50
    assert len(foresight.plan._alarms) <= 2 * 50 + 65 and len(foresight.plan._ends) <= 2 * 50 + 65


def test_a_finished_turn_that_never_began_counts_as_a_session() -> None:
    plan = PrefetchPlan(PrefetchSettings(hot_bytes=1000, share_bytes=1000), chunk_bytes=1)
    foresight = Foresight(plan)
    foresight.sessions.limit = 5
    for number in range(100):
        foresight.ended(f"s{number}", KEYS, "", "", float(number))
    assert len(foresight.sessions) == 5


def test_many_sessions_that_are_due_are_thought_about_some_at_a_time() -> None:
    """The loop is the engine's: what is said of a thousand sessions of 256 chunks takes a tenth of a second."""
    foresight = Foresight(PrefetchPlan(PrefetchSettings(hot_bytes=1000, share_bytes=1000), chunk_bytes=1))
    for number in range(20):
        turns(foresight, f"s{number}", 10.0)
    for number in range(200):
        keys = [(number * 256 + place).to_bytes(24, "big") for place in range(256)]
        foresight.ended(f"t{number}", keys, "", "", 0.0)
    late_s, thoughts = 60.0, 0
    while foresight.think_s is not None and foresight.think_s <= late_s:
        foresight.think(late_s)
        thoughts += 1
    assert 200 * 256 / 4096 < thoughts < 200
