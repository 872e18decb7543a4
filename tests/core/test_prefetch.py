"""The prefetch plan, its accounts and the session predictor, on virtual time; nothing is moved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiercache.core.prefetch import (
    MAX_REQUEST_KEYS,
    Gaps,
    Prediction,
    PrefetchPlan,
    PrefetchSettings,
    SessionPredictor,
    hint,
    next_turn,
)

CHUNK = 1000
KEYS = [bytes([number]) * 24 for number in range(4)]


def plan_of(**known: float) -> PrefetchPlan:
    facts = {"hot_bytes": 100 * CHUNK, "share_bytes": 50 * CHUNK, "transfer_bytes_per_s": 100 * CHUNK, "margin_s": 0.0}
    return PrefetchPlan(PrefetchSettings(**(facts | known)), CHUNK)  # type: ignore[arg-type]


def expecting(
    keys: str, due_s: float = 0.0, *, subject: str = "", priority: int = 0, until_s: float = inf, ttl_s: float = 10.0
) -> Prediction:
    chunks = [key.encode() for key in keys]
    return Prediction("hints", subject or keys, chunks, due_s, due_s, due_s + ttl_s, priority, until_s)


def promotions(plan: PrefetchPlan, now_s: float = 0.0, resident: str = "") -> str:
    """What is begun at `now_s`, until there is nothing to do."""
    there = {key.encode() for key in resident}
    begun = []
    while (promotion := plan.next(now_s, there.__contains__)) is not None:
        begun.append(promotion.key.decode())
    return "".join(begun)


# The plan


def test_missing_chunks_are_promoted_from_the_first_on() -> None:
    plan = plan_of()
    plan.offer(expecting("abcd"), 0.0)
    assert promotions(plan, resident="b") == "acd"


def test_promotion_names_the_chunk_before_it() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    first, second = plan.next(0.0, lambda key: False), plan.next(0.0, lambda key: False)
    assert first is not None and second is not None
    assert (first.parent, second.parent) == (None, b"a")


def test_nothing_is_promoted_before_it_must_be() -> None:
    plan = plan_of()
    plan.offer(expecting("abcdefghij", due_s=100.0), 0.0)
    assert promotions(plan) == ""
    assert plan.wake_s(0.0) == pytest.approx(100.0 - 10 / 100)
    assert promotions(plan, 99.95) == "abcdefghij"


def test_priority_goes_before_the_deadline_and_that_before_the_order_of_arrival() -> None:
    plan = plan_of()
    plan.offer(expecting("u", 3.0, priority=1), 0.0)
    plan.offer(expecting("v", 9.0), 0.0)
    plan.offer(expecting("w", 4.0), 0.0)
    plan.offer(expecting("x", 4.0), 0.0)
    assert promotions(plan, 9.5) == "wxvu"


def test_newer_prediction_replaces_the_older() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", subject="s"), 0.0)
    plan.offer(expecting("cd", subject="s"), 0.0)
    assert promotions(plan) == "cd"


def test_share_of_the_hot_cache_is_kept() -> None:
    plan = plan_of(share_bytes=3 * CHUNK)
    plan.offer(expecting("abcdef"), 0.0)
    assert promotions(plan) == "abc"
    plan.accounts.arrived(b"a")
    assert promotions(plan) == ""
    plan.used([b"a"])
    assert promotions(plan, resident="a") == "d"


def test_rate_is_kept_and_what_was_not_used_is_not_saved_up() -> None:
    plan = plan_of(bytes_per_s=4.0 * CHUNK, burst_s=0.5)
    assert promotions(plan, 0.0) == ""
    assert plan.wake_s(0.0) is None
    plan.offer(expecting("abcdefghij", 100.0), 0.0)
    assert promotions(plan, 100.0) == "ab", "half a second's worth, however long nothing was promoted"
    assert plan.wake_s(100.0) == pytest.approx(100.25)
    assert promotions(plan, 100.25) == "c"


def test_nothing_is_promoted_from_a_time_on_and_what_was_is_kept() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", until_s=5.0), 0.0)
    assert promotions(plan, 1.0) == "ab"
    plan.evicted([b"b"], 2.0)
    assert promotions(plan, 5.0, "a") == ""
    assert plan.expects(b"a") and plan.accounts.by_source["hints"].cancelled_bytes == CHUNK


def test_used_late_evicted_wasted_and_cancelled_are_told_apart() -> None:
    plan = plan_of()
    plan.offer(expecting("abcde"), 0.0)
    for _ in range(4):
        plan.next(0.0, lambda key: False)
    for key in (b"a", b"b", b"c"):
        plan.accounts.arrived(key)
    plan.evicted([b"b"], 0.0)
    plan.used([b"a", b"d"])
    assert not plan.accounts.arrived(b"d")
    plan.withdraw("hints", "abcde", 0.0)
    plan.accounts.finish()
    account = plan.accounts.by_source["hints"]
    assert account.to_dict() == {
        "promoted_bytes": 4 * CHUNK,
        "used_bytes": CHUNK,
        "late_bytes": CHUNK,
        "evicted_bytes": CHUNK,
        "wasted_bytes": CHUNK,
        "cancelled_bytes": 4 * CHUNK,
    }
    assert account.lost_bytes == 2 * CHUNK


def test_failed_promotion_is_not_charged_and_not_tried_again() -> None:
    plan = plan_of()
    plan.offer(expecting("a"), 0.0)
    plan.next(0.0, lambda key: False)
    plan.accounts.failed(b"a")
    assert plan.accounts.by_source["hints"].promoted_bytes == 0
    assert promotions(plan) == ""


def test_chunk_that_was_evicted_while_it_is_expected_is_promoted_again_unless_it_was_used() -> None:
    plan = plan_of()
    plan.offer(expecting("abc"), 0.0)
    assert promotions(plan, 0.0, "abc") == ""
    plan.used([b"b"])
    plan.evicted([b"a", b"b"], 0.5)
    assert promotions(plan, 1.0, "c") == "a"


def test_victims_that_are_at_least_as_urgent_are_passed_over_with_all_that_comes_with_them() -> None:
    plan = plan_of()
    plan.offer(expecting("soni", 1.0), 0.0)
    plan.offer(expecting("L", 2.0), 0.0)
    late = plan.next(2.0, lambda key: key != b"L")
    assert late is not None
    order, renewed = [b"s", b"o", b"x"], list[bytes]()

    def renew(keys: Sequence[bytes]) -> None:
        renewed.extend(keys)
        order[:] = [key for key in order if key not in keys]

    assert plan.find_room(lambda: order[0], renew, late)
    assert (order, renewed) == ([b"x"], [b"s", b"o", b"n", b"i"])
    assert plan.find_room(lambda: None, renew, late), "nothing has to go"
    assert not plan.find_room(lambda: b"s", lambda keys: None, late), "and the search has an end"


def test_victim_goes_for_what_is_more_urgent() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", 9.0), 0.0)
    plan.offer(expecting("u", 1.0), 0.0)
    urgent = plan.next(1.0, lambda key: False)
    assert urgent is not None and urgent.key == b"u"
    assert plan.find_room(lambda: b"a", lambda keys: None, urgent)
    plan.offer(expecting("s", 1.0), 1.0)
    assert not plan.find_room(lambda: b"s", lambda keys: None, urgent), "not for what is due at the same time"


def test_without_room_it_is_tried_a_little_later() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    promotion = plan.next(0.0, lambda key: False)
    assert promotion is not None
    plan.no_room(promotion, 0.0)
    assert promotions(plan, 0.1) == ""
    wake_s = plan.wake_s(0.1)
    assert wake_s is not None
    assert promotions(plan, wake_s) == "ab"


def test_chunks_of_a_prediction_that_has_expired_or_was_withdrawn_are_wasted() -> None:
    for withdrawn in (False, True):
        plan = plan_of()
        plan.offer(expecting("ab"), 0.0)
        promotions(plan)
        plan.accounts.arrived(b"a")
        if withdrawn:
            plan.withdraw("hints", "ab", 1.0)
        assert promotions(plan, 11.0) == ""
        assert not plan.has("hints", "ab") and not plan.expects(b"a")
        assert plan.accounts.by_source["hints"].wasted_bytes == CHUNK


def test_chunks_of_a_request_that_has_come_are_kept_for_it_a_while() -> None:
    plan = plan_of(share_bytes=CHUNK)
    plan.offer(expecting("ab", ttl_s=100.0), 0.0)
    assert promotions(plan) == "a"
    plan.accounts.arrived(b"a")
    plan.withdraw("hints", "ab", 1.0, keep_s=10.0)
    assert promotions(plan, 10.0) == "" and plan.accounts.waiting_bytes == CHUNK
    assert promotions(plan, 11.0) == "" and plan.accounts.waiting_bytes == 0


def test_request_whose_chunks_were_all_used_is_over() -> None:
    plan = plan_of()
    plan.offer(expecting("ab"), 0.0)
    plan.used([b"b", b"a"])
    assert not plan.has("hints", "ab")


def test_many_predictions_that_expire_are_dropped_some_at_a_time() -> None:
    plan = plan_of()
    for number in range(2000):
        plan.offer(expecting("abcdefgh", subject=str(number)), 0.0)
    left = [2000]
    for step in range(20):
        assert plan.next(100.0 + step / 100, lambda key: True) is None
        left.append(sum(plan.has("hints", str(number)) for number in range(2000)))
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) < 1000


def test_keys_of_one_prediction_and_of_all_together_are_bounded() -> None:
    plan = plan_of()
    for number in range(20):
        keys = [(number << 20 | place).to_bytes(4, "big") for place in range(MAX_REQUEST_KEYS + 5)]
        plan.offer(hint(keys, 0.0, str(number)), 0.0)
        assert plan.expects(keys[MAX_REQUEST_KEYS - 1]) and not plan.expects(keys[MAX_REQUEST_KEYS])
    assert [plan.has("hints", str(number)) for number in range(20)] == [False] * 4 + [True] * 16
    assert plan.accounts.by_source["hints"].cancelled_bytes == 4 * MAX_REQUEST_KEYS * CHUNK


SOME = st.sampled_from([bytes([number]) for number in range(12)])


class PlanAgainstModel(RuleBasedStateMachine):
    """A cache that does what the plan says, in random order."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_of(share_bytes=4 * CHUNK, bytes_per_s=50 * CHUNK)
        self.now_s = 0.0
        self.hot: set[bytes] = set()
        self.in_flight: set[bytes] = set()
        self.begun = 0
        self.failed = 0
        self.wanted: dict[str, tuple[float, set[bytes]]] = {}
        """By subject: when it expires, and the keys that were not used since it was offered."""

    @rule(
        keys=st.lists(SOME, min_size=1, max_size=6, unique=True),
        due_s=st.floats(0, 20),
        ttl_s=st.floats(0, 3),
        subject=st.sampled_from("ABCD"),
        priority=st.integers(-1, 1),
    )
    def offer(self, keys: list[bytes], due_s: float, ttl_s: float, subject: str, priority: int) -> None:
        due_s += self.now_s
        self.plan.offer(Prediction("p", subject, keys, due_s, due_s, due_s + ttl_s, priority), self.now_s)
        self.wanted[subject] = due_s + ttl_s, set(keys)

    @rule(subject=st.sampled_from("ABCD"), keep_s=st.sampled_from([0.0, 5.0]))
    def withdraw(self, subject: str, keep_s: float) -> None:
        self.plan.withdraw("p", subject, self.now_s, keep_s)
        self.wanted.pop(subject, None)

    @rule(passed_s=st.floats(0, 5))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(room=st.booleans())
    def promote(self, room: bool) -> None:
        promotion = self.plan.next(self.now_s, self.hot.__contains__)
        if promotion is None:
            wake_s = self.plan.wake_s(self.now_s)
            assert wake_s is None or wake_s > self.now_s, "the driver would spin"
            return
        key = promotion.key
        assert key not in self.hot
        assert any(self.now_s < expires_s and key in keys for expires_s, keys in self.wanted.values())
        self.begun += 1
        if room:
            self.in_flight.add(key)
        else:
            self.plan.no_room(promotion, self.now_s)
            self.failed += 1

    @rule(key=SOME, works=st.booleans())
    def end(self, key: bytes, works: bool) -> None:
        if key in self.in_flight:
            self.in_flight.discard(key)
            if works:
                self.hot.add(key)
                self.plan.accounts.arrived(key)
            elif key in self.plan.accounts.in_flight:
                self.plan.accounts.failed(key)
                self.failed += 1

    @rule(keys=st.lists(SOME, max_size=6))
    def use(self, keys: list[bytes]) -> None:
        expected = {key for key in keys if self.plan.expects(key)}
        self.plan.used(keys)
        self.hot.update(keys)
        if len(self.wanted) == 1:  # of several, only the most urgent one that expects a key is served
            (_, left), *_ = self.wanted.values()
            left -= expected

    @rule(key=SOME)
    def evict(self, key: bytes) -> None:
        if key in self.hot:
            self.hot.discard(key)
            self.plan.evicted([key], self.now_s)

    @invariant()
    def limits_hold_and_accounts_add_up(self) -> None:
        waiting_bytes = self.plan.accounts.waiting_bytes
        assert waiting_bytes <= 4 * CHUNK
        assert self.begun * CHUNK <= (self.now_s + 0.25) * 50 * CHUNK + CHUNK
        account = self.plan.accounts.by_source.get("p")
        if account is not None:
            settled = account.used_bytes + account.late_bytes + account.lost_bytes
            assert account.promoted_bytes == settled + waiting_bytes == (self.begun - self.failed) * CHUNK


