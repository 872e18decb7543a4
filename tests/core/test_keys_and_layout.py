"""Keys stand for whole prefixes, in one layout, for one tenant."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.keys import KEY_BYTES, chunk_keys, keys_from_hashes
from tiercache.core.layout import Layout

SPACE = Layout("model", chunk_tokens=4, bytes_per_token=8).namespace()
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS)
def test_list_array_and_tensor_like_give_the_same_keys(tokens: list[int]) -> None:
    keys = chunk_keys(SPACE, tokens, 4)
    assert keys == chunk_keys(SPACE, np.array(tokens, dtype=np.int64), 4)
    assert keys == chunk_keys(SPACE, np.array(tokens, dtype=np.uint32), 4)
    few = [token % 256 for token in tokens]
    for kind in (bytes, bytearray, lambda ids: memoryview(bytes(ids))):  # ids like any other, and not four of them one
        assert chunk_keys(SPACE, kind(few), 4) == chunk_keys(SPACE, few, 4)
    assert len(keys) == len(tokens) // 4


@given(TOKENS, st.integers(0, 39), st.integers(1, 2**32 - 1))
def test_changing_a_token_changes_its_key_and_all_after_it_only(tokens: list[int], at: int, by: int) -> None:
    if at >= len(tokens):
        return
    changed = list(tokens)
    changed[at] = (changed[at] + by) % 2**32
    before, after = chunk_keys(SPACE, tokens, 4), chunk_keys(SPACE, changed, 4)
    first = at // 4
    assert before[:first] == after[:first]
    assert all(old != new for old, new in zip(before[first:], after[first:], strict=True))


@given(TOKENS)
def test_longer_prompt_keeps_the_keys_of_its_prefix(tokens: list[int]) -> None:
    assert chunk_keys(SPACE, [*tokens, 1, 2, 3, 4], 4)[: len(tokens) // 4] == chunk_keys(SPACE, tokens, 4)


def test_partial_tail_has_a_key_of_its_own_when_asked_for() -> None:
    full = chunk_keys(SPACE, [1, 2, 3, 4, 5, 6], 4)
    partial = chunk_keys(SPACE, [1, 2, 3, 4, 5, 6], 4, partial=True)
    assert len(full) == 1
    assert len(partial) == 2
    assert partial[1] != chunk_keys(SPACE, [1, 2, 3, 4, 5, 6, 0, 0], 4)[1]


@pytest.mark.parametrize(
    ("tokens", "error", "said"),
    [
        ([-1, 0, 0, 0], OverflowError, "negative"),
        ([2**32, 0, 0, 0], OverflowError, "greater than maximum"),
        *((np.array([token, 0, 0, 0]), OverflowError, "tokens: ids must be within") for token in (-1, 2**40)),
        (np.zeros((2, 4), dtype=np.int64), ValueError, "vector of integers"),
        (np.zeros(4), ValueError, "float"),
    ],
)
def test_tokens_that_do_not_fit_are_an_error(tokens: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        chunk_keys(SPACE, tokens, 4)


def test_engine_hashes_of_two_tenants_never_meet() -> None:
    layout = Layout("model", chunk_tokens=4, bytes_per_token=8)
    hashes = [bytes([number]) * 32 for number in range(10)]
    one, other = (keys_from_hashes(layout.namespace(salt), hashes) for salt in ("a", "b"))
    assert not set(one) & set(other)
    assert {len(key) for key in one} == {KEY_BYTES}


CHANGES = {
    "model": "other", "chunk_tokens": 8, "bytes_per_token": 9, "kv_dtype": "fp8", "revision": "r", "layers": 1,
    "kv_heads": 1, "head_size": 1, "block_tokens": 2, "byte_format": "b", "engine": "e", "rank": 1, "world_size": 3,
    "extra": (("lora", "x"),), "replicas": 2, "parts": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", Layout.__dataclass_fields__)
def test_every_field_of_a_layout_changes_its_fingerprint(field: str) -> None:
    base = {"model": "m", "chunk_tokens": 4, "bytes_per_token": 8, "world_size": 2}
    one, other = Layout(**base), Layout(**{**base, field: CHANGES[field]})
    assert one.fingerprint != other.fingerprint
    assert one.namespace() != other.namespace()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"rank": 2}, "rank"),
        ({"block_tokens": 3}, "multiple of block_tokens"),
        ({"world_size": 3, "replicas": 2}, "multiple of replicas"),
    ],
)
def test_impossible_layout_is_refused(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Layout(**{"model": "m", "chunk_tokens": 4, "bytes_per_token": 8, **wrong})


def test_numbers_of_a_layout_are_whole_and_of_any_kind() -> None:
    """A quotient, such as bytes per token, would change the fingerprint without a word: other processes hit nothing."""
    assert Layout("model", np.int64(4), np.uint8(8)).fingerprint == Layout("model", 4, 8).fingerprint  # type: ignore[arg-type]
    for wrong in (8.0, "8", None):
        with pytest.raises(TypeError, match=f"layout: bytes_per_token must be a whole number, found {wrong!r}"):
            Layout("model", 4, wrong)  # type: ignore[arg-type]


def test_ranks_that_hold_the_same_bytes_have_one_fingerprint_whatever_their_number() -> None:
    def fingerprint(rank: int, world_size: int, replicas: int) -> bytes:
        return Layout("m", 4, 8, rank=rank, world_size=world_size, replicas=replicas).fingerprint

    assert fingerprint(0, 2, 2) == fingerprint(1, 2, 2) == fingerprint(3, 4, 4) == fingerprint(0, 1, 1)
    assert fingerprint(2, 4, 2) == fingerprint(3, 4, 2) == fingerprint(1, 2, 1)
    assert fingerprint(1, 4, 2) == fingerprint(0, 2, 1) != fingerprint(1, 2, 1)


def test_ranks_whose_chunks_are_numbered_parts_have_one_fingerprint_and_each_keeps_its_own() -> None:
    layouts = [Layout("m", 4, 8, rank=rank, world_size=ranks, parts=4) for ranks in (1, 2, 4) for rank in range(ranks)]
    assert len({layout.fingerprint for layout in layouts}) == 1
    assert all(layout.keeps(bytes(20) + bytes([0, 0, 0, last])) for layout in layouts for last in range(8))
    assert {layout.shard for layout in layouts} == {0} and {layout.shards for layout in layouts} == {1}


@pytest.mark.parametrize(
    ("wrong", "error"), [("hash", TypeError), (None, TypeError), (7, TypeError), (b"8 bytes!", ValueError)]
)
def test_what_is_no_hash_is_a_sentence(wrong: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="hashes: expected"):
        keys_from_hashes(b"namespace", [bytes(32), wrong])  # type: ignore[list-item]
