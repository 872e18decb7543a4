"""The Redis tier: chunks on Redis or Valkey, alone, watched by Sentinels, or as a cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier
from tiercache.tiers.remote.redis.address import read_address
from tiercache.tiers.remote.redis.chunks import RedisChunks
from tiercache.tiers.remote.redis.connector import Connector
from tiercache.tiers.remote.redis.failures import BrokenConnection, Refused, ServerError
from tiercache.tiers.remote.redis.first_look import look_at
from tiercache.tiers.remote.redis.servers import Servers
from tiercache.tiers.remote.redis.topology import make_topology

logger = logging.getLogger("tiercache.redis")

T = TypeVar("T")

_CONTROL_THREADS = 2
_END_S = 1.0
_AGAIN_S = 0.01


class RedisTier(RemoteTier):
    """See `layout` for what is stored, `chunks` for how.

    `settings.concurrency` threads read and as many write, each on a connection of its own; two more ask what is there and
    remove. Redis 6.2 or newer, or Valkey.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self.compression = settings.make_compression()
        self.address = read_address(settings)
        self._connector = Connector(self.address, settings)
        self._servers = Servers(self.name, self._connector, make_topology(self._connector))
        self._chunks = RedisChunks(self, self._servers)
        self._readers = Workers(f"{self.name}-read", settings.concurrency)
        self._writers = Workers(f"{self.name}-write", settings.concurrency)
        self._control = Workers(f"{self.name}-control", _CONTROL_THREADS)
        self._losses_seen = 0

    def describe(self) -> str:
        return f"{self.name} ({self.address}{', TLS' if self.address.tls else ''})"

    @property
    def open_connections(self) -> int:
        return self._servers.pool.open_connections

    async def _connect(self) -> None:
        """A server that is not there is no reason not to start: operations fail until it is."""
        prefix = str(self.settings.options.get("prefix") or "")
        try:
            await self._control.submit(look_at, self._servers, self._connector, prefix)
        except Refused as error:
            raise self.settings.error(error.option, error.problem) from None
        except (BrokenConnection, ServerError) as error:
            logger.warning("%s: not there yet: %s", self.name, error)

    async def _disconnect(self) -> None:
        # First the threads are told to end, then those that wait for a server are woken; also who is just about to wait.
        threads = (self._readers, self._writers, self._control)
        for workers in threads:
            workers.close()
        self._servers.close()
        until_s = time.monotonic() + _END_S
        while any(workers.unfinished for workers in threads) and time.monotonic() < until_s:
            await asyncio.sleep(_AGAIN_S)
            self._servers.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._in_thread(self._readers, self._chunks.get, key, into)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return await self._in_thread(self._writers, self._chunks.put, key, payload)

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._in_thread(self._control, self._chunks.exist, keys)

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._in_thread(self._control, self._chunks.remove, key)

    async def _in_thread(self, workers: Workers, call: Callable[..., T], *arguments: object) -> T:
        self._check_open()
        try:
            return await workers.submit(call, *arguments)
        finally:
            # Before the base class learns of the outcome: what was known of a server that was lost since is worth nothing.
            if self._losses_seen != self._servers.pool.losses:
                self._losses_seen = self._servers.pool.losses
                self.known.clear()
