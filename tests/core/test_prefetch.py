"""The prefetch plan, its accounts and the session predictor, on virtual time; nothing is moved."""

from collections import Counter
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiercache.core import prefetch
from tiercache.core.prefetch import Account, PrefetchPlan, PrefetchRequest, Promotion, SessionPredictor, count_gap, hint

CHUNK = 1000
KEYS = [bytes([number]) * 24 for number in range(4)]


def plan_of(share: int = 50, bytes_per_s: float = 0.0) -> PrefetchPlan:
    return PrefetchPlan(CHUNK, share * CHUNK, bytes_per_s)


def expecting(
    keys: str, due_s: float = 0.0, *, subject: str = "", priority: int = 0, ttl_s: float = 10.0, source: str = "hints"
) -> PrefetchRequest:
    chunks = [key.encode() for key in keys]
    return PrefetchRequest(source, subject or keys, chunks, due_s, due_s, due_s + ttl_s, priority)


def promotions(plan: PrefetchPlan, now_s: float = 0.0) -> str:
    """The keys of what is begun at `now_s`, until there is nothing to do. Nothing is hot."""
    plan.run_timers(now_s)
    begun = []
    while (promotion := plan.next(now_s, lambda key, pin: None)) is not None:
        begun.append(promotion.key.decode())
    return "".join(begun)


def test_nothing_is_promoted_before_it_must_be() -> None:
    plan = plan_of()
    plan.offer(expecting("ab", due_s=100.0), 0.0)
    assert promotions(plan) == ""
    wake_s = plan.wake_s(0.0)
    assert wake_s is not None and 90.0 < wake_s < 100.0
    assert promotions(plan, wake_s) == "ab"


def test_priority_goes_before_the_deadline_and_that_before_the_order_of_arrival() -> None:
    plan = plan_of()
    for request in (expecting("u", 3.0, priority=1), expecting("v", 9.0), expecting("w", 4.0), expecting("x", 4.0)):
        plan.offer(request, 0.0)
    assert promotions(plan, 9.5) == "wxvu"


def test_rate_is_kept_and_what_was_not_used_is_not_saved_up() -> None:
    plan = plan_of(bytes_per_s=8.0 * CHUNK)
    assert promotions(plan, 0.0) == ""
    assert plan.wake_s(0.0) is None
    plan.offer(expecting("abcdefghij", 100.0), 0.0)
    assert promotions(plan, 100.0) == "ab", "a quarter of a second's worth, however long nothing was promoted"
    assert plan.wake_s(100.0) == pytest.approx(100.125)
    assert promotions(plan, 100.125) == "c"


def test_many_requests_that_expire_are_dropped_some_at_a_time() -> None:
    plan = plan_of()
    for number in range(2000):
        plan.offer(expecting("abcdefgh", subject=str(number)), 0.0)
    left = [2000]
    for step in range(20):
        plan.run_timers(100.0 + step / 100)
        left.append(sum(plan.has("hints", str(number)) for number in range(2000)))
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) < 1000


def test_keys_of_one_request_and_of_all_together_are_bounded() -> None:
    plan = plan_of()
    for number in range(20):
        keys = [(number << 20 | place).to_bytes(4, "big") for place in range(prefetch.MAX_REQUEST_KEYS + 5)]
        request = hint(keys, 0.0, str(number), 0.0)
        plan.offer(request, 0.0)
        assert (len(request.keys), request.progress.cancelled) == (prefetch.MAX_REQUEST_KEYS, 5)
    assert [plan.has("hints", str(number)) for number in range(20)] == [False] * 4 + [True] * 16
    assert plan.accounts["hints"] == Account(cancelled_bytes=4 * prefetch.MAX_REQUEST_KEYS * CHUNK)


@pytest.mark.parametrize("first", ["sessions", "hints"])
def test_chunk_of_a_prediction_and_of_a_hint_stays_for_one_when_the_other_expires(first: str) -> None:
    plan, ttl_s = plan_of(), {"sessions": 60.0, "hints": 60.0, first: 5.0}
    plan.offer(expecting("a", source="sessions", ttl_s=ttl_s["sessions"]), 0.0)
    plan.run_timers(0.0)
    promotion = plan.next(0.0, lambda key, pin: None)
    assert promotion is not None and not plan.ended(promotion, promoted=True)
    plan.offer(expecting("a", source="hints", ttl_s=ttl_s["hints"]), 0.0)
    plan.run_timers(0.0)
    assert plan.next(0.0, lambda key, pin: pin) is None, "it is hot, and pinned for the hint"
    plan.run_timers(6.0)
    assert plan.take_unexpected() == ([b"a"] if first == "hints" else [])
    plan.used(b"a", hot=True)
    outcome = {"wasted_bytes": CHUNK} if first == "sessions" else {"used_bytes": CHUNK}
    assert plan.accounts["sessions"] == Account(promoted_bytes=CHUNK, **outcome)


