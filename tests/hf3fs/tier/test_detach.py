"""A 3FS tier that is detached from a running cache while its daemon has not answered reads."""

import asyncio
import os

import numpy as np
import pytest

from tests.hf3fs_emulator import Hf3fsEmulator
from tests.test_cache import key, opened, payload
from tests.tiers.opened import until
from tiercache.errors import ConfigError
from tiercache.tiers.hf3fs import Hf3fsTier

READS = 4


async def test_slots_of_unanswered_reads_are_not_used_again_before_the_daemon_has_answered(
    mortal: Hf3fsEmulator,
) -> None:
    settings = {
        "remote_storage_plugins": ["hf3fs"],
        "hf3fs_base_path": str(mortal.mount / "chunks"),
        "hf3fs_mount_point": str(mortal.mount),
        "max_hf3fs_size": 1.0,
        "shm_name": f"test-detach-{os.getpid()}",
    }
    async with opened(**settings) as cache:
        (tier,) = cache.tiers
        assert isinstance(tier, Hf3fsTier) and tier.io.engine.arena is not None
        for number in range(READS):
            await cache.put(key(number), payload(number))
        assert (await cache.flush(10.0)).complete
        cache.clear_hot()
        mortal.control.hang()
        reads = [asyncio.create_task(cache.get(key(number), deadline_s=0.2).__aenter__()) for number in range(READS)]
        await asyncio.to_thread(mortal.control.until_hanging, READS)
        await cache.detach("hf3fs", timeout_s=0.1)
        assert await asyncio.gather(*reads) == [None] * READS
        with pytest.raises(ConfigError, match="3FS may still write to memory"):
            await cache.attach("hf3fs")
        others = range(100, 100 + cache.cpu.pool.count)
        for number in others:
            assert await cache.put(key(number), payload(number))
        mortal.control.resume()
        await until(lambda: not cache.parts.arena.lent)
        hot = 0
        for number in others:
            async with cache.get(key(number)) as lease:
                assert lease is None or np.array_equal(lease.view, payload(number)), f"the daemon wrote into key {number}"
                hot += lease is not None
        assert hot == cache.cpu.pool.count - READS
        await cache.attach("hf3fs")
        for number in range(READS):
            async with cache.get(key(number), deadline_s=10.0) as lease:
                assert lease is not None and np.array_equal(lease.view, payload(number))
