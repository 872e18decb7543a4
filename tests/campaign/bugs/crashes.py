"""A worker that ends in the middle of a forget."""

import os

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]


async def remove(self: FileTier, key: ChunkKey) -> bool:
    os.abort()


FileTier.remove = remove  # type: ignore[method-assign]