TestPlan = PlanAgainstModel.TestCase
TestPlan.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


# The session predictor


def turns(predictor: SessionPredictor, session: str, *gaps_s: float, at_s: float = 0.0) -> float:
    """Turns that take no time, with such gaps between them. Returns when the last one has begun."""
    predictor.began(session, at_s)
    for gap_s in gaps_s:
        predictor.ended(session, KEYS, at_s, inf, 0.8)
        at_s += gap_s
        predictor.began(session, at_s)
    return at_s


def test_next_turn_is_predicted_from_what_all_sessions_do() -> None:
    predictor = SessionPredictor()
    for number in range(20):
        turns(predictor, f"s{number}", 10.0)
    prediction = predictor.ended("mine", KEYS, 100.0, 60.0, 0.8)
    assert prediction is not None and prediction.keys == KEYS
    assert 105.0 < prediction.begin_s <= prediction.due_s <= 110.0 < prediction.expires_s < 120.0


def test_gaps_of_the_session_itself_weigh_more_than_those_of_others() -> None:
    predictor = SessionPredictor()
    for number in range(20):
        turns(predictor, f"s{number}", 10.0)
    turns(predictor, "mine", *[100.0] * 30)
    prediction = predictor.ended("mine", KEYS, 0.0, 60.0, 0.8)
    assert prediction is not None and 80.0 < prediction.due_s <= 100.0


