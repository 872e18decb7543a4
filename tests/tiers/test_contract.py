"""Every tier of ours against the contract."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.test_disk import flip
from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.errors import CorruptChunk
from tiercache.testing import FaultyTier, MemoryTier, TierContract
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier, Traits
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


class Lingering(MemoryTier):
    """Lets a cancelled write go on. A read waits for a write of its key."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: dict[ChunkKey, asyncio.Task[bool]] = {}

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await asyncio.wait([self.writing[key]])
        return await super().read(key, into)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        self.writing[key] = asyncio.create_task(self._store(key, payload, payload_bytes))
        return await asyncio.shield(self.writing[key])

    async def _store(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        for _ in range(10):
            await asyncio.sleep(0)
        return await super().write(key, payload, payload_bytes)


async def test_the_contract_refuses_a_tier_whose_cancelled_writes_go_on() -> None:
    with pytest.raises(AssertionError, match="memory that was given up"):
        await TestMemoryTier().test_cancelled_write_no_longer_uses_the_payload(Lingering())


class Cleaning(MemoryTier):
    """Removes a damaged chunk also if the configuration excludes the tier from writes."""

    def __init__(self, chunks: dict[ChunkKey, bytes]) -> None:
        super().__init__(traits=Traits(durable=True))
        self.chunks = chunks

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        if self.chunks.get(key) == b"damaged":
            await self.remove(key)
            raise CorruptChunk("damaged")
        return await super().read(key, into)


class OfCleaning(TestMemoryTier):
    __test__ = False

    def __init__(self) -> None:
        self.chunks: dict[ChunkKey, bytes] = {}

    async def make_tier(self, place: Path) -> Tier:
        return Cleaning(self.chunks)

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        self.chunks[key] = b"damaged"
        return True


async def test_the_contract_refuses_a_tier_that_removes_though_it_is_only_read(tmp_path: Path) -> None:
    contract = OfCleaning()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await contract.test_tier_that_is_only_read_changes_nothing(await contract.make_tier(tmp_path), tmp_path)


class TestFaultyTierWithoutFaults(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return FaultyTier(MemoryTier())


class TestFaultyTierOnADisk(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return FaultyTier(DiskTier(FileSettings((place / "disk",), cap_bytes=64 << 20), LAYOUT.fingerprint))

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        assert isinstance(tier, FaultyTier) and isinstance(tier.tier, FileTier)
        flip(Path(tier.tier.path(key)), 4096 + 17)
        return True


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
