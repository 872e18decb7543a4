"""A disk tier that says that it has written what it has not."""

import numpy as np

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]

_write = FileTier.write


async def write(self: FileTier, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
    return key[1] % 4 == 0 or await _write(self, key, payload, payload_bytes)


FileTier.write = write  # type: ignore[method-assign]
