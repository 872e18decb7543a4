"""The Mooncake tier: chunks in the memory that other processes give to a Mooncake Store, over TCP or RDMA.

A value is the payload without padding, and behind it the 88 bytes of the chunk's header; in front of the payload they would
take it off the boundary of a cache line. Mooncake moves both straight from and into the arena, and shows a value to readers
once all of it has arrived. Its multi-buffer reads need the exact length of the value, so each read asks the master for it
first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, TierFull, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import NotOurs, RemoteSettings, RemoteTier
from tiercache.tiers.remote.mooncake_client import MooncakeClient, WiredMemory, import_mooncake
from tiercache.tiers.remote.mooncake_settings import MooncakeAddress, read_address

logger = logging.getLogger("tiercache.mooncake")

T = TypeVar("T")

_CONTROL_THREADS = 2
_UNANSWERED = 8
"""The largest number of questions in the queue behind those that the control threads ask."""
_LEAVE_S = 3.0
_GIVEN_UP_S = 20.0
"""A read that fails after this time may have been given up by Mooncake while bytes still arrive."""

# Return codes of Mooncake: `ErrorCode` in its types.h.
_CODES = {
    -1: "internal error",
    -10: "its local buffer is too small",
    -101: "no segment",
    -103: "the master does not know this client",
    -200: "no room in any segment",
    -600: "invalid parameters",
    -601: "illegal client",
    -703: "the value is not complete",
    -704: "no such value",
    -705: "the value is already there",
    -706: "somebody reads the value",
    -707: "the read took longer than the master's lease",
    -708: "the value is being copied",
    -710: "no such replica",
    -712: "the replica is gone",
    -714: "the replica is busy",
    -800: "the transfer failed",
    -801: "checksum mismatch",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
_ALREADY_THERE = -705
_MISSES = frozenset({-703, -704, -710, -712})
"""The codes of a missing value, which includes a value that is still being written (-703)."""
_FULL = -200
_MASTER_LOST = frozenset({-900, -901})


class MasterLost(TierUnavailable):
    """The master is gone or does not answer, so knowledge of the store's values is void."""


