"""The S3 tier: an object a chunk, the 88 bytes of its header before the payload, in any store that speaks S3.

- *get* is one request for a chunk of up to twice `part_bytes`, and several ranges at once for a larger one; each lands in
  the slot as it arrives, copied by a worker thread: the client (obstore) has no call that reads into memory of ours. How
  long an object is need not be known: all ranges of the largest chunk are asked for, and what is not there is not there.
- *put* is one request, sent from the slot without a copy, and conditional: whoever is second with a chunk is told so. What
  is there then is looked at, for it may be damaged or torn (replaced) or not ours (left alone).
- *look-ups* are a HEAD a key, many at once. A listing would be fewer requests only where the whole layout has
  fewer chunks than a prompt asks for, as keys are hashes and their order says nothing; and it costs twelve times as much.
- *names* are `<prefix>/<fingerprint>/<2 hex>/<key>`: they spread over the store's partitions.

Nothing here evicts: a bucket has no cap. Its life-cycle rules may expire objects at any time, which is a miss.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercache.core.header import MAGIC, PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk, TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier
from tiercache.tiers.remote.s3.address import read_address
from tiercache.tiers.remote.s3.client import RequestFailed, S3Client

logger = logging.getLogger("tiercache.s3")

PART_BYTES = 4 << 20
_REQUESTS = 32
"""In flight at a time, each with up to two parts of the client's memory; as many look-ups beside them."""
_COPYING_THREADS = 2
_CLOSE_S = 1.0


