"""The Redis tier: chunks on Redis or Valkey, standalone, watched by Sentinels, or as a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierFull, TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import NotOurs, RemoteSettings, RemoteTier
from tiercache.tiers.remote.redis.address import read_address
from tiercache.tiers.remote.redis.connection import (
    ConnectionLost,
    RedisConnection,
    ServerError,
    command,
    get_value,
    set_value,
)
from tiercache.tiers.remote.redis.servers import ConnectionPool, Servers, SettingRejected

logger = logging.getLogger("tiercache.redis")

T = TypeVar("T")

_CONTROL_THREADS = 2


class RedisTier(RemoteTier):
    """Stores each chunk as one string under `prefix:<key in hex>`: the 88 bytes of the header, then the payload.

    `settings.concurrency` threads read and as many write, each with its own connection; two more threads check
    existence and remove. A write replaces any existing value, so repeating a write does no harm.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self.compression = settings.make_compression()
        self.address = read_address(settings)
        self._servers = Servers(ConnectionPool(self.address, settings))
        ttl_s = settings.options.get("ttl_s")
        self._set_options = [] if ttl_s is None else [b"PX", b"%d" % max(1, round(ttl_s * 1000))]
        self._readers = Workers(f"{self.name}-read", settings.concurrency)
        self._writers = Workers(f"{self.name}-write", settings.concurrency)
        self._control = Workers(f"{self.name}-control", _CONTROL_THREADS)

    def describe(self) -> str:
        return f"{self.name} ({self.address}{', TLS' if self.address.tls else ''})"

    async def _connect(self) -> None:
        """Check the settings. An unreachable server does not stop the start: operations fail until it is reachable."""
        try:
            await self._control.submit(self._servers.check, self.value_name(bytes(24)).encode())
        except SettingRejected as error:
            raise self.settings.error(error.option, error.problem) from None
        except (ConnectionLost, ServerError) as error:
            tls = "has no TLS, use redis://" if self.address.tls else "wants TLS, use rediss://"
            logger.warning("%s: not there yet: %s; if the server %s", self.name, error, tls)

    async def _disconnect(self) -> None:
        for workers in (self._readers, self._writers, self._control):
            workers.close()
        self._servers.pool.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._in_thread(self._readers, self._get_blocking, key, into)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        await self._in_thread(self._writers, self._put_blocking, key, payload)
        return True

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._in_thread(self._control, self._servers.exist, [self.value_name(key).encode() for key in keys])

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._in_thread(self._control, self._delete_blocking, key)

    def _get_blocking(self, key: ChunkKey, into: np.ndarray) -> int | None:
        name = self.value_name(key).encode()
        view = into.data

        def exchange(connection: RedisConnection) -> tuple[bytes | None, int]:
            try:
                return get_value(connection, name, view, PACKED_BYTES)
            except ServerError as error:
                if error.code == "WRONGTYPE":
                    raise NotOurs(f"{self.name}: the value of {key.hex()} is not a string") from None
                raise

        began_s = time.monotonic()
        header, length = self._servers.run(name, exchange)
        if header is None:
            return None
        self.compression.received(length, time.monotonic() - began_s)
        return self.verified(key, header, into, length)

    def _put_blocking(self, key: ChunkKey, payload: np.ndarray) -> None:
        name = self.value_name(key).encode()
        with self.pack(key, payload) as stored:
            header, view = stored.header.pack(), stored.payload.data
            began_s = time.monotonic()
            self._servers.run(name, lambda connection: set_value(connection, name, header, view, self._set_options))
            self.compression.sent(len(view), time.monotonic() - began_s)

    def _delete_blocking(self, key: ChunkKey) -> bool:
        name = self.value_name(key).encode()

        def exchange(connection: RedisConnection) -> bool:
            connection.request(command(b"UNLINK", name))
            return connection.reply() == 1

        return self._servers.run(name, exchange)

    async def _in_thread(self, workers: Workers, call: Callable[..., T], *arguments: object) -> T:
        self._check_open()
        try:
            return await workers.submit(call, *arguments)
        except (ConnectionLost, SettingRejected) as error:
            raise TierUnavailable(f"{self.name}: {error}") from error
        except ServerError as error:
            if error.code == "OOM":
                raise TierFull(f"{self.name}: the server has reached its maxmemory and evicts nothing") from error
            raise TierUnavailable(f"{self.name}: {error}") from error
