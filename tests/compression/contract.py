"""What each tier does that can compress. Subclass `CompressionContract`, and say how your tier is made."""

from pathlib import Path

import numpy as np
import pytest

from tests.compression.payloads import kv
from tests.tiers.opened import open_tier
from tiercache.errors import CorruptChunk
from tiercache.testing import page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier


class CompressionContract:
    async def make_tier(self, place: Path, compression: str) -> Tier:
        """Not open yet. It keeps its data at `place`, whatever the compression."""
        raise NotImplementedError("say how your tier is made")

    async def damage(self, tier: Tier, key: bytes) -> None:
        """Change a bit of the stored payload, in its middle."""
        raise NotImplementedError("say how")

    async def is_hit(self, tier: Tier, key: bytes, payload: np.ndarray, length: int) -> bool:
        into = page_aligned(CHUNK_BYTES)
        if await tier.read(key, into) is None:
            return False
        assert np.array_equal(into[:length], payload[:length]), "wrong bytes were served as a hit"
        return True

    @pytest.mark.parametrize(("mode", "most"), [("lz4", 0.95), ("zstd", 0.8)])
    async def test_kv_takes_fewer_bytes_and_comes_back(self, tmp_path: Path, mode: str, most: float) -> None:
        async with open_tier(await self.make_tier(tmp_path, mode)) as tier:
            for number, length in enumerate((CHUNK_BYTES, CHUNK_BYTES - 2, 30_001), start=1):
                key, payload = kv(number, length)
                assert await tier.write(key, payload, length)
                assert await self.is_hit(tier, key, payload, length)
            counted = tier.statistics()
            assert counted.written_bytes == counted.read_bytes == 2 * CHUNK_BYTES - 2 + 30_001
            assert 0 < counted.stored_bytes < most * counted.written_bytes

    async def test_every_mode_reads_what_others_stored(self, tmp_path: Path) -> None:
        modes = ("none", "lz4", "zstd", "auto")
        for number, mode in enumerate(modes):
            async with open_tier(await self.make_tier(tmp_path, mode)) as tier:
                assert await tier.write(*kv(number, CHUNK_BYTES), CHUNK_BYTES)
        for mode in modes:
            async with open_tier(await self.make_tier(tmp_path, mode)) as tier:
                for number in range(len(modes)):
                    assert await self.is_hit(tier, *kv(number, CHUNK_BYTES), CHUNK_BYTES)

    async def test_a_changed_bit_is_a_miss_and_the_chunk_can_be_stored_again(self, tmp_path: Path) -> None:
        async with open_tier(await self.make_tier(tmp_path, "zstd")) as tier:
            key, payload = kv(1, CHUNK_BYTES)
            assert await tier.write(key, payload, CHUNK_BYTES)
            await self.damage(tier, key)
            with pytest.raises(CorruptChunk):
                await tier.read(key, page_aligned(CHUNK_BYTES))
            assert await tier.write(key, payload, CHUNK_BYTES)
            assert await self.is_hit(tier, key, payload, CHUNK_BYTES)