class MooncakeTier(RemoteTier):
    """`settings.concurrency` threads read and as many write; two more ask for existence and remove.

    A frozen master blocks a thread, and the memory that it works on, for as long as Mooncake's `MC_RPC_TIMEOUT_MS` says
    (30 s by default). Callers that ask for existence wait `timeout_s` at most.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        prefix = str(settings.options.get("prefix") or "")
        self._prefix = f"{prefix}:" if prefix else ""
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
        """Start to set up the client. A master that is not there does not stop the start: operations fail until it is."""
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
        self._client.start()
        problem = await self._control.submit(self._client.wait_for_first_try, settings.timeout_s)
        if problem is not None:
            logger.warning("%s: starting without it: %s", self.name, problem)

    async def _disconnect(self) -> None:
        """Leave the store. Operations that still run keep the client, and the arena's pages, until they end."""
        for workers in (self._readers, self._writers, self._control):
            workers.close()
        if self._client is not None:
            await asyncio.wait([self._last.submit(self._client.leave)], timeout=_LEAVE_S)
        self._last.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._in_thread(self._readers.submit(self._get_blocking, self._open_client, key, into))

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return await self._in_thread(self._writers.submit(self._put_blocking, self._open_client, key, payload))

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._ask(self._exist_blocking, self._open_client, keys)

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._ask(self._delete_blocking, self._open_client, key)

    async def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a request without a payload in a control thread, and abandon it after `timeout_s`."""
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

    @property
    def _open_client(self) -> MooncakeClient:
        if self._client is None:
            raise TierUnavailable(f"{self.name} is closed")
        return self._client

    # In threads. Mooncake's calls block, with the GIL released.

    def _get_blocking(self, client: MooncakeClient, key: ChunkKey, into: np.ndarray) -> int | None:
        """Leaves bytes behind the payload alone. Raises CorruptChunk, TierUnavailable."""
        name = self._name(key)
        with client.use() as session:
            size = session.store.get_size(name)
        if size in _MISSES:
            return None
        if size < 0:
            raise self._failure(f"the length of {name}", size)
        payload_bytes = size - PACKED_BYTES
        if payload_bytes < 0:
            raise NotOurs(f"{self.name}: {name} is shorter than any chunk")
        if not 0 < payload_bytes <= into.nbytes:
            return self._get_misfit(client, key, into[:0], payload_bytes)
        target = into[:payload_bytes]
        with self._memory.header() as (header, header_address), self._memory.reachable(target) as place:
            addresses, sizes = [int(place.ctypes.data), header_address], [payload_bytes, PACKED_BYTES]

            def fetch(store: Any) -> int:
                return int(store.batch_get_into_multi_buffers([name], [addresses], [sizes])[0])

            if not self._read(client, name, size, fetch):
                return None
            length = self.verified(key, bytes(header), place, payload_bytes)
            if place is not target:
                np.copyto(target, place)
            return length

    def _get_misfit(self, client: MooncakeClient, key: ChunkKey, nothing: np.ndarray, payload_bytes: int) -> int | None:
        """Read only the header of a value of an impossible length, to raise CorruptChunk or NotOurs."""
        name = self._name(key)
        with self._memory.header() as (header, header_address):

            def fetch(store: Any) -> int:
                ranges = ([[[0]]], [[[payload_bytes]]], [[[PACKED_BYTES]]])
                return int(store.get_into_ranges([header_address], [[name]], *ranges)[0][0][0])

            if not self._read(client, name, PACKED_BYTES, fetch):
                return None
            return self.verified(key, bytes(header), nothing, payload_bytes)

    def _read(self, client: MooncakeClient, name: str, expected_bytes: int, fetch: Callable[[Any], int]) -> bool:
        """Return True if all bytes came, False if the value is gone. Raises TierUnavailable.

        Mooncake gives a transfer up after 60 s, and bytes may arrive after that. So if a failed read took long, this waits
        until the store was left, which ends all transfers. The caller keeps its memory until then.
        """
        began_s = time.monotonic()
        with client.use() as session:
            code = fetch(session.store)
            given_up = code != expected_bytes and time.monotonic() - began_s >= _GIVEN_UP_S
            if given_up:
                client.retire(session, "a read was given up: a new client is being set up")
        if given_up:
            session.left.wait()
        if code not in _MISSES and code != expected_bytes:
            raise self._failure(f"reading {name}", code)
        return code == expected_bytes

    def _put_blocking(self, client: MooncakeClient, key: ChunkKey, payload: np.ndarray) -> bool:
        """Raises TierFull, TierUnavailable.

        Replaces a value of another length, which cannot be the chunk, since the chunk of a key has one length. Mooncake
        reports an existing value as stored, whatever its length.
        """
        name = self._name(key)
        with client.use() as session:
            size = session.store.get_size(name)
            if size == payload.nbytes + PACKED_BYTES:
                return True
            if size >= 0:
                session.store.remove(name, True)
        packed = self.packed_header(key, payload)
        with (
            self._memory.header() as (header, header_address),
            self._memory.reachable(payload) as place,
            client.use() as session,
        ):
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            if place is not payload:
                np.copyto(place, payload)
            addresses, sizes = [int(place.ctypes.data), header_address], [payload.nbytes, PACKED_BYTES]
            code = session.store.batch_put_from_multi_buffers([name], [addresses], [sizes], session.write_config)[0]
        if code not in (0, _ALREADY_THERE):
            raise self._failure(f"writing {name}", code)
        return True

    def _exist_blocking(self, client: MooncakeClient, keys: Sequence[ChunkKey]) -> list[bool]:
        with client.use() as session:
            codes = session.store.batch_is_exist([self._name(key) for key in keys])
        for code in codes:
            if code < 0 and code not in _MISSES:
                raise self._failure("asking what is there", code)
        return [code == 1 for code in codes]

    def _delete_blocking(self, client: MooncakeClient, key: ChunkKey) -> bool:
        """Removes the value even while the master's lease for a read lasts (10 s): readers verify what they get."""
        with client.use() as session:
            code = session.store.remove(self._name(key), True)
        if code < 0 and code not in _MISSES:
            raise self._failure(f"removing {self._name(key)}", code)
        return bool(code >= 0)

    def _name(self, key: ChunkKey) -> str:
        return self._prefix + key.hex()

    def _failure(self, what: str, code: int) -> TierFull | TierUnavailable:
        """Return the error for a code that is neither success nor a miss."""
        meaning = f"{self.name}: {what}: Mooncake says {code} ({_CODES.get(code, 'see ErrorCode in its types.h')})"
        if code == _FULL:
            return TierFull(meaning)
        return MasterLost(meaning) if code in _MASTER_LOST else TierUnavailable(meaning)
