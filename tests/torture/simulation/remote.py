"""A remote store in memory, behind the class that all remote tiers are of."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tests.torture.simulation.weather import Weather
from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.tiers.remote.base import NotOurs, RemoteSettings, RemoteTier

SERVERS: dict[str, Server] = {}
"""By URL. A run puts its servers here, and takes them out again."""


class Server:
    """What it holds, as bytes; `capacity` values, of which the oldest goes for a new one, or none does."""

    def __init__(self, weather: Weather, capacity: int, *, evicts: bool) -> None:
        self.weather = weather
        self.capacity = capacity
        self.evicts = evicts
        self.evicted_s: dict[ChunkKey, float] = {}
        """When each went last without having been forgotten."""
        self.lost: Counter[ChunkKey] = Counter()
        """How often each went, in whatever way."""
        self.lied_s = float("-inf")
        """When it last said that it has what it lacks, or the other way round."""
        self.bad_answers: Counter[ChunkKey] = Counter()
        """How many of the last reads of each, one after the other, got something else than what is there."""
        self.on_delete: Callable[[ChunkKey, bytes, int], None] = lambda key, value, bad_answers: None
        """Called before a value is deleted on request."""
        self.values: dict[ChunkKey, bytes] = {}
        self._torn: set[ChunkKey] = set()
        """Keys of values that are cut. A put that sees a whole header there takes its chunk for stored."""

    def store(self, key: ChunkKey, value: bytes, *, torn: bool = False) -> None:
        """In the place of whatever is there."""
        (self._torn.add if torn else self._torn.discard)(key)
        if key not in self.values and len(self.values) >= self.capacity:
            if not self.evicts:
                raise TierFull("the server is full")
            oldest = next(iter(self.values))
            del self.values[oldest]
            self.evicted_s[oldest] = self.weather.world.now_s
            self.lost[oldest] += 1
        self.values[key] = value

    def answer(self, key: ChunkKey) -> bytes | None:
        """What a read gets: the value, or what became of it on the way."""
        value = sent = self.values.get(key)
        if value is None or sent is None:
            return None
        if value and self.weather.strikes("flip"):
            place = self.weather.below(len(value))
            sent = value[:place] + bytes([value[place] ^ 1 << self.weather.below(8)]) + value[place + 1 :]
        if self.weather.strikes("partial"):
            sent = self.beginning(sent)
        self.bad_answers[key] = self.bad_answers[key] + 1 if sent != value else 0
        return sent

    def beginning(self, value: bytes) -> bytes:
        """A part of it, every other time not even the first word."""
        return value[: self.weather.below(len(value) if self.weather.below(2) else 8)]

    def delete(self, key: ChunkKey) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        self.on_delete(key, value, self.bad_answers[key])
        if self.bad_answers[key] or key in self._torn:
            self.evicted_s[key] = self.weather.world.now_s  # a reader believes that it is bad
        del self.values[key]
        self.lost[key] += 1
        return True


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
        value = self.server.answer(key)
        if value is None:
            return None
        length = max(0, len(value) - PACKED_BYTES)
        middle = length // 2
        payload = np.frombuffer(value, np.uint8)[PACKED_BYTES:]
        into[:middle] = payload[:middle]
        await self.server.weather.moment()
        into[middle:length] = payload[middle:]
        return self.verified(key, value[:PACKED_BYTES], into, length)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        header = self.packed_header(key, payload)
        await self._request()
        there = self._what_is_there(key)
        if there is not None:
            return there
        middle = payload.nbytes // 2
        value = header + payload[:middle].tobytes()
        await self.server.weather.moment()
        value += payload[middle:].tobytes()
        if self.server.weather.strikes("torn"):
            self.server.store(key, self.server.beginning(value), torn=True)
            raise TierUnavailable("the server died in the middle of a value")
        self.server.store(key, value)
        if self.server.weather.strikes("lost-answer"):
            raise TierUnavailable("the connection broke before the answer")
        return True

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        await self._request()
        answer = [key in self.server.values for key in keys]
        if self.server.weather.strikes("lie"):
            self.server.lied_s = self.server.weather.world.now_s
            return [not there for there in answer]
        return answer

    async def _delete(self, key: ChunkKey) -> bool:
        await self._request()
        return self.server.delete(key)

    def _what_is_there(self, key: ChunkKey) -> bool | None:
        """What a put answers that finds a value of its name; None where it is to be replaced."""
        value = self.server.values.get(key)
        if value is None:
            return None
        try:
            header = self.verified_header(key, value[:PACKED_BYTES])
        except NotOurs:
            return False
        except CorruptChunk:
            return None
        return True if len(value) == PACKED_BYTES + header.payload_bytes else None

    async def _request(self) -> None:
        weather = self.server.weather
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await weather.moment()
        except TimeoutError:
            raise TierUnavailable(f"no answer within {self.settings.timeout_s:.1f} s") from None
        if weather.strikes("refused"):
            raise OSError(errno.ECONNREFUSED, "connection refused")
