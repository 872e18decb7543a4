"""The tests that every tier passes: subclass `TierContract`, implement `make_tier`, and run pytest with pytest-asyncio.

```python
class TestMyTier(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return MyTier(place)
```
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from tiercache.core.header import aligned
from tiercache.core.keys import KEY_BYTES, ChunkKey, tenant_tag
from tiercache.errors import CorruptChunk
from tiercache.tiers.base import Tier

CHUNK_BYTES = 64 * 1024


def page_aligned(length_bytes: int) -> np.ndarray:
    """Return zeroed uint8 memory, page-aligned and padded to 4096 bytes, as tiers get it."""
    return np.frombuffer(mmap.mmap(-1, aligned(length_bytes)), dtype=np.uint8)


def chunk(number: int, length_bytes: int = CHUNK_BYTES) -> tuple[ChunkKey, np.ndarray]:
    """Return a key and its payload (padded), different for each number."""
    memory = page_aligned(length_bytes)
    memory[:length_bytes] = np.random.default_rng(number).integers(0, 256, length_bytes, dtype=np.uint8)
    return number.to_bytes(KEY_BYTES, "big"), memory


class TierContract:
    """Tests that each tier passes. `chunk_bytes` is the largest payload of `make_tier`'s tier."""

    chunk_bytes = CHUNK_BYTES
    pytestmark = pytest.mark.asyncio

    async def make_tier(self, place: Path) -> Tier:
        """Return a tier that is not open yet and keeps its data (if any) at `place`."""
        raise NotImplementedError("say how your tier is made")

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        """Return a tier as `make_tier` does, with room for `chunks` chunks, and for `tenant_chunks` of each tenant.

        `tenant_chunks` 0 means no quota. Return None if the tier has no cap, or no quotas and one is asked for.
        """
        return None

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        """Change one bit of the stored payload without the tier's knowledge. Return False if that is impossible."""
        return False

    def _chunk(self, number: int) -> tuple[ChunkKey, np.ndarray]:
        return chunk(number, self.chunk_bytes)

    @pytest_asyncio.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[Tier]:
        tier = await self.make_tier(tmp_path)
        await tier.open()
        yield tier
        await tier.close()

    async def test_returns_what_was_written(self, tier: Tier) -> None:
        lengths = {min(length, self.chunk_bytes) for length in (1, 100, 4095, 4096, 4097, self.chunk_bytes)}
        for number, length in enumerate(sorted(lengths), start=1):
            key, payload = chunk(number, length)
            assert await tier.write(key, payload, length)
            into = page_aligned(self.chunk_bytes)
            assert await tier.read(key, into) == length
            assert np.array_equal(into[:length], payload[:length])

    async def test_missing_chunk_is_a_miss_and_no_error(self, tier: Tier) -> None:
        key, _ = self._chunk(1)
        assert not tier.contains(key)
        assert await tier.read(key, page_aligned(self.chunk_bytes)) is None
        assert await tier.remove(key) is False

    async def test_contains_follows_write_and_remove(self, tier: Tier) -> None:
        key, payload = self._chunk(1)
        await tier.write(key, payload, self.chunk_bytes)
        assert tier.contains(key)
        assert await tier.remove(key) is True
        assert not tier.contains(key)
        assert await tier.read(key, page_aligned(self.chunk_bytes)) is None

    async def test_prefix_ends_at_the_first_gap(self, tier: Tier) -> None:
        keys = [self._chunk(number)[0] for number in range(1, 6)]
        for number in (1, 2, 4, 5):
            key, payload = self._chunk(number)
            await tier.write(key, payload, self.chunk_bytes)
        assert tier.prefix(keys) == 2
        assert tier.prefix(keys[3:]) == 2
        assert tier.prefix([]) == 0
        assert await tier.probe(keys) == 2

    async def test_each_key_is_asked_for_by_itself(self, tier: Tier) -> None:
        keys = [self._chunk(number)[0] for number in range(1, 6)]
        for number in (1, 2, 4):
            key, payload = self._chunk(number)
            await tier.write(key, payload, self.chunk_bytes)
        assert await tier.probe_each(keys) == [True, True, False, True, False]

    async def test_offers_many_as_it_offers_one(self, tier: Tier) -> None:
        there, removing, missing = (self._chunk(number)[0] for number in (1, 2, 3))
        for number in (1, 2):
            key, payload = self._chunk(number)
            await tier.write(key, payload, self.chunk_bytes)
        for refused in ([], [removing]):
            for key in refused:
                tier.traffic.removing[key] = ()
            for key in (there, removing, missing):
                assert any(key in known for known in tier.offered()) is tier.offers(key)
            assert tier.offers(removing) is not bool(refused)
        tier.traffic.removing.clear()

    async def test_writing_again_is_accepted_and_stores_once(self, tier: Tier) -> None:
        key, payload = self._chunk(1)
        assert await tier.write(key, payload, self.chunk_bytes)
        occupied = tier.statistics().occupied_bytes
        assert await tier.write(key, payload, self.chunk_bytes)
        assert tier.statistics().resident == 1
        assert tier.statistics().occupied_bytes == occupied

    async def test_concurrent_operations_do_not_mix_chunks(self, tier: Tier) -> None:
        chunks = [self._chunk(number) for number in range(1, 17)]
        await asyncio.gather(*(tier.write(key, payload, self.chunk_bytes) for key, payload in chunks))
        places = [page_aligned(self.chunk_bytes) for _ in chunks]
        lengths = await asyncio.gather(*(tier.read(key, into) for (key, _), into in zip(chunks, places, strict=True)))
        resident = [tier.contains(key) for key, _ in chunks]
        for (_, payload), into, length, there in zip(chunks, places, lengths, resident, strict=True):
            assert (length == self.chunk_bytes) is there
            if there:
                assert np.array_equal(into, payload)

    async def test_counts_what_it_did(self, tier: Tier) -> None:
        length = min(5000, self.chunk_bytes)
        key, payload = chunk(1, length)
        await tier.write(key, payload, length)
        await tier.read(key, page_aligned(self.chunk_bytes))
        await tier.read(self._chunk(2)[0], page_aligned(self.chunk_bytes))
        counted = tier.statistics()
        assert (counted.writes, counted.written_bytes) == (1, length)
        assert (counted.reads, counted.read_bytes, counted.read_misses) == (1, length, 1)
        assert counted.resident == 1
        assert counted.occupied_bytes >= length

    async def test_close_twice_is_fine(self, tier: Tier) -> None:
        await tier.close()
        await tier.close()

    async def test_opening_that_is_cancelled_leaves_no_task(self, tmp_path: Path) -> None:
        """Check that a tier that was never open need not be closed."""
        before = asyncio.all_tasks()
        for steps in range(12):
            tier = await self.make_tier(tmp_path)
            opening = asyncio.ensure_future(tier.open())
            for _ in range(steps):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await tier.close()
            if left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=10.0)
            left = {task for task in asyncio.all_tasks() - before if not task.done()}
            assert not left, f"cancelled after {steps} steps of the loop: {left}"

    async def test_cancelled_read_leaves_the_tier_usable(self, tier: Tier) -> None:
        key, payload = self._chunk(1)
        await tier.write(key, payload, self.chunk_bytes)
        into = page_aligned(self.chunk_bytes)
        read = asyncio.create_task(tier.read(key, into))
        await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)
        into[:] = 0
        assert await tier.read(key, page_aligned(self.chunk_bytes)) == self.chunk_bytes
        assert not into.any(), "a cancelled read went on writing into memory that was given up"

    async def test_cancelled_write_no_longer_uses_the_payload(self, tier: Tier) -> None:
        for number in range(1, 5):
            key, payload = self._chunk(number)
            written = payload.copy()
            write = asyncio.create_task(tier.write(key, payload, self.chunk_bytes))
            for _ in range(number):
                await asyncio.sleep(0)
            write.cancel()
            await asyncio.gather(write, return_exceptions=True)
            payload[:] = 0
            into = page_aligned(self.chunk_bytes)
            if await tier.read(key, into) is not None:
                assert np.array_equal(into, written), "a cancelled write went on reading memory that was given up"

    async def test_durable_tier_finds_its_chunks_after_reopening(self, tier: Tier, tmp_path: Path) -> None:
        if not tier.traits.durable:
            pytest.skip("not a durable tier")
        key, payload = self._chunk(1)
        await tier.write(key, payload, self.chunk_bytes)
        await tier.close()
        again = await self.make_tier(tmp_path)
        await again.open()
        try:
            assert await again.probe([key]) == 1
            into = page_aligned(self.chunk_bytes)
            assert await again.read(key, into) == self.chunk_bytes
            assert np.array_equal(into, payload)
        finally:
            await again.close()

    async def test_damaged_chunk_is_never_returned(self, tier: Tier) -> None:
        key, payload = self._chunk(1)
        await tier.write(key, payload, self.chunk_bytes)
        if not await self.damage(tier, key):
            pytest.skip("this tier's bytes cannot be reached")
        with pytest.raises(CorruptChunk):
            await tier.read(key, page_aligned(self.chunk_bytes))
        assert not tier.contains(key)
        assert tier.statistics().corrupt == 1
        assert await tier.write(key, payload, self.chunk_bytes), "a damaged chunk can be stored anew"
        assert await tier.read(key, page_aligned(self.chunk_bytes)) == self.chunk_bytes

    async def test_removed_chunk_stays_removed_after_reopening_and_takes_other_bytes(
        self, tier: Tier, tmp_path: Path
    ) -> None:
        (removed, old), (_, new), (kept, payload) = self._chunk(1), self._chunk(2), self._chunk(3)
        await tier.write(removed, old, self.chunk_bytes)
        await tier.write(kept, payload, self.chunk_bytes)
        await tier.remove(removed)
        if tier.traits.durable:
            await tier.close()
            tier = await self.make_tier(tmp_path)
            await tier.open()
        try:
            assert await tier.probe_each([kept, removed]) == [True, False]
            into = page_aligned(self.chunk_bytes)
            assert await tier.read(removed, into) is None
            assert await tier.write(removed, new, self.chunk_bytes)
            assert await tier.read(removed, into) == self.chunk_bytes
            assert np.array_equal(into, new)
        finally:
            await tier.close()

    async def test_chunks_that_are_removed_while_others_are_read_and_written_are_gone(self, tier: Tier) -> None:
        removed, read, written = range(1, 5), range(5, 13), range(13, 21)
        for number in (*removed, *read):
            key, payload = self._chunk(number)
            assert await tier.write(key, payload, self.chunk_bytes)

        async def is_read_whole(number: int) -> None:
            key, payload = self._chunk(number)
            into = page_aligned(self.chunk_bytes)
            length = await tier.read(key, into)
            assert length is None or np.array_equal(into, payload)

        keys = [self._chunk(number)[0] for number in (*removed, *read, *written)]
        await asyncio.gather(
            tier.probe_each(keys),
            *(tier.remove(self._chunk(number)[0]) for number in removed),
            tier.probe_each(keys),
            *(is_read_whole(number) for number in (*read, *removed)),
            *(tier.write(*self._chunk(number), self.chunk_bytes) for number in written),
        )
        assert await tier.probe_each(keys) == [False] * len(removed) + [True] * (len(read) + len(written))
        for number in removed:
            assert await tier.read(self._chunk(number)[0], page_aligned(self.chunk_bytes)) is None

    async def test_tier_that_is_only_read_changes_nothing(self, tier: Tier, tmp_path: Path) -> None:
        if not tier.traits.durable:
            pytest.skip("not a durable tier")
        keys = [self._chunk(number)[0] for number in range(1, 9)]
        for number in range(1, 9):
            await tier.write(*self._chunk(number), self.chunk_bytes)
        damaged = self._chunk(9)[0]
        await tier.write(*self._chunk(9), self.chunk_bytes)
        is_damaged = await self.damage(tier, damaged)
        await tier.close()
        reader = await self.make_tier(tmp_path)
        reader.writes = False
        await reader.open()
        assert reader.writes is False
        into = page_aligned(self.chunk_bytes)
        assert await reader.probe(keys) == 8
        assert await reader.read(keys[0], into) == self.chunk_bytes
        reader.used(keys)
        if is_damaged:
            with pytest.raises(CorruptChunk):
                await reader.read(damaged, into)
            assert not reader.offers(damaged)
        await reader.close()
        again = await self.make_tier(tmp_path)
        await again.open()
        try:
            assert await again.probe_each(keys) == [True] * 8
            if is_damaged:
                with pytest.raises(CorruptChunk):
                    await again.read(damaged, into)
        finally:
            await again.close()

    async def test_capped_tier_keeps_its_cap_and_what_is_used(self, tmp_path: Path) -> None:
        tier = await self.make_capped(tmp_path, chunks=16)
        if tier is None:
            pytest.skip("this tier has no cap")
        await tier.open()
        try:
            hot = [self._chunk(number)[0] for number in range(1, 4)]
            for number in range(1, 65):
                assert await tier.write(*self._chunk(number), self.chunk_bytes)
                tier.used(hot)
            statistics = tier.statistics()
            assert 12 <= statistics.resident <= 16
            assert statistics.evicted >= 48
            assert await tier.probe(hot) == 3, "what was used last goes last"
            assert tier.contains(self._chunk(64)[0]) and not tier.contains(self._chunk(20)[0])
        finally:
            await tier.close()

    async def test_tenant_at_its_quota_gives_up_its_own_chunks(self, tmp_path: Path) -> None:
        tier = await self.make_capped(tmp_path, chunks=32, tenant_chunks=8)
        if tier is None:
            pytest.skip("this tier has no quotas")
        await tier.open()
        try:
            quiet, noisy = (
                [self._chunk(number)[0] + tenant_tag(salt) for number in numbers]
                for salt, numbers in (("quiet", range(1, 9)), ("noisy", range(100, 140)))
            )
            for number, key in enumerate((*quiet, *noisy)):
                assert await tier.write(key, self._chunk(number)[1], self.chunk_bytes)
            assert await tier.probe_each(quiet) == [True] * 8
            there = await tier.probe_each(noisy)
            assert 6 <= sum(there) <= 8
            assert there[-1]
        finally:
            await tier.close()
