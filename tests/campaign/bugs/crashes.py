"""A worker that ends in the middle of a forget."""

import os

from tiercache.core.keys import ChunkKey
from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier

__all__ = ["run"]


async def remove(self: DiskTier, key: ChunkKey) -> bool:
    os.abort()


DiskTier.remove = remove  # type: ignore[method-assign]
