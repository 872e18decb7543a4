"""What is remembered of requests to come is bounded in bytes, however long their prefixes are."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator

import pytest

from tiercache.core.foresight import Foresight
from tiercache.core.prediction import Hints, Sessions, Workflows
from tiercache.core.prefetch import PrefetchPlan, PrefetchSettings

CHUNKS = 512
"""128k tokens."""
MANY = 1000
MIB = 1 << 20


def fresh_keys(chunks: int = CHUNKS) -> list[bytes]:
    drawn = os.urandom(24 * chunks)
    return [drawn[start : start + 24] for start in range(0, len(drawn), 24)]


@pytest.fixture
def taken() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def taken_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("taken")
def test_long_sessions_are_forgotten_before_short_ones_would_be() -> None:
    sessions = Sessions()
    for number in range(MANY):
        sessions.arrived(f"s{number}", number)
        sessions.finished(f"s{number}", fresh_keys(), number)
    assert taken_bytes() < 40 * MIB
    assert 500 < len(sessions) < MANY
    for number in range(MANY):
        sessions.finished(f"s{number}", [], 2.0 * MANY)
        sessions.over(f"s{number}")
    assert (len(sessions), sessions.held_bytes) == (0, 0)


def test_short_sessions_are_bounded_by_their_number() -> None:
    sessions = Sessions()
    for number in range(20_000):
        sessions.finished(f"s{number}", [b"k" * 24], number)
    assert len(sessions) == 10_000


@pytest.mark.usefixtures("taken")
def test_steps_with_long_prefixes_are_forgotten() -> None:
    workflows = Workflows()
    for number in range(MANY):
        workflows.arrived("run", f"step {number}", fresh_keys(), number)
    assert taken_bytes() < 40 * MIB


def test_steps_with_many_followers_count_for_more() -> None:
    workflows = Workflows(limit_bytes=128 << 10)
    for number in range(12):
        for follower in range(16):
            workflows.finished("run", f"hub {number}", number)
            workflows.arrived("run", f"follower {follower}", [b"k" * 24], number)
        assert workflows.held_bytes <= workflows.limit_bytes
    assert workflows.finished("run", "hub 11", 20.0) and not workflows.finished("run", "hub 0", 20.0)


@pytest.mark.usefixtures("taken")
def test_plan_acts_on_the_latest_predictions() -> None:
    plan, hints = PrefetchPlan(PrefetchSettings(hot_bytes=1 << 20, share_bytes=1 << 20), chunk_bytes=1), Hints()
    for number in range(MANY):
        plan.offer(hints.announce(fresh_keys(), 0.0, due_in_s=3600.0, ttl_s=7 * 86400.0, subject=f"{number}"), 0.0)
    assert taken_bytes() < 100 * MIB
    assert not plan.acts_on("hints", "0")
    assert plan.acts_on("hints", f"{MANY - 1}")
    assert plan.accounts["hints"].cancelled_bytes > 0
    for number in range(MANY):
        plan.withdraw("hints", f"{number}")
    assert taken_bytes() < 30 * MIB, "a dictionary does not shrink, but the keys are gone"


def test_what_is_forgotten_is_not_expected_either() -> None:
    plan = PrefetchPlan(PrefetchSettings(hot_bytes=1 << 20, share_bytes=1 << 20), chunk_bytes=1)
    foresight = Foresight(plan)
    for number in range(20):
        foresight.began(f"other{number}", [b"k" * 24], "", 0.0)
        foresight.ended(f"other{number}", [b"k" * 24], "", "", 0.0)
        foresight.began(f"other{number}", [b"k" * 24], "", 10.0)
    foresight.ended("first", fresh_keys(), "", "", 20.0)
    assert plan.acts_on("sessions", "first")
    foresight.ended("huge", fresh_keys((32 << 20) // 80 - 2000), "", "", 21.0)
    assert not plan.acts_on("sessions", "first")
