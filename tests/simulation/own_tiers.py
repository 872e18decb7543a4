"""Tiers as third parties might write them: one that keeps the contract, and some that do not."""

import asyncio

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.testing import MemoryTier
from tiercache.tiers.remote.base import RemoteSettings


class Dictionary(MemoryTier):
    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings.name)


class Unremoved(Dictionary):
    """Says that it has removed what it still has."""

    async def remove(self, key: ChunkKey) -> bool:
        return key in self.chunks


class Mixed(Dictionary):
    """Takes the last chunk for every chunk that it has."""

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        if key in self.chunks:
            key = next(reversed(self.chunks))
        return await super().read(key, into)


class Late(Dictionary):
    """Reads what the memory holds after the write has ended."""

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        def copy() -> None:
            self.chunks.setdefault(key, payload[:payload_bytes].tobytes())

        asyncio.get_running_loop().call_later(0.001, copy)
        return True


class Careless(Dictionary):
    """Raises what the contract does not know."""

    async def remove(self, key: ChunkKey) -> bool:
        del self.chunks[key]
        return True
