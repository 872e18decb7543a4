"""A remote tier that answers no question, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.tiers.remote.base import RemoteTier

QUESTIONS: list[int] = []
"""How many chunks each was about."""


class SlowServer(RemoteTier):
    async def _connect(self) -> None:
        pass

    async def _disconnect(self) -> None:
        pass

    async def _exist(self, keys: Sequence[ChunkKey]) -> list[bool]:
        QUESTIONS.append(len(keys))
        await asyncio.sleep(3600)
        return [False] * len(keys)

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return None

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return False

    async def _delete(self, key: ChunkKey) -> bool:
        return False
