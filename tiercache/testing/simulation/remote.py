"""A remote store in memory, behind the class that all remote tiers are of."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierFull, TierUnavailable
from tiercache.testing.simulation.weather import Weather
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier

SERVERS: dict[str, Server] = {}
"""By URL. A run puts its servers here, and takes them out again."""


class Server:
    """What it holds, as bytes; `capacity` values, of which the oldest goes for a new one, or none does."""

    def __init__(self, weather: Weather, capacity: int, *, evicts: bool) -> None:
        self.weather = weather
        self.capacity = capacity
        self.evicts = evicts
        self.evicted = 0
        self.values: dict[ChunkKey, bytes] = {}

    def store(self, key: ChunkKey, value: bytes) -> None:
        if key not in self.values and len(self.values) >= self.capacity:
            if not self.evicts:
                raise TierFull("the server is full")
            del self.values[next(iter(self.values))]
            self.evicted += 1
        self.values[key] = value


class SimulatedRemote(RemoteTier):
    """Moves values by awaiting the server's weather. Its requests time out as those of real clients do."""

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self.server = SERVERS[settings.url]

    async def _connect(self) -> None:
        try:
            await self._request()
        except OSError as error:
            raise TierUnavailable(f"the server does not answer: {error}") from error

    async def _disconnect(self) -> None:
        """There is no connection."""

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await self._request()
        value = self.server.values.get(key)
        if value is None:
            return None
        weather = self.server.weather
        if weather.strikes("flip"):
            place = weather.below(len(value))
            value = value[:place] + bytes([value[place] ^ 1 << weather.below(8)]) + value[place + 1 :]
        if weather.strikes("partial"):
            value = value[: weather.below(len(value))]
        length = max(0, len(value) - PACKED_BYTES)
        middle = length // 2
        payload = np.frombuffer(value, np.uint8)[PACKED_BYTES:]
        into[:middle] = payload[:middle]
        await weather.moment()
        into[middle:length] = payload[middle:]
        return self.verified(key, value[:PACKED_BYTES], into, length)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        header = self.packed_header(key, payload)
        await self._request()
        middle = payload.nbytes // 2
        first = payload[:middle].tobytes()
        await self.server.weather.moment()
        self.server.store(key, header + first + payload[middle:].tobytes())
        if self.server.weather.strikes("lost-answer"):
            raise TierUnavailable("the connection broke before the answer")
        return True

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        await self._request()
        answer = [key in self.server.values for key in keys]
        if self.server.weather.strikes("lie"):
            return [not there for there in answer]
        return answer

    async def _delete(self, key: ChunkKey) -> bool:
        await self._request()
        return self.server.values.pop(key, None) is not None

    async def _request(self) -> None:
        weather = self.server.weather
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await weather.moment()
        except TimeoutError:
            raise TierUnavailable(f"no answer within {self.settings.timeout_s:.1f} s") from None
        if weather.strikes("refused"):
            raise OSError(errno.ECONNREFUSED, "connection refused")
