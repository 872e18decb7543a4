"""A disk tier that says that it has written what it has not."""

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier

__all__ = ["run"]

_write = DiskTier.write


async def write(self: DiskTier, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
    return key[1] % 4 == 0 or await _write(self, key, payload, payload_bytes)


DiskTier.write = write  # type: ignore[method-assign]
