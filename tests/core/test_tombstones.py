"""A forget invalidates operations that began before it, and none that begins after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import tombstones as module
from tiercache.core.keys import KEY_BYTES
from tiercache.core.tombstones import Tombstones

A, B = b"a" * KEY_BYTES, b"b" * KEY_BYTES
KEYS = [bytes([number]) * KEY_BYTES for number in range(4)]


def test_a_forget_reaches_operations_that_began_before_it() -> None:
    tombstones = Tombstones()
    before = tombstones.begin()
    tombstones.forget([A])
    after = tombstones.begin()
    assert tombstones.forgot(A, before) and not tombstones.forgot(B, before) and not tombstones.forgot(A, after)
    assert tombstones.forgotten([A, B], before) == {A} and tombstones.forgotten([A, B], after) == set()


def test_nothing_is_kept_while_no_operation_is_in_flight() -> None:
    tombstones = Tombstones()
    tombstones.forget([A])
    assert len(tombstones) == 0
    operation = tombstones.begin()
    tombstones.forget([A, B])
    tombstones.end(operation)
    assert len(tombstones) == 0 and tombstones.in_flight == 0


def test_an_operation_that_hangs_keeps_a_bounded_number_and_then_counts_as_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    tombstones = Tombstones()
    hung = tombstones.begin()
    for number in range(5):
        tombstones.forget([bytes([number]) * KEY_BYTES])
    later = tombstones.begin()
    assert len(tombstones) == 3
    assert tombstones.forgot(A, hung), "it may have been forgotten"
    assert not tombstones.forgot(A, later) and not tombstones.forgot(KEYS[0], later)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "forget"]), st.integers(0, 3)), max_size=60))
def test_every_history_agrees_with_a_set_for_each_operation(history: list[tuple[str, int]]) -> None:
    tombstones = Tombstones()
    in_flight: list[tuple[int, set[bytes]]] = []
    for what, number in history:
        if what == "begin":
            in_flight.append((tombstones.begin(), set()))
        elif what == "end" and in_flight:
            tombstones.end(in_flight.pop(number % len(in_flight))[0])
        elif what == "forget":
            tombstones.forget([KEYS[number]])
            for _, forgotten in in_flight:
                forgotten.add(KEYS[number])
        for epoch, forgotten in in_flight:
            assert tombstones.forgotten(KEYS, epoch) == forgotten
        assert tombstones.in_flight == len(in_flight)
        assert len(tombstones) <= len(set().union(*(forgotten for _, forgotten in in_flight)))
