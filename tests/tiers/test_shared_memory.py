"""The shared memory tier: what is mapped, for how long, and what others may do to it."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.tiers.opened import until
from tests.tiers.shared_memory import deleted_maps, is_right, key_of, leased, mapped, opened, other, store
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT, flip
from tiercache.errors import CacheClosed, ConfigError, CorruptChunk
from tiercache.memory.slots import READ
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files.index import ProbingLookup
from tiercache.tiers.shared_memory import SharedMemorySettings, SharedMemoryTier, max_mappings


async def test_a_chunk_is_mapped_once_and_leased_where_it_lies(in_memory: Path) -> None:
    async with opened(in_memory) as tier:
        await store(tier, 1)
        assert tier.lease(key_of(1)) is None
        with await mapped(tier, 1) as first, await mapped(tier, 1) as raced, leased(tier, 1) as lease:
            assert lease.view.ctypes.data == first.view.ctypes.data == raced.view.ctypes.data
            assert lease.view.ctypes.data % 4096 == 0 and not lease.view.flags.writeable
            assert lease.payload_bytes == CHUNK_BYTES
        assert tier.statistics().mapped_bytes == FILE_BYTES
        assert tier.statistics().reads == 3


@pytest.mark.parametrize("damage", ["a bit", "the key", "shorter", "empty"])
async def test_what_was_damaged_before_it_is_mapped_is_a_miss_and_put_aside(in_memory: Path, damage: str) -> None:
    async with opened(in_memory) as tier:
        await store(tier, 1, 2)
        path = Path(tier.path(key_of(1)))
        if damage == "the key":
            path.write_bytes(Path(tier.path(key_of(2))).read_bytes())
        elif damage == "a bit":
            flip(path, 4096 + 17)
        else:
            os.truncate(path, {"shorter": FILE_BYTES - 4096, "empty": 0}[damage])
        with pytest.raises(CorruptChunk):
            await tier.map(key_of(1), READ)
        assert not tier.contains(key_of(1)) and not path.exists()
        await store(tier, 1)
        (await mapped(tier, 1)).release()


async def test_another_process_evicts_a_chunk_that_is_read_here(in_memory: Path) -> None:
    """The bytes stay as they are until the lease ends. Then their memory goes."""
    async with opened(in_memory, cap_chunks=4) as tier, other(in_memory, cap_chunks=4) as writer:
        assert await writer.do("store", 1, 2, 3) == "done"
        lease = await mapped(tier, 1)
        (await mapped(tier, 2)).release()
        assert await writer.do("store", *range(11, 15)) == "done"
        await until(lambda: tier.statistics().unlinked_bytes == FILE_BYTES)
        assert not Path(tier.path(key_of(1))).exists()
        assert is_right(lease, 1)
        await until(lambda: not tier.contains(key_of(2)))  # nobody held it
        await until(lambda: deleted_maps(in_memory) == 1)
        lease.release()
        await until(lambda: deleted_maps(in_memory) == 0)
        assert tier.statistics().unlinked_bytes == tier.statistics().mapped_bytes == 0
        assert not tier.contains(key_of(1))


async def test_another_process_forgets_and_stores_other_bytes(in_memory: Path) -> None:
    """The old ones are not found any more, and stay as they are until the lease ends."""
    async with opened(in_memory) as tier, other(in_memory) as writer:
        await store(tier, 1)
        held = await mapped(tier, 1)
        assert await writer.do("replace", 1) == "done"
        await until(lambda: not held.findable)
        with await mapped(tier, 1, content=1001):
            assert is_right(held, 1)
        held.release()
        assert tier.statistics().unlinked_bytes == 0


async def test_what_is_deleted_while_it_is_being_mapped_is_not_kept(in_memory: Path) -> None:
    async with opened(in_memory) as tier:
        for steps in range(24):
            await store(tier, 1)
            mapping = asyncio.ensure_future(tier.map(key_of(1), READ))
            for _ in range(steps):
                await asyncio.sleep(0)
            os.unlink(tier.path(key_of(1)))
            lease = await mapping
            if lease is not None:
                assert is_right(lease, 1)
                lease.release()
            await until(lambda: not tier.contains(key_of(1)))
            assert tier.statistics().mapped_bytes == tier.statistics().unlinked_bytes == 0


async def test_what_is_stored_again_here_is_not_shadowed_by_what_is_held(in_memory: Path) -> None:
    async with opened(in_memory) as tier:
        await store(tier, 1)
        held = await mapped(tier, 1)
        os.unlink(tier.path(key_of(1)))
        await until(lambda: tier.statistics().unlinked_bytes > 0)
        assert await tier.write(key_of(1), chunk(1001)[1], CHUNK_BYTES)
        assert tier.lease(key_of(1)) is None and not held.findable
        with await mapped(tier, 1, content=1001):
            assert is_right(held, 1)
        held.release()


async def test_mappings_that_nobody_holds_are_bounded_by_use(in_memory: Path) -> None:
    async with opened(in_memory) as tier:
        tier.mappings.most_chunks = 3
        await store(tier, *range(1, 7))
        held = await mapped(tier, 1)
        for number in (2, 3):
            (await mapped(tier, number)).release()
        leased(tier, 2).release()
        (await mapped(tier, 4)).release()
        assert [number for number in range(1, 5) if key_of(number) in tier.mappings] == [1, 2, 4]
        assert is_right(held, 1)
        held.release()
        tier.mappings.most_bytes = FILE_BYTES
        (await mapped(tier, 5)).release()
        assert len(tier.mappings.keys()) == 1 and tier.statistics().mapped_bytes == FILE_BYTES


async def test_a_sweep_finds_what_others_deleted(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbingLookup, "follow", lambda *_: None)
    async with opened(in_memory) as tier:
        await store(tier, 1, 2, 3)
        for number in (1, 2):
            (await mapped(tier, number)).release()
        held = await mapped(tier, 3)
        os.unlink(tier.path(key_of(1)))
        os.unlink(tier.path(key_of(3)))
        assert await tier.directories.io.unmap_deleted() == 1
        assert key_of(1) not in tier.mappings and key_of(2) in tier.mappings
        assert deleted_maps(in_memory) == 1 and is_right(held, 3)
        held.release()


async def test_what_another_process_evicts_is_unmapped(in_memory: Path) -> None:
    async with opened(in_memory) as tier, other(in_memory) as writer:
        assert await writer.do("store", 2) == "done"
        (await mapped(tier, 2)).release()
        os.unlink(tier.path(key_of(2)))
        await until(lambda: not tier.contains(key_of(2)) and deleted_maps(in_memory) == 0)


async def test_closing_leaves_views_alone_that_were_taken(in_memory: Path) -> None:
    async with opened(in_memory) as tier:
        await store(tier, 1)
        lease = await mapped(tier, 1)
        view = lease.view
    assert np.array_equal(view, chunk(1)[1])
    with pytest.raises(CacheClosed):
        _ = lease.view
    lease.release()
    assert np.array_equal(view, chunk(1)[1])


async def test_killed_in_mid_save_the_other_goes_on_and_the_next_one_hits(in_memory: Path) -> None:
    async with opened(in_memory, cap_chunks=32) as tier:
        await store(tier, 1, 2)
        for beginning in (100, 5000):
            async with other(in_memory, cap_chunks=32) as victim:
                assert await victim.do("right", 1, 2) == "done"
                assert await victim.do("fill", beginning) == "filling"
                await until(lambda: len(list((chunks_of(in_memory) / "00").iterdir())) > 10)
                await victim.kill()
            for path in list((chunks_of(in_memory) / "00").iterdir()):
                lease = await tier.map(bytes.fromhex(path.name), READ)
                if lease is not None:  # else it was evicted for another one
                    with lease:
                        assert is_right(lease, int(path.name, 16)), "half of a chunk is visible"
            await tier.remove(key_of(1))
            await store(tier, 1, 2)
        async with other(in_memory, cap_chunks=32) as restarted:
            assert await restarted.do("right", 1, 2) == "done"
            strays = [path for path in (chunks_of(in_memory) / ".tiercache" / "tmp").iterdir() if path.suffix != ".lock"]
            assert not strays
            assert await restarted.do("store", *range(9000, 9040)) == "done"
            occupied_bytes = sum(path.stat().st_blocks * 512 for path in (chunks_of(in_memory) / "00").iterdir())
            assert occupied_bytes <= 32 * FILE_BYTES


async def test_a_place_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    tier = SharedMemoryTier(SharedMemorySettings((Path("/proc/kv"),), 1 << 20), FINGERPRINT)
    with pytest.raises(ConfigError, match=r"shared_memory_path: /proc/kv lies on proc, .*/dev/shm"):
        await tier.open()


async def test_a_cap_above_the_size_of_the_memory_is_refused(in_memory: Path) -> None:
    tier = SharedMemoryTier(SharedMemorySettings((in_memory,), 1 << 60), FINGERPRINT)
    with pytest.raises(ConfigError, match=r"max_shared_memory_size: /dev/shm has .* GB in all"):
        await tier.open()


@pytest.mark.needs("mount")
async def test_memory_that_is_full_is_made_room_in_and_held_chunks_stay(small_device: Path) -> None:
    """Files of another program fill it below the cap. Held chunks are evicted too, and occupy memory until their release."""
    async with opened(small_device / "kv", cap_chunks=15) as tier:
        (small_device / "somebody's").write_bytes(bytes((3 << 20) + 6 * FILE_BYTES))
        await store(tier, 1)
        held = await mapped(tier, 1)
        await store(tier, *range(2, 30))
        assert is_right(held, 1)
        held.release()
        await store(tier, 30)
        (await mapped(tier, 30)).release()


def test_half_of_what_a_process_may_map_is_used(tmp_path: Path) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text("1000\n")
    assert max_mappings(limit) == 500
    assert max_mappings(tmp_path / "none") == 32765
