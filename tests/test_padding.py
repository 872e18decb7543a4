"""The rest of a payload's last page holds no bytes of the slot's earlier chunk: whole pages go to other tiers."""

from pathlib import Path

import numpy as np
import pytest

from tests.remote.test_example_tier import EXAMPLES
from tests.test_cache import CHUNK_BYTES, key, opened, payload
from tiercache import TierCache
from tiercache.core.header import aligned

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
async def test_chunk_from_any_tier_has_zeroes_behind_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decompressing left there what the slot held before, and values of servers have no padding at all."""
    monkeypatch.syspath_prepend(EXAMPLES)
    name, _, compression = kind.partition(" ")
    values = {"disk": disk, "fs": fs}[name](tmp_path, compression) if compression else sqlite(tmp_path)
    async with opened(**values) as cache:
        await cache.put(key(1), compressible())
        await cache.flush()
        cache.clear_hot()
        await use_all_slots(cache)
        async with cache.get(key(1)) as lease:
            assert lease is not None
            assert np.array_equal(lease.view, compressible())
            assert lease.padded.nbytes == aligned(LENGTH_BYTES)
            assert not lease.padded[LENGTH_BYTES:].any()


async def test_next_tier_gets_nothing_of_others(tmp_path: Path) -> None:
    async with opened(**fs(tmp_path / "a", "zstd")) as cache:
        await cache.put(key(1), compressible())
    async with opened(tmp_path / "b", **fs(tmp_path / "a", "zstd")) as cache:
        await use_all_slots(cache)
        assert await cache.warm([key(1)]) == 1
        await cache.put(key(1), compressible())
    (file,) = (tmp_path / "b").glob(f"*/{key(1).hex()}")
    assert b"\xbb" * 16 not in file.read_bytes()
