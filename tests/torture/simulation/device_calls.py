"""What callers of a simulated process do with device memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tests.torture.simulation.oracle import Truth
from tests.torture.simulation.twin import DeviceMemory, Part, SimulatedTwin
from tiercache.cache import TierCache
from tiercache.errors import TierUnavailable

_COPY_S = 30.0
"""After so long the cache says that a copy hangs, and that the caller's memory is still in use."""
_READY_S = 0.05
_ROUNDING_S = 0.001
"""A difference of two times may be just below the wait between them."""


class DeviceCalls:
    """Each call has memory of its own, and nobody touches it when it has ended."""

    longest_s = _COPY_S + _READY_S

    def __init__(self, twin: SimulatedTwin, truth: Truth, chunk_bytes: int) -> None:
        self._twin = twin
        self._truth = truth
        self._chunk_bytes = chunk_bytes
        self._making: asyncio.Future[DeviceMemory] | None = None

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

    async def works(self, cache: TierCache, names: Sequence[bytes], key: int) -> bool:
        """Put a chunk and get it, in both kinds of memory. Return True if it was stored and found wherever it had to be."""
        ended: list[int | None] = []  # None: the caller has no memory left
        with contextlib.suppress(TierUnavailable, OSError):
            await cache.forget([names[key]])
        for where in ("blocks", "piece"):
            ended.append(await self.put(cache, [names[key]], [key], where, None, False))
            await cache.flush(1.0)
            cache.clear_hot()
            found = await self.get(cache, [names[key]], [key], where, None)
            if cache.tiers:
                ended.append(found)
        return 0 not in ended

    def close(self) -> None:
        self._making = None

    def _give_back(self, parts: Sequence[Part], began_s: float) -> None:
        if asyncio.get_running_loop().time() - began_s >= _COPY_S - _ROUNDING_S:
            return  # a copy hangs in it
        for part in parts:
            part.fence()
            part.end()

    async def _parts(self, keys: Sequence[int], where: str) -> list[Part] | None:
        if self._making is None or (self._making.done() and self._making.exception() is not None):
            # In a thread: it waits for the device.
            loop = asyncio.get_running_loop()
            self._making = loop.run_in_executor(None, DeviceMemory, self._twin, self._chunk_bytes)
        await asyncio.wait([self._making], timeout=_READY_S)
        if not self._making.done() or self._making.exception() is not None:
            return None  # the device does not answer
        memory = self._making.result()
        parts = []
        for key in keys:
            part = memory.part(self._truth.length(key), paged=where == "blocks")
            if part is None:
                break
            parts.append(part)
        if len(parts) == len(keys):
            return parts
        for part in parts:
            part.end()
        return None