def test_nothing_is_predicted_while_too_little_is_known() -> None:
    predictor = SessionPredictor()
    assert predictor.ended("first", KEYS, 0.0, inf, 0.8) is None
    turns(predictor, "second", *[1.0] * 9)
    assert predictor.ended("first", [], 0.0, inf, 0.8) is None
    assert predictor.ended("first", KEYS, 0.0, inf, 0.8) is not None


def test_sessions_that_stay_away_count_and_no_more_when_they_are_back() -> None:
    predictor = SessionPredictor()
    for number in range(10):
        turns(predictor, f"back {number}", 10.0)
        turns(predictor, f"away {number}")
        predictor.ended(f"away {number}", KEYS, 10.0, inf, 0.8)
    assert predictor.ended("mine", KEYS, 20.0, inf, 0.8) is not None
    assert predictor.ended("mine", KEYS, 4000.0, inf, 0.8) is None, "every other session does not come back"
    for number in range(10):
        predictor.began(f"away {number}", 4001.0)
    assert predictor.ended("mine", KEYS, 4002.0, inf, 0.8) is not None


def test_gaps_that_are_spread_over_longer_than_chunks_stay_hot_give_no_prediction() -> None:
    predictor = SessionPredictor()
    for number in range(20):
        turns(predictor, f"s{number}", *(2.0**octave for octave in range(10)))
    assert predictor.ended("mine", KEYS, 0.0, 10.0, 0.8) is None
    assert predictor.ended("mine", KEYS, 0.0, inf, 0.8) is not None


