"""A worker whose event loop waits for ever in a forget."""

import time

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]


async def remove(self: FileTier, key: ChunkKey) -> bool:
    time.sleep(3600)
    return True


FileTier.remove = remove  # type: ignore[method-assign]
