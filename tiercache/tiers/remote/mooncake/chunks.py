"""How a chunk lies in the store, and the calls that move it. All of it blocks, with the GIL released: in threads.

A value is the payload without padding and behind it the 88 bytes of the chunk's header (in front of it they would move
the payload out of step with cache lines): two runs of memory in, two runs out, both moved by Mooncake itself. Readers see
a value once all of it has arrived. Mooncake's multi-buffer reads want to know the exact length, so each read asks the master
for it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.mooncake.client import MooncakeClient, ReadGuard
from tiercache.tiers.remote.mooncake.codes import ALREADY_THERE, failure, is_miss
from tiercache.tiers.remote.mooncake.wired import WiredMemory

Pack = Callable[[ChunkKey, np.ndarray], bytes]
Verify = Callable[[ChunkKey, Any, np.ndarray, int], int]


class MooncakeChunks:
    """`pack` and `verify` are `RemoteTier.packed_header` and `RemoteTier.verified`."""

    def __init__(self, client: MooncakeClient, memory: WiredMemory, prefix: str, pack: Pack, verify: Verify) -> None:
        self._client = client
        self._memory = memory
        self._prefix = f"{prefix}:" if prefix else ""
        self._pack = pack
        self._verify = verify

    def name(self, key: ChunkKey) -> str:
        return self._prefix + key.hex()

    def get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """Bytes behind the payload are left alone. Raises CorruptChunk, TierUnavailable."""
        name = self.name(key)
        with self._client.use() as session:
            size = session.store.get_size(name)
        if is_miss(size):
            return None
        if size < 0:
            raise failure(self._client.name, f"the length of {name}", size)
        payload_bytes = size - PACKED_BYTES
        if 0 < payload_bytes <= into.nbytes:
            return self._get_payload(key, into[:payload_bytes])
        # Not what it should be; whose it is decides whether it may be removed.
        return self._get_header_only(key, into[:0], payload_bytes)

    def _get_payload(self, key: ChunkKey, target: np.ndarray) -> int | None:
        name, expected = self.name(key), target.nbytes + PACKED_BYTES
        # The guard is the innermost: while it waits, nobody else gets this memory.
        with (
            self._memory.header() as (header, header_address),
            self._memory.reachable(target) as place,
            self._client.reading() as guard,
        ):
            addresses, sizes = [int(place.ctypes.data), header_address], [target.nbytes, PACKED_BYTES]
            code = guard.session.store.batch_get_into_multi_buffers([name], [addresses], [sizes])[0]
            if not self._arrived(guard, name, code, expected):
                return None
            length = self._verify(key, bytes(header), place, target.nbytes)
            if place is not target:
                np.copyto(target, place)
            return length

    def _get_header_only(self, key: ChunkKey, nothing: np.ndarray, payload_bytes: int) -> int | None:
        name = self.name(key)
        if payload_bytes < 0:
            raise NotOurs(f"{self._client.name}: {name} is shorter than any chunk")
        with self._memory.header() as (header, header_address), self._client.reading() as guard:
            ranges = ([[[0]]], [[[payload_bytes]]], [[[PACKED_BYTES]]])
            code = guard.session.store.get_into_ranges([header_address], [[name]], *ranges)[0][0][0]
            if not self._arrived(guard, name, code, PACKED_BYTES):
                return None
            return self._verify(key, bytes(header), nothing, payload_bytes)

    def put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Raises TierFull, TierUnavailable.

        What is there already is not sent, unless it has another length: then it is not the chunk, for a key has one length,
        and goes. (Mooncake itself says of both that they were stored.)
        """
        name = self.name(key)
        with self._client.use() as session:
            size = session.store.get_size(name)
            if size == payload.nbytes + PACKED_BYTES:
                return True
            if size >= 0:
                session.store.remove(name, True)
        packed = self._pack(key, payload)
        with (
            self._memory.header() as (header, header_address),
            self._memory.reachable(payload) as place,
            self._client.use() as session,
        ):
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            if place is not payload:
                np.copyto(place, payload)
            addresses, sizes = [int(place.ctypes.data), header_address], [payload.nbytes, PACKED_BYTES]

            code = session.store.batch_put_from_multi_buffers([name], [addresses], [sizes], session.write_config)[0]
        if code not in (0, ALREADY_THERE):
            raise failure(self._client.name, f"writing {name}", code)
        return True

    def exist(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One request to the master."""
        with self._client.use() as session:
            codes = session.store.batch_is_exist([self.name(key) for key in keys])
        for code in codes:
            if code < 0 and not is_miss(code):
                raise failure(self._client.name, "asking what is there", code)
        return [code == 1 for code in codes]

    def remove(self, key: ChunkKey) -> bool:
        """At once, also while the master's lease for a read lasts (10 s): every reader of ours verifies what it got."""
        with self._client.use() as session:
            code = session.store.remove(self.name(key), True)
        if code < 0 and not is_miss(code):
            raise failure(self._client.name, f"removing {self.name(key)}", code)
        return bool(code >= 0)

    def _arrived(self, guard: ReadGuard, name: str, code: int, expected_bytes: int) -> bool:
        """Whether all bytes came; False when the value is gone. Raises TierUnavailable."""
        if code != expected_bytes:
            guard.failed()
        if is_miss(code):
            return False
        if code != expected_bytes:
            raise failure(self._client.name, f"reading {name}", code)
        return True