def test_session_that_was_away_for_longer_than_is_probable_is_not_promoted_for() -> None:
    """Most are back after 10 s, some after an hour: in between no more can be said than that it may be any time."""
    of_all = Gaps(4096)
    for number in range(100):
        of_all.add(3600.0 if number % 10 == 0 else 10.0)
    turn = next_turn(Gaps(32), of_all, 1000.0, 0.8)
    assert turn is not None
    assert turn.begin_s < 10.0 < turn.promote_until_s < 20.0 and turn.expires_s < 1100.0


@given(
    own=st.lists(st.floats(0, 1e6), max_size=20),
    prior=st.lists(st.floats(0, 1e6) | st.just(inf), min_size=8, max_size=60),
    window_s=st.floats(0.1, 1e6) | st.just(inf),
)
def test_times_are_in_order_and_the_chance_is_kept(own: list[float], prior: list[float], window_s: float) -> None:
    of_session, of_all = Gaps(32), Gaps(4096)
    for gap_s in own:
        of_session.add(gap_s)
    for gap_s in prior:
        of_all.add(gap_s)
    turn = next_turn(of_session, of_all, window_s, 0.8)
    if turn is None:
        return
    assert 0 <= turn.begin_s <= turn.due_s < turn.expires_s
    assert turn.begin_s < turn.promote_until_s <= turn.expires_s
    assert turn.expires_s <= turn.promote_until_s + window_s
    if not own:  # quarter octaves and quantiles: what comes within is at least so much of what has not come before
        later = [gap_s for gap_s in prior if gap_s >= turn.begin_s]
        assert sum(gap_s <= turn.expires_s for gap_s in later) >= 0.8 * len(later) - 1e-6


def test_sessions_that_came_back_are_known_until_they_are_over() -> None:
    predictor = SessionPredictor()
    assert not predictor.began("mine", 0.0)
    predictor.ended("mine", KEYS, 1.0, inf, 0.8)
    assert predictor.began("mine", 2.0) and predictor.came_back("mine")
    predictor.over("mine")
    assert len(predictor) == 0 and not predictor.began("mine", 4.0)


def test_what_is_remembered_is_bounded_in_sessions_and_keys() -> None:
    predictor = SessionPredictor(limit=50, limit_keys=100)
    for number in range(1000):
        predictor.ended(f"s{number}", KEYS[:1], number, inf, 0.8)
    assert len(predictor) == 50
    for number in range(1000):
        predictor.ended(f"t{number}", KEYS, number, inf, 0.8)
    assert len(predictor) == 25
    predictor.ended("long", [bytes([number]) for number in range(200)], 0.0, inf, 0.8)
    assert len(predictor) == 1
