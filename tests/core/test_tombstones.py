"""A forget invalidates operations that began before it, and none that begins after it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import tombstones as module
from tiercache.core.keys import KEY_BYTES
from tiercache.core.tombstones import KeyTraffic, Tombstones

A = b"a" * KEY_BYTES
KEYS = [bytes([number]) * KEY_BYTES for number in range(4)]


def test_a_bounded_number_is_kept_and_operations_from_before_count_as_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 8)
    tombstones = Tombstones()
    hung = tombstones.epoch
    for number in range(20):
        tombstones.forget(bytes([number]) * KEY_BYTES)
        assert len(tombstones._newer) + len(tombstones._older) <= 8
    later = tombstones.epoch
    assert tombstones.forgot(A, hung), "it may have been forgotten"
    assert not tombstones.forgot(A, later) and not tombstones.forgot(KEYS[0], later)


@pytest.mark.parametrize("most", [4, 1 << 16])
@settings(max_examples=300, deadline=None)
@given(history=st.lists(st.tuples(st.sampled_from(["begin", "forget"]), st.integers(0, 3)), max_size=60))
def test_every_history_agrees_with_a_set_for_each_operation(most: int, history: list[tuple[str, int]]) -> None:
    """Once many keys were forgotten since an operation began, it may count as forgotten for others as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_TOMBSTONES", most)
        tombstones = Tombstones()
        operations: list[tuple[int, list[bytes]]] = []
        for what, number in history:
            if what == "begin":
                operations.append((tombstones.epoch, []))
            else:
                tombstones.forget(KEYS[number])
                for _, forgotten in operations:
                    forgotten.append(KEYS[number])
            for epoch, forgotten in operations:
                found = tombstones.forgotten(KEYS, epoch)
                if len(forgotten) < most // 2:
                    assert found == set(forgotten)
                else:
                    assert found >= set(forgotten)


def test_a_tier_refuses_a_bounded_number_of_keys_and_then_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REFUSED", 2)
    traffic = KeyTraffic()
    assert traffic.refuses_none
    traffic.refuse(KEYS[0])
    assert [traffic.refuses(each) for each in KEYS] == [True, False, False, False]
    for each in KEYS[1:3]:
        traffic.refuse(each)
    assert all(map(traffic.refuses, KEYS))