class S3Tier(RemoteTier):
    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self.compression = settings.make_compression()
        self.address = read_address(settings)
        self.conditional = True
        """Whether the store can put an object only where there is none; assumed until it says no."""
        self._part_bytes = int(settings.options.get("part_bytes", PART_BYTES))
        self._directory = "/".join(filter(None, (self.address.prefix, settings.fingerprint.hex())))
        self._workers = Workers(settings.name, max(_COPYING_THREADS, min(4, settings.concurrency)))
        self._client: S3Client | None = None

    def describe(self) -> str:
        return f"{self.name} ({self.address})"

    def path(self, key: ChunkKey) -> str:
        """The object's name in the bucket."""
        return f"{self._directory}/{key.hex()[:2]}/{key.hex()}"

    @property
    def client(self) -> S3Client:
        if self._client is None:
            raise TierUnavailable(f"{self.name} is closed")
        return self._client

    async def _connect(self) -> None:
        """A store that does not answer is no reason not to start; one that says no is."""
        self._client = await self._workers.submit(S3Client, self.settings, self.address, self._part_bytes, _REQUESTS)
        try:
            await self.client.get(f"{self._directory}/none", 0, 1)
        except RequestFailed as error:
            problem = error.problem
            if problem.out_of_range:
                return
            if problem.option:
                raise self.settings.error(
                    problem.option, f"{self.address} with credentials of {self.client.identity.source}: {problem.words}"
                ) from None
            logger.warning("%s; the tier is used as soon as it answers", error)

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close(_CLOSE_S)
        self._workers.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        largest_bytes = min(into.nbytes, self.settings.chunk_bytes or into.nbytes)
        # One byte more than the largest chunk has: what is longer is then seen to be.
        total_bytes = PACKED_BYTES + largest_bytes + 1
        count = max(1, total_bytes // self._part_bytes)
        step = -(-total_bytes // count)
        landing = _Landing(into)
        began_s = time.monotonic()
        done = await asyncio.gather(
            *(
                self._fetch(key, start, min(start + step, total_bytes), landing)
                for start in range(0, total_bytes, step)
            ),
            return_exceptions=True,
        )
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        if None in done:
            return None
        lengths = [length for length in done if isinstance(length, int)]
        self.compression.received(sum(lengths), time.monotonic() - began_s)
        return await self._workers.submit(self._check, key, landing, lengths, step)

    async def _fetch(self, key: ChunkKey, start: int, end: int, landing: _Landing) -> int | None:
        """How many of these bytes the object has; they have landed."""
        try:
            part = await self.client.get(self.path(key), start, end)
        except RequestFailed as error:
            if error.problem.out_of_range:
                return 0
            raise
        if part is None:
            return None
        # In a list, for the thread to take out: a large buffer is given back there and not on the loop.
        box = [part]
        del part
        return await self._workers.submit(landing.land, box, start)

    def _check(self, key: ChunkKey, landing: _Landing, lengths: Sequence[int], step: int) -> int:
        """In a thread."""
        got_bytes = sum(lengths)
        if any(length != step for length in lengths[: -(-got_bytes // step) - 1]):
            raise CorruptChunk(f"{self.name}: {key.hex()}: the object changed while it was read")
        return self.verified(key, landing.header[:got_bytes], landing.into, max(0, got_bytes - PACKED_BYTES))

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        with await self._workers.submit(self.pack, key, payload) as stored:
            began_s = time.monotonic()
            is_there = await self._put_body(key, [stored.header.pack(), stored.payload.data])
            if is_there:
                self.compression.sent(stored.header.payload_bytes, time.monotonic() - began_s)
            return is_there

    async def _put_body(self, key: ChunkKey, body: list[Any]) -> bool:
        """The header and the payload behind it."""
        if self.conditional:
            try:
                return await self.client.put(self.path(key), body, create=True) or await self._replace(key, body)
            except RequestFailed as error:
                if not error.problem.not_implemented:
                    raise
                self.conditional = False
                logger.warning(
                    "%s: the store has no conditional puts: each chunk costs one look-up more, and two instances that store "
                    "the same chunk at the same time both send it",
                    self.name,
                )
        if await self.client.exists(self.path(key)):
            return await self._replace(key, body)
        return await self.client.put(self.path(key), body, create=False)

    async def _replace(self, key: ChunkKey, body: list[Any]) -> bool:
        """There is an object of this name: whole and ours (fine), ours and damaged (replaced), or somebody else's."""
        try:
            found = await self.client.get_head(self.path(key), PACKED_BYTES)
        except RequestFailed as error:
            if not error.problem.out_of_range:
                raise
            found = b"", 0
        if found is None:
            return False  # deleted this moment; the chunk comes again
        raw_header, length_bytes = found
        if not MAGIC.startswith(raw_header[: len(MAGIC)]):
            logger.warning("%s: the object %s is not ours; it is left alone", self.name, self.path(key))
            return False
        try:
            header = Header.check(raw_header, key, self.fingerprint)
            whole = length_bytes == PACKED_BYTES + header.payload_bytes
        except HeaderError:
            whole = False
        return whole or await self.client.put(self.path(key), body, create=False)

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        there = [False] * len(keys)
        left = iter(range(len(keys)))

        async def lane() -> None:
            for position in left:
                there[position] = await self.client.exists(self.path(keys[position]))

        # The first failure ends them all: a store that does not answer must not be waited for once a key.
        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(_REQUESTS, len(keys))):
                    lanes.create_task(lane())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return there

    async def _delete(self, key: ChunkKey) -> bool:
        path = self.path(key)
        if not await self.client.exists(path):
            return False
        await self.client.delete(path)
        return True


class _Landing:
    """Where the parts of an object go: its header, and the slot for the payload."""

    def __init__(self, into: np.ndarray) -> None:
        self.into = into
        self.header = bytearray(PACKED_BYTES)

    def land(self, box: list[Any], start: int) -> int:
        """Copy the buffer in `box`, which begins at byte `start` of the object. In a thread; returns its length."""
        part = np.frombuffer(box.pop(), dtype=np.uint8)
        if start < PACKED_BYTES:
            head = part[: PACKED_BYTES - start]
            self.header[start : start + head.nbytes] = head.tobytes()
        skipped = max(0, PACKED_BYTES - start)
        payload = part[skipped:]
        at = start + skipped - PACKED_BYTES
        target = self.into[at : at + payload.nbytes]
        np.copyto(target, payload[: target.nbytes])
        return part.nbytes
