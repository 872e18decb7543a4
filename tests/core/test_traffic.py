"""Removals of a tier, its queue and its keys, as plain data."""

from __future__ import annotations

import pytest

from tiercache.core.keys import KEY_BYTES, check_key, check_keys, keys_from_hashes
from tiercache.core.tombstones import KeyFilter, KeyTraffic

A, B = b"a" * KEY_BYTES, b"b" * KEY_BYTES


def test_removal_has_its_key_to_itself() -> None:
    traffic, clear = KeyTraffic(), []
    traffic.on_clear = clear.append
    traffic.begin(A)
    traffic.begin(A)
    traffic.removing[A] = traffic.removing[B] = ()
    assert traffic.refuses(A)
    traffic.end(A)
    assert clear == []
    traffic.end(A)
    assert clear == [A]
    del traffic.removing[A]
    assert not traffic.refuses(A)


@pytest.mark.parametrize(
    ("wrong", "error", "found"),
    [
        (b"short", ValueError, "5 bytes"),
        (b"", ValueError, "0 bytes"),
        (b"x" * 25, ValueError, "25 bytes"),
        ("x" * KEY_BYTES, TypeError, "str"),
        (None, TypeError, "NoneType"),
        (bytearray(KEY_BYTES), TypeError, "bytearray"),
    ],
)
def test_what_is_no_key_is_a_sentence(wrong: object, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=f"key: expected 24 bytes, or 32 .*found {found}"):
        check_keys([A, wrong])  # type: ignore[list-item]
    with pytest.raises(error):
        check_key(wrong)  # type: ignore[arg-type]
    check_keys([A, B])
    check_key(A)


@pytest.mark.parametrize(
    ("wrong", "error"), [("hash", TypeError), (None, TypeError), (7, TypeError), (b"8 bytes!", ValueError)]
)
def test_what_is_no_hash_is_a_sentence(wrong: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="hashes: expected"):
        keys_from_hashes(b"namespace", [A, wrong])  # type: ignore[list-item]


def test_what_is_refused_for_good_is_refused_however_many_there_are() -> None:
    traffic = KeyTraffic()
    assert traffic.refuses_none and not traffic.refuses(A)
    traffic.refuse(A)
    assert not traffic.refuses_none and traffic.refuses(A) and not traffic.refuses(B)
    for number in range(1 << 20):
        traffic.refuse(number.to_bytes(24, "big"))
    assert traffic.refuses(A)


def test_a_filter_of_keys_holds_all_that_were_added_and_few_others() -> None:
    keys = KeyFilter(1 << 14)
    for number in range(8192):
        keys.add(number.to_bytes(24, "big"))
    assert all(number.to_bytes(24, "big") in keys for number in range(8192))
    others = sum(number.to_bytes(24, "big") in keys for number in range(10_000, 20_000))
    assert others < 100, "one in 400 is expected"
