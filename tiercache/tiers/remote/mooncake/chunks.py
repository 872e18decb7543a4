"""How a chunk lies in the store, and the calls that move it. All of it blocks, with the GIL released: in threads.

A value is the 88 bytes of the chunk's header and then the payload without padding: two runs of memory in, two runs out,
both moved by Mooncake itself. A value can be seen by readers once all of it has arrived. Mooncake's multi-buffer reads want
to know the exact length, so each read asks the master for it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.tiers.remote.mooncake.client import Client
from tiercache.tiers.remote.mooncake.codes import ALREADY_THERE, failure, is_miss
from tiercache.tiers.remote.mooncake.wired import WiredMemory

Pack = Callable[[ChunkKey, np.ndarray], bytes]
Verify = Callable[[ChunkKey, Any, np.ndarray, int], int]


class Chunks:
    """`pack` and `verify` are `RemoteTier.packed_header` and `RemoteTier.verified`."""

    def __init__(self, client: Client, memory: WiredMemory, prefix: str, pack: Pack, verify: Verify) -> None:
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
        with self._client.use() as store:
            size = store.get_size(name)
            if is_miss(size):
                return None
            if size < 0:
                raise failure(self._client.name, f"the length of {name}", size)
            payload_bytes = size - PACKED_BYTES
            with self._memory.header() as (header, header_address):
                if payload_bytes < 0:
                    return self._verify(key, b"", into, 0)
                if payload_bytes == 0 or payload_bytes > into.nbytes:
                    # Not what it should be; whose it is decides whether it may be removed.
                    ranges = ([[[0]]], [[[0]]], [[[PACKED_BYTES]]])
                    code = store.get_into_ranges([header_address], [[name]], *ranges)[0][0][0]
                    if not self._arrived(name, code, PACKED_BYTES):
                        return None
                    return self._verify(key, bytes(header), into[:0], payload_bytes)
                target = into[:payload_bytes]
                with self._memory.reachable(target) as place:
                    addresses, sizes = [header_address, int(place.ctypes.data)], [PACKED_BYTES, payload_bytes]
                    code = store.batch_get_into_multi_buffers([name], [addresses], [sizes])[0]
                    if not self._arrived(name, code, size):
                        return None
                    length = self._verify(key, bytes(header), place, payload_bytes)
                    if place is not target:
                        np.copyto(target, place)
                    return length

    def put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Raises TierFull, TierUnavailable."""
        packed = self._pack(key, payload)
        name = self.name(key)
        with (
            self._client.use() as store,
            self._memory.header() as (header, header_address),
            self._memory.reachable(payload) as place,
        ):
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            if place is not payload:
                np.copyto(place, payload)
            addresses, sizes = [header_address, int(place.ctypes.data)], [PACKED_BYTES, payload.nbytes]
            code = store.batch_put_from_multi_buffers([name], [addresses], [sizes], self._client.write_config)[0]
        if code not in (0, ALREADY_THERE):
            raise failure(self._client.name, f"writing {name}", code)
        return True

    def exist(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """One request to the master."""
        with self._client.use() as store:
            codes = store.batch_is_exist([self.name(key) for key in keys])
        for code in codes:
            if code < 0 and not is_miss(code):
                raise failure(self._client.name, "asking what is there", code)
        return [code == 1 for code in codes]

    def remove(self, key: ChunkKey) -> bool:
        """At once, also while the master's lease for a read lasts (10 s): every reader of ours verifies what it got."""
        with self._client.use() as store:
            code = store.remove(self.name(key), True)
        if code < 0 and not is_miss(code):
            raise failure(self._client.name, f"removing {self.name(key)}", code)
        return bool(code >= 0)

    def _arrived(self, name: str, code: int, expected_bytes: int) -> bool:
        """Whether all bytes came; False when the value is gone. Raises TierUnavailable."""
        if is_miss(code):
            return False
        if code != expected_bytes:
            raise failure(self._client.name, f"reading {name}", code)
        return True
