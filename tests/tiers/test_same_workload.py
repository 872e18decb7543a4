"""Every file tier keeps what is used, whichever mount it is for."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.test_cache import CHUNK_BYTES, key, opened, payload
from tiercache import TierCache
from tiercache.core.header import file_bytes

CAP_GB = 60 * file_bytes(CHUNK_BYTES) / 2**30
HOT = range(1, 21)


def disk(place: Path) -> dict[str, object]:
    return {"local_disk": str(place), "max_local_disk_size": CAP_GB}


def shared_memory(place: Path) -> dict[str, object]:
    return {"shared_memory_path": str(place), "max_shared_memory_size": CAP_GB}


def gds(place: Path) -> dict[str, object]:
    return {"gds_path": str(place), "max_gds_size": CAP_GB, "gds_buffer_size": 16, "use_gds": False}


def fs(place: Path) -> dict[str, object]:
    prefix = "remote_storage_plugin.fs.a."
    return {
        "remote_storage_plugins": ["fs.a"],
        "extra_config": {f"{prefix}base_path": str(place), f"{prefix}max_size": CAP_GB},
    }


async def put(cache: TierCache, numbers: Iterable[int]) -> None:
    """Into all tiers."""
    chosen = list(numbers)
    assert await cache.put_many([key(number) for number in chosen], [payload(number) for number in chosen])
    assert (await cache.flush()).complete


@pytest.mark.parametrize("kind", [disk, shared_memory, gds, fs])
async def test_chunks_that_are_hot_stay_in_the_tier(
    kind: Callable[[Path], dict[str, object]], tmp_path: Path, in_memory: Path
) -> None:
    """They are served from memory, so the tier learns of it only because it is told."""
    hot = [key(number) for number in HOT]
    buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in hot]
    async with opened(**kind(in_memory if kind is shared_memory else tmp_path)) as cache:
        await put(cache, HOT)
        for start in range(100, 300, 4):
            await put(cache, range(start, start + 4))
            assert await cache.get_into(hot, buffers) == len(hot)
        assert cache.tiers[0].statistics().evicted > 100
        assert sum(await cache.tiers[0].probe_each(hot)) == len(hot)
