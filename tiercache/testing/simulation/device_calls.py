"""What callers of a simulated process do with device memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tiercache.cache import TierCache
from tiercache.testing.simulation.oracle import Truth
from tiercache.testing.simulation.twin import DeviceMemory, Part, SimulatedTwin

_COPY_S = 30.0
"""After so long the cache says that a copy hangs, and that the caller's memory is still in use."""


class DeviceCalls:
    """Each call has memory of its own, and nobody touches it when it has ended."""

    longest_s = _COPY_S

    def __init__(self, twin: SimulatedTwin, truth: Truth, chunk_bytes: int) -> None:
        self._twin = twin
        self._truth = truth
        self._chunk_bytes = chunk_bytes
        self._memory: DeviceMemory | None = None
        self._making = asyncio.Lock()

    async def put(
        self,
        cache: TierCache,
        names: Sequence[bytes],
        keys: Sequence[int],
        where: str,
        deadline_s: float | None,
        prefix: bool,
    ) -> int | None:
        """`put_many` of device memory; None where there is no memory for it."""
        parts = await self._parts(keys, where)
        if parts is None:
            return None
        for part, key in zip(parts, keys, strict=True):
            part.fill(self._truth.payload(key))
        began_s = asyncio.get_running_loop().time()
        try:
            return await cache.put_many(names, [part.payload for part in parts], deadline_s=deadline_s, prefix=prefix)
        finally:
            self._give_back(parts, began_s)

    async def get(
        self,
        cache: TierCache,
        names: Sequence[bytes],
        keys: Sequence[int],
        where: str,
        deadline_s: float | None,
    ) -> int | None:
        """`get_into` device memory, and a look at what came."""
        parts = await self._parts(keys, where)
        if parts is None:
            return None
        floors = [self._truth.floor[key] for key in keys]
        began_s = asyncio.get_running_loop().time()
        try:
            delivered = await cache.get_into(names, [part.payload for part in parts], deadline_s=deadline_s)
            for key, part, floor in list(zip(keys, parts, floors, strict=True))[:delivered]:
                self._truth.check(key, part.content(), floor)
            return delivered
        finally:
            self._give_back(parts, began_s)

    def close(self) -> None:
        if self._memory is not None and not self._twin.is_lost:
            self._memory.close()
        self._memory = None

    def _give_back(self, parts: Sequence[Part], began_s: float) -> None:
        if asyncio.get_running_loop().time() - began_s >= _COPY_S:
            return  # a copy hangs in it
        for part in parts:
            part.fence()
            part.end()

    async def _parts(self, keys: Sequence[int], where: str) -> list[Part] | None:
        async with self._making:
            if self._memory is None:
                loop = asyncio.get_running_loop()
                # It waits for the device.
                self._memory = await loop.run_in_executor(None, DeviceMemory, self._twin, self._chunk_bytes)
        parts = []
        for key in keys:
            part = self._memory.part(self._truth.length(key), paged=where == "blocks")
            if part is None:
                break
            parts.append(part)
        if len(parts) == len(keys):
            return parts
        for part in parts:
            part.end()
        return None

