"""What a caller hands over is stored, and handed out, byte for byte, whatever numpy and torch call it."""

import numpy as np
import pytest

from tests.test_cache import key, opened
from tiercache.payloads import sink_of, source_of

GAPS = np.dtype({"names": ["a", "b"], "formats": ["u1", "u4"], "offsets": [0, 4], "itemsize": 12})
RAW = bytes(range(1, 241))


def structured(order: str) -> np.ndarray:
    """20 items of 12 bytes in a memory of which numpy does not know whose it is."""
    array = np.frombuffer(bytearray(RAW), GAPS)
    return array if order == "contiguous" else array.reshape(4, 5).T


def in_order(array: np.ndarray) -> bytes:
    """Its items one after the other, gaps included."""
    items = array.view("V12")
    return b"".join(bytes(item) for item in np.nditer(items, order="C"))


@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_gaps_between_fields_are_stored_as_they_are(order: str) -> None:
    """What the slot had held before lay in them: another tenant's bytes."""
    array, slot = structured(order), np.full(240, 0xBB, np.uint8)
    length, source = source_of(array)
    source(slot)
    assert length == 240
    assert bytes(slot) == in_order(array)


@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_gaps_between_fields_are_delivered(order: str) -> None:
    array = structured(order)
    array.view("V12")[...] = b"\xbb" * 12
    sink_of(array)(np.frombuffer(RAW, np.uint8))
    assert in_order(array) == RAW


@pytest.mark.parametrize("step", [1, 2])
def test_bools_of_torch_are_copied_bit_for_bit(step: int) -> None:
    import torch

    tensor = torch.frombuffer(bytearray(RAW), dtype=torch.bool)[::step]
    slot = np.zeros(240 // step, np.uint8)
    length, source = source_of(tensor)
    source(slot)
    assert length == 240 // step
    assert bytes(slot) == RAW[::step]
    into = torch.zeros(240, dtype=torch.bool)[::step]
    sink_of(into)(slot)
    assert bytes(into.view(torch.uint8).numpy()) == RAW[::step]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_array_in_another_order_is_stored_in_the_order_of_its_items(dtype: type) -> None:
    array = np.arange(60).astype(dtype).reshape(6, 10).T
    slot = np.zeros(array.nbytes, np.uint8)
    _, source = source_of(array)
    source(slot)
    assert bytes(slot) == array.tobytes()
    into = np.zeros((6, 10), dtype).T
    sink_of(into)(slot)
    assert np.array_equal(into, array)


async def test_nothing_of_others_is_inside_a_chunk_of_structures() -> None:
    async with opened() as cache:
        others = [key(number) for number in range(100, 132)]
        await cache.put_many(others, [b"B" * 65536] * 32)
        await cache.forget(others)
        await cache.put(key(1), structured("contiguous"))
        async with cache.get(key(1)) as lease:
            assert lease is not None
            assert bytes(lease.view) == RAW
