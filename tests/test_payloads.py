"""What a caller hands over is stored, and handed out, byte for byte, whatever numpy and torch call it. Bytes of a slot's
earlier chunk are in none of it, nor in the rest of its last page: whole pages go to other tiers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.examples import EXAMPLES
from tests.test_cache import CHUNK_BYTES, key, only_below, opened, payload
from tiercache import TierCache
from tiercache.core.header import aligned
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


def stored(payload: Any, into: Any) -> bytes:
    """What is stored of a payload, and then delivered into another one."""
    length, source = source_of(payload)
    slot = np.full(length, 0xBB, np.uint8)
    source(slot)
    sink_of(into)(slot)
    return bytes(slot)


@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_gaps_between_fields_are_stored_and_delivered_as_they_are(order: str) -> None:
    """What the slot had held before lay in them: another tenant's bytes."""
    array, into = structured(order), structured(order)
    into.view("V12")[...] = b"\xbb" * 12
    assert stored(array, into) == in_order(array) == in_order(into)


@pytest.mark.parametrize("step", [1, 2])
def test_bools_of_torch_are_copied_bit_for_bit(step: int) -> None:
    import torch

    tensor, into = torch.frombuffer(bytearray(RAW), dtype=torch.bool)[::step], torch.zeros(240, dtype=torch.bool)[::step]
    assert stored(tensor, into) == bytes(into.view(torch.uint8).numpy()) == RAW[::step]


@pytest.mark.parametrize("step", [1, 2])
def test_tensors_that_autograd_records_are_stored_and_filled(step: int) -> None:
    """Those with gaps were never filled: autograd refuses to change them in place."""
    import torch

    tensor, into = torch.arange(60.0, requires_grad=True)[::step], torch.zeros(60, requires_grad=True)[::step]
    assert stored(tensor, into) == tensor.detach().numpy().tobytes()
    assert torch.equal(into, tensor)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_array_in_another_order_is_stored_in_the_order_of_its_items(dtype: type) -> None:
    array, into = np.arange(60).astype(dtype).reshape(6, 10).T, np.zeros((6, 10), dtype).T
    assert stored(array, into) == array.tobytes() == into.tobytes()


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "float16", "strided", "bfloat16 tensor"])
async def test_anything_with_bytes_can_be_put_and_got_into(kind: str) -> None:
    raw = payload(1)
    value, into = raw, bytearray(CHUNK_BYTES)
    if kind == "bfloat16 tensor":
        import torch

        value = torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(64, -1).t().contiguous().t()
        into = torch.zeros_like(value)
    elif kind == "float16":
        value = raw.view(np.float16).reshape(32, -1)
        into = np.zeros_like(value)
    elif kind == "strided":
        value = np.repeat(raw, 2)[::2]
        into = np.zeros(2 * CHUNK_BYTES, np.uint8)[::2]
    else:
        value = {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}[kind](raw.tobytes())
    async with opened() as cache:
        assert await cache.put(key(1), value)
        assert await cache.get_into([key(1)], [into]) == 1
    if kind == "bfloat16 tensor":
        into = into.contiguous().view(torch.uint8).numpy()
    assert np.ascontiguousarray(into).tobytes() == raw.tobytes()


async def test_nothing_of_others_is_inside_a_chunk_of_structures() -> None:
    async with opened() as cache:
        others = [key(number) for number in range(100, 132)]
        await cache.put_many(others, [b"B" * 65536] * 32)
        await cache.forget(others)
        await cache.put(key(1), structured("contiguous"))
        async with cache.get(key(1)) as lease:
            assert lease is not None and bytes(lease.view) == RAW


LENGTH_BYTES = 40 * 1024 + 5
SLOTS = 32


def fs(place: Path, compression: str) -> dict[str, object]:
    prefix = "remote_storage_plugin.fs.a."
    options = {f"{prefix}url": place.as_uri(), f"{prefix}max_size": 1, f"{prefix}compression": compression}
    return {"remote_storage_plugins": ["fs.a"], "extra_config": options}


def sqlite(place: Path) -> dict[str, object]:
    prefix = "remote_storage_plugin.sqlite.a."
    options = {
        f"{prefix}module_path": "sqlite_tier", f"{prefix}class_name": "SqliteTier", f"{prefix}file": str(place / "kv.sqlite")
    }  # fmt: skip
    return {"remote_storage_plugins": ["sqlite.a"], "extra_config": options}


def disk(place: Path, compression: str) -> dict[str, object]:
    return {"local_disk": str(place), "max_local_disk_size": 0.1, "disk_compression": compression}


def compressible() -> np.ndarray:
    return np.repeat(payload(1, LENGTH_BYTES // 8 + 1), 8)[:LENGTH_BYTES]


async def use_all_slots(cache: TierCache) -> None:
    others = [key(number) for number in range(100, 100 + SLOTS)]
    assert await cache.put_many(others, [np.full(CHUNK_BYTES, 0xBB, np.uint8)] * SLOTS) == SLOTS
    await cache.forget(others)


@pytest.mark.parametrize("kind", ["disk none", "disk zstd", "fs none", "fs lz4", "own"])
async def test_chunk_from_any_tier_has_zeroes_behind_it(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decompressing left there what the slot held before, and values of servers have no padding at all."""
    monkeypatch.syspath_prepend(EXAMPLES)
    name, _, compression = kind.partition(" ")
    values = {"disk": disk, "fs": fs}[name](tmp_path, compression) if compression else sqlite(tmp_path)
    async with opened(**values) as cache:
        await cache.put(key(1), compressible())
        await only_below(cache)
        await use_all_slots(cache)
        async with cache.get(key(1)) as lease:
            assert lease is not None and np.array_equal(lease.view, compressible())
            assert lease.padded.nbytes == aligned(LENGTH_BYTES)
            assert not lease.padded[LENGTH_BYTES:].any()


async def test_next_tier_gets_nothing_of_others(tmp_path: Path) -> None:
    async with opened(**fs(tmp_path / "a", "zstd")) as cache:
        await cache.put(key(1), compressible())
    async with opened(tmp_path / "b", **fs(tmp_path / "a", "zstd")) as cache:
        await use_all_slots(cache)
        assert await cache.warm([key(1)]) == 1
        await cache.put(key(1), compressible())
    (file,) = chunks_of(tmp_path / "b").glob(f"*/{key(1).hex()}")
    assert b"\xbb" * 16 not in file.read_bytes()
