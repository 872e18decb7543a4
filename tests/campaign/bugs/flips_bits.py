"""A disk tier that damages what it reads, after it was verified."""

import numpy as np

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]

_read = FileTier.read


async def read(self: FileTier, key: ChunkKey, into: np.ndarray) -> int | None:
    length = await _read(self, key, into)
    if length is not None:
        into[length // 2] ^= 1
    return length


FileTier.read = read  # type: ignore[method-assign]