SOME = st.sampled_from([bytes([number]) for number in range(12)])
SOURCES = st.sampled_from(["hints", "sessions"])


class PlanAgainstModel(RuleBasedStateMachine):
    """A cache that does what the plan says, in random order."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_of(share=4, bytes_per_s=50 * CHUNK)
        self.now_s = 0.0
        self.hot: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.in_flight: dict[bytes, Promotion] = {}
        self.begun = 0
        self.failed = 0
        self.requests: list[PrefetchRequest] = []
        self.wanted: dict[tuple[str, str], tuple[float, set[bytes]]] = {}
        """By source and subject: when it expires, and its keys."""

    def expected(self, key: bytes) -> bool:
        return any(self.now_s < expires_s and key in keys for expires_s, keys in self.wanted.values())

    def is_hot(self, key: bytes, pin: bool) -> bool | None:
        if key not in self.hot:
            return None
        if pin:
            assert key not in self.pinned
            self.pinned.add(key)
        return pin

    def unpin(self) -> None:
        self.pinned.difference_update(self.plan.take_unexpected())

    @rule(keys=st.lists(SOME, min_size=1, max_size=6, unique=True), due_s=st.floats(0, 20), ttl_s=st.floats(0, 3),
          source=SOURCES, subject=st.sampled_from("ABCD"), priority=st.integers(-1, 1))  # fmt: skip
    def offer(self, keys: list[bytes], due_s: float, ttl_s: float, source: str, subject: str, priority: int) -> None:
        due_s += self.now_s
        request = PrefetchRequest(source, subject, keys, due_s, due_s, due_s + ttl_s, priority)
        self.plan.offer(request, self.now_s)
        self.requests.append(request)
        self.wanted[source, subject] = due_s + ttl_s, set(keys)
        self.unpin()

    @rule(source=SOURCES, subject=st.sampled_from("ABCD"))
    def withdraw(self, source: str, subject: str) -> None:
        self.plan.withdraw(source, subject)
        self.wanted.pop((source, subject), None)
        self.unpin()

    @rule(passed_s=st.floats(0, 5))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def promote(self) -> None:
        self.plan.run_timers(self.now_s)
        self.unpin()
        promotion = self.plan.next(self.now_s, self.is_hot)
        if promotion is None:
            wake_s = self.plan.wake_s(self.now_s)
            assert wake_s is None or wake_s > self.now_s, "the driver would spin"
            return
        assert promotion.key not in self.hot and promotion.key not in self.in_flight
        assert self.expected(promotion.key)
        self.begun += 1
        self.in_flight[promotion.key] = promotion

    @rule(key=SOME, works=st.booleans())
    def end(self, key: bytes, works: bool) -> None:
        promotion = self.in_flight.pop(key, None)
        if promotion is not None:
            self.failed += not works and not promotion.counted
            if works:
                self.hot.add(key)
            if self.plan.ended(promotion, promoted=works):
                self.pinned.add(key)

    @rule(key=SOME)
    def use(self, key: bytes) -> None:
        self.plan.used(key, hot=key in self.hot)
        self.pinned.discard(key)
        self.hot.add(key)

    @rule(key=SOME)
    def evict(self, key: bytes) -> None:
        if key not in self.pinned:
            self.hot.discard(key)

    @rule(key=SOME)
    def remove(self, key: bytes) -> None:
        if key in self.hot:
            self.hot.discard(key)
            self.pinned.discard(key)
            self.plan.removed(key)

    @rule()
    def clear(self) -> None:
        self.plan.clear()
        self.unpin()
        self.wanted.clear()
        assert not self.pinned
        assert all(request.progress.done for request in self.requests)

    @invariant()
    def limits_hold_and_accounts_add_up(self) -> None:
        assert len(self.pinned | self.in_flight.keys()) <= 4
        assert self.begun * CHUNK <= (self.now_s + 0.25) * 50 * CHUNK + CHUNK
        accounts = self.plan.accounts.values()
        promoted_bytes = sum(account.promoted_bytes for account in accounts)
        settled_bytes = sum(account.used_bytes + account.late_bytes + account.wasted_bytes for account in accounts)
        assert promoted_bytes == (self.begun - self.failed) * CHUNK
        assert settled_bytes <= promoted_bytes
        if not self.wanted:
            unsettled = sum(not promotion.counted for promotion in self.in_flight.values())
            assert promoted_bytes - settled_bytes == unsettled * CHUNK
            assert not self.pinned
        for request in self.requests:
            progress = request.progress
            assert progress.promoted + progress.missing + progress.cancelled + progress.in_flight <= progress.asked


TestPlan = PlanAgainstModel.TestCase
TestPlan.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def turns(predictor: SessionPredictor, session: str, *gaps_s: float, at_s: float = 0.0) -> float:
    """Turns that take no time, with such gaps between them. Returns when the last one has begun."""
    predictor.began(session, at_s)
    for gap_s in gaps_s:
        predictor.ended(session, KEYS, at_s)
        at_s += gap_s
        predictor.began(session, at_s)
    return at_s


def test_next_turn_is_predicted_from_what_all_sessions_do() -> None:
    predictor = SessionPredictor()
    for number in range(20):
        turns(predictor, f"s{number}", 10.0)
    prediction = predictor.ended("mine", KEYS, 100.0)
    assert prediction is not None and prediction.keys == KEYS
    assert 105.0 < prediction.begin_s <= prediction.due_s <= 110.0 < prediction.expires_s < 800.0


def test_gaps_of_the_session_itself_weigh_more_than_those_of_others() -> None:
    predictor = SessionPredictor()
    for number in range(20):
        turns(predictor, f"s{number}", 1000.0)
    turns(predictor, "mine", *[10.0] * 30)
    prediction = predictor.ended("mine", KEYS, 0.0)
    assert prediction is not None and prediction.due_s <= 10.0


def test_nothing_is_predicted_while_too_little_is_known() -> None:
    predictor = SessionPredictor()
    assert predictor.ended("first", KEYS, 0.0) is None
    turns(predictor, "second", *[1.0] * 9)
    assert predictor.ended("first", [], 0.0) is None
    assert predictor.ended("first", KEYS, 0.0) is not None


def test_sessions_that_stay_away_for_an_hour_count_as_lost() -> None:
    predictor = SessionPredictor()
    for number in range(10):
        turns(predictor, f"back {number}", 10.0)
        turns(predictor, f"away {number}")
        predictor.ended(f"away {number}", KEYS, 10.0)
    assert predictor.ended("mine", KEYS, 20.0) is not None
    assert predictor.ended("mine", KEYS, 4000.0) is None, "every other session does not come back"
    assert len(predictor) == 1


def test_older_gaps_weigh_less() -> None:
    gaps: Counter[int] = Counter()
    for number in range(64):
        count_gap(gaps, 10.0 if number < 32 else 1000.0, 32)
    assert gaps.total() <= 32
    (first, early), (last, late) = sorted(gaps.items())
    assert first < last and early < late / 2


@given(
    own=st.lists(st.floats(0, 1e6), max_size=20),
    prior=st.lists(st.floats(0, 1e6) | st.just(inf), min_size=8, max_size=60),
)
def test_times_are_in_order_and_the_chance_is_kept(own: list[float], prior: list[float]) -> None:
    of_session: Counter[int] = Counter()
    of_all: Counter[int] = Counter()
    for gap_s in own:
        count_gap(of_session, gap_s, 32)
    for gap_s in prior:
        count_gap(of_all, gap_s, 4096)
    turn = prefetch.next_turn(of_session, of_all)
    if turn is None:
        return
    begin_s, end_s = turn
    assert 0 <= begin_s < end_s <= begin_s + 600.0
    if not own:  # in quarter octaves: what comes within is at least so much of what has not come before
        later = [gap_s for gap_s in prior if gap_s >= begin_s]
        assert sum(gap_s <= end_s for gap_s in later) >= 0.8 * len(later) - 1e-6


def test_sessions_that_are_remembered_are_bounded() -> None:
    predictor = SessionPredictor(limit=50)
    for number in range(1000):
        predictor.ended(f"s{number}", KEYS[:1], number)
    assert len(predictor) == 50
