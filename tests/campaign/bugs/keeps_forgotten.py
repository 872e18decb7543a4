"""A disk tier that forgets nothing."""

from tiercache.core.keys import ChunkKey
from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier

__all__ = ["run"]


async def remove(self: DiskTier, key: ChunkKey) -> bool:
    return True


DiskTier.remove = remove  # type: ignore[method-assign]
