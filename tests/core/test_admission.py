"""What is worth writing to flash, and how much of it a day."""

from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.admission import DAY_S, Admission, Governor


def test_a_chunk_is_worth_writing_when_a_second_request_needed_it() -> None:
    admission = Admission("second_touch", 100)
    assert not admission.admits(b"chunk")
    admission.used(b"chunk")
    assert not admission.admits(b"chunk")
    admission.used(b"chunk")
    assert admission.admits(b"chunk")


def test_what_was_used_too_long_ago_is_forgotten() -> None:
    admission = Admission("second_touch", 2)
    for key in (b"old", b"1", b"2", b"old"):
        admission.used(key)
    assert not admission.admits(b"old")


def test_a_live_session_is_worth_writing_with_its_newest_turn() -> None:
    admission = Admission("live_session", 2)
    admission.used(b"first turn")
    assert not admission.admits(b"first turn")
    admission.continued(b"first turn")
    admission.continued(b"second turn")
    assert admission.admits(b"first turn") and admission.admits(b"second turn")
    admission.used(b"first turn")
    admission.continued(b"another")
    assert not admission.admits(b"second turn"), "the least recent is forgotten at the limit"


def test_no_rate_is_no_limit() -> None:
    assert all(Governor(0).allows(1 << 40, second) for second in range(100))


def test_what_a_quiet_hour_left_may_be_spent_and_no_more() -> None:
    governor = Governor(25 * 100, burst_s=3600)
    assert [governor.allows(50, 0.0) for _ in range(3)] == [True, True, False]
    assert governor.allows(50, 1800.0)
    assert not governor.allows(50, 1800.0)
    assert [governor.allows(50, 10 * DAY_S) for _ in range(3)] == [True, True, False], "idle days are not saved up"


def test_no_day_sees_more_than_the_limit() -> None:
    governor = Governor(DAY_S)
    written = [second for second in range(0, 2 * int(DAY_S), 10) if governor.allows(20, second)]
    assert 0.95 * DAY_S < 20 * sum(second < DAY_S for second in written) <= DAY_S


def test_a_failed_write_costs_nothing() -> None:
    governor = Governor(24 * 100)
    assert governor.allows(100, 0.0)
    governor.give_back(100)
    assert governor.allows(100, 0.0)


def test_a_chunk_larger_than_the_burst_goes_when_the_bucket_is_full_and_is_paid_for() -> None:
    governor = Governor(DAY_S, burst_s=10)
    assert governor.allows(30, 0.0)
    assert not governor.allows(1, 19.0)
    assert governor.allows(1, 21.5)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 5000)), max_size=200), st.integers(1_000, 1_000_000))
def test_no_span_of_time_sees_more_than_its_rate_one_burst_and_one_chunk(writes: list[tuple[int, float]], rate: int) -> None:
    governor = Governor(rate, burst_s=60)
    now_s = written = 0.0
    for amount, pause_s in writes:
        now_s += pause_s
        if governor.allows(amount, now_s):
            written += amount
        assert written <= rate * (now_s + 60) / DAY_S + 500 + 1e-6
