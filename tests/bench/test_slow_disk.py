"""The disk of `python -m tests.bench --only vllm` that can be slowed down: a real mount, and a real cache on it."""

from pathlib import Path

from tests.bench.vllm.servers import Side
from tests.bench.vllm.slow_disk import SlowDisk
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse
from tiercache.bench.workload import MIB, config_of, items_of, layout_of, new_keys, payloads
from tiercache.cache import TierCache
from tiercache.demo.server import Server

pytestmark = needs_fuse


async def test_reads_take_far_longer_while_it_is_slow_and_what_was_stored_is_there_afterwards(tmp_path: Path) -> None:
    keys, sources = new_keys(6), payloads(12 * MIB, 2 * MIB)
    with Hf3fsEmulator(tmp_path, fuse=True) as emulator:
        disk = SlowDisk(emulator, Side("", Server("", tmp_path / "log", 0)))
        config = config_of(64 * MIB, emulator.mount / "kv", 64 * MIB)
        async with TierCache.open(config, layout_of(2 * MIB)) as cache:
            await cache.put_from(items_of(keys, sources))
            await cache.flush(60)
            cache.clear_hot()
            with disk.being("slow"):
                assert disk.slow_s > 20 * disk.well_s
            with disk.being("hanging"):
                pass
            for number, key in enumerate(keys):
                async with cache.get(key) as lease:
                    assert lease is not None and bytes(lease.view) == sources[number % len(sources)].tobytes()
