"""A worker whose event loop waits for ever in a forget."""

import time

from tiercache.core.keys import ChunkKey
from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier

__all__ = ["run"]


async def remove(self: DiskTier, key: ChunkKey) -> bool:
    time.sleep(3600)
    return True


DiskTier.remove = remove  # type: ignore[method-assign]
