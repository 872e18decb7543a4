"""Every tier of ours against the contract."""

from pathlib import Path

import pytest

from tests.tiers.test_disk import flip
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.testing import FaultyTier, MemoryTier, TierContract
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.shared_memory import SharedMemorySettings, SharedMemoryTier

LAYOUT = Layout("contract", chunk_tokens=64, bytes_per_token=1024)


def limits(chunks: int, tenant_chunks: int) -> dict[str, int]:
    """Return the settings of a tier on files that has room for so many chunks, whose directory takes a page as well."""
    needed_bytes = file_bytes(CHUNK_BYTES)
    return {"cap_bytes": chunks * needed_bytes + 4096, "tenant_bytes": tenant_chunks * needed_bytes}


class TestMemoryTier(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return MemoryTier()


class TestMemoryTierOfLargerChunks(TestMemoryTier):
    chunk_bytes = 4 * CHUNK_BYTES


class TestMemoryTierOfSmallerChunks(TestMemoryTier):
    chunk_bytes = 3000


class TestFaultyTierWithoutFaults(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return FaultyTier(MemoryTier())


class TestDiskTier(TierContract):
    direct: bool | None = None
    spread = 1

    async def make_tier(self, place: Path) -> Tier:
        directories = tuple(place / f"disk{number}" for number in range(self.spread))
        return DiskTier(FileSettings(directories, cap_bytes=64 << 20, direct=self.direct), LAYOUT.fingerprint)

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        return DiskTier(FileSettings((place / "capped",), **limits(chunks, tenant_chunks)), LAYOUT.fingerprint)

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        assert isinstance(tier, FileTier)
        flip(Path(tier.path(key)), 4096 + 17)
        return True


class TestSharedMemoryTier(TestDiskTier):
    @pytest.fixture(autouse=True)
    def memory(self, in_memory: Path) -> None:
        self.directory = in_memory / "kv"

    async def make_tier(self, place: Path) -> Tier:
        return SharedMemoryTier(SharedMemorySettings((self.directory,), cap_bytes=16 << 20), LAYOUT.fingerprint)

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        settings = SharedMemorySettings((self.directory,), **limits(chunks, tenant_chunks))
        return SharedMemoryTier(settings, LAYOUT.fingerprint)


class TestDiskTierThroughThePageCache(TestDiskTier):
    direct = False


class TestDiskTierOverThreeDirectories(TestDiskTier):
    spread = 3
