"""The Mooncake tier: chunks in the memory that other processes give to a Mooncake Store, over TCP or RDMA."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier
from tiercache.tiers.remote.mooncake.address import MooncakeAddress, read_address
from tiercache.tiers.remote.mooncake.chunks import MooncakeChunks
from tiercache.tiers.remote.mooncake.client import MooncakeClient, import_mooncake
from tiercache.tiers.remote.mooncake.codes import MasterLost
from tiercache.tiers.remote.mooncake.wired import WiredMemory

logger = logging.getLogger("tiercache.mooncake")

T = TypeVar("T")

_CONTROL_THREADS = 2
_UNANSWERED = 8
_LEAVE_S = 3.0


class MooncakeTier(RemoteTier):
    """See `chunks` for what is stored, `client` for who talks to the store.

    `settings.concurrency` threads read and as many write, straight from and into the arena, which is registered with
    Mooncake; two more ask what is there and remove. A master that is frozen keeps a thread, and the memory that it works
    on, for as long as Mooncake's `MC_RPC_TIMEOUT_MS` says (30 s); nobody waits for an answer about existence for longer
    than `timeout_s`.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self._arena: Arena | None = None
        self._address: MooncakeAddress | None = None
        self._client: MooncakeClient | None = None
        self._readers = Workers(f"{self.name}-read", settings.concurrency)
        self._writers = Workers(f"{self.name}-write", settings.concurrency)
        self._control = Workers(f"{self.name}-control", _CONTROL_THREADS)
        self._last = Workers(f"{self.name}-close", 1)

    def use_arena(self, arena: Arena) -> None:
        self._arena = arena

    def describe(self) -> str:
        return f"{self.name} ({self._address.shown_master}, {self._address.protocol})" if self._address else self.name

    async def _connect(self) -> None:
        """A master that is not there is no reason not to start: operations fail until it is."""
        settings = self.settings
        self._address = await self._control.submit(read_address, settings)
        try:
            await self._control.submit(import_mooncake)
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs Mooncake, which cannot be imported ({error}): pip install "
                "'tiercache[mooncake]', and the system's libibverbs1, also without RDMA"
            ) from error
        self._memory = WiredMemory(
            None if self._arena is None else self._arena.memory,
            settings.chunk_bytes,
            cells=2 * settings.concurrency,
            wait_s=settings.timeout_s,
        )
        self._client = MooncakeClient(self.name, self._address, self._memory)
        prefix = str(settings.options.get("prefix") or "")
        self._chunks = MooncakeChunks(self._client, self._memory, prefix, self.packed_header, self.verified)
        self._client.start()
        problem = await self._control.submit(self._client.wait_for_first_try, settings.timeout_s)
        if problem is not None:
            logger.warning("%s: starting without it: %s", self.name, problem)

    async def _disconnect(self) -> None:
        """What still runs keeps the client, and the arena's pages, until it ends."""
        for workers in (self._readers, self._writers, self._control):
            workers.close()
        if self._client is not None:
            await asyncio.wait([self._last.submit(self._client.leave)], timeout=_LEAVE_S)
        self._last.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._in_thread(self._readers.submit(self._chunks.get, key, into))

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return await self._in_thread(self._writers.submit(self._chunks.put, key, payload))

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._ask(self._chunks.exist, keys)

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._ask(self._chunks.remove, key)

    async def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """A question without a payload is left alone when it takes too long; a few of them at a time."""
        if self._control.unfinished >= _UNANSWERED + _CONTROL_THREADS:
            raise TierUnavailable(f"{self.name}: the master answers none of {self._control.unfinished} questions")
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await self._in_thread(self._control.submit(call, *arguments))
        except TimeoutError:
            self.known.clear()
            raise TierUnavailable(f"{self.name}: the master does not answer in {self.settings.timeout_s:g} s") from None

    async def _in_thread(self, work: asyncio.Future[T]) -> T:
        try:
            return await work
        except MasterLost:
            self.known.clear()
            raise
