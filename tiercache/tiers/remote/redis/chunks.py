"""Whole chunks on servers: read, written, removed, in as few round trips as `layout` needs. Blocks; for worker threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from tiercache.core.header import PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.tiers.remote.base import RemoteTier
from tiercache.tiers.remote.redis.channel import Channel
from tiercache.tiers.remote.redis.exchanges import (
    Missing,
    expire,
    fetch,
    get_head,
    keep,
    look,
    publish,
    send,
    set_head,
    take_away,
    unlink,
)
from tiercache.tiers.remote.redis.existence import existing
from tiercache.tiers.remote.redis.failures import FOREIGN_TYPE, Scattered, ServerError, failure
from tiercache.tiers.remote.redis.layout import (
    SMALLEST_SEGMENT_BYTES,
    Segment,
    State,
    head_name,
    lies_elsewhere,
    new_manifest,
    segment_names,
    segments_of,
    state_of,
)
from tiercache.tiers.remote.redis.servers import Servers

T = TypeVar("T")

_UNPUBLISHED_S = 60.0
"""How long segments stay that nobody publishes, besides the time that their writer may take."""
_PUBLISHED_S = 24 * 3600.0
"""How long, at least, the segments of a published chunk stay if their writer dies while their slot moves."""
_EXPIRY_GAP_MS = 10_000
"""Segments outlive their head: where chunks expire, that is a miss at once."""
_NO_BYTES = memoryview(b"")


class RedisChunks:
    """`tier` verifies and makes headers; nothing else of it is used."""

    def __init__(self, tier: RemoteTier, servers: Servers) -> None:
        options = tier.settings.options
        self._tier = tier
        self._servers = servers
        self._prefix = str(options.get("prefix") or "")
        self._timeout_s = tier.settings.timeout_s
        self._segment_bytes = max(SMALLEST_SEGMENT_BYTES, int(options.get("segment_bytes") or 2 << 20))
        ttl_s = options.get("ttl_s")
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._segments_ttl_ms = None if self._ttl_ms is None else self._ttl_ms + _EXPIRY_GAP_MS

    def get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        """The payload's length, or None. Raises CorruptChunk (NotOurs), TierUnavailable."""
        name, view = head_name(self._prefix, key), into.data
        foreign: tuple[bytes | None, int] = b"?", 0
        began_s = time.monotonic()
        head, length = self._run(name, lambda channel: get_head(channel, name, view), foreign=foreign)
        if head is None:
            return None
        if not lies_elsewhere(head, len(head)):
            self._tier.compression.received(length, time.monotonic() - began_s)
            return self._tier.verified(key, head, into, length)
        payload_bytes = Header.payload_bytes_of(head)
        if state_of(key, self._tier.fingerprint, head, len(head)) != "ours" or payload_bytes > len(view):
            raise CorruptChunk(f"{self._servers.name}: the head of {key.hex()} does not fit its payload")
        try:
            segments = segments_of(name, head[PACKED_BYTES:], view[:payload_bytes])
            self._together(name, segments, fetch)
        except HeaderError as error:
            raise CorruptChunk(f"{self._servers.name}: {error}") from error
        except Missing:
            if self._tier.writes:
                self._forget(name, head)
            return None
        self._tier.compression.received(payload_bytes, time.monotonic() - began_s)
        return self._tier.verified(key, head[:PACKED_BYTES], into, payload_bytes)

    def put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        """Whether it is there now, by us or somebody else. False: something that is not ours is in the way, or others write
        and remove it all the time.

        Raises TierFull, TierUnavailable.
        """
        # A value is as soon sent as asked for; what takes longer is looked for first.
        state: State = "none" if payload.nbytes <= self._segment_bytes else self._whole_state(key)
        if state in ("ours", "foreign"):
            return state == "ours"
        with self._tier.pack(key, payload) as stored:
            return self._put(key, stored.header.pack(), stored.payload.data, state)

    def _put(self, key: ChunkKey, header: bytes, payload: memoryview, state: State) -> bool:
        for _ in range(4):
            if state == "none":
                began_s = time.monotonic()
                if self._store(head_name(self._prefix, key), header, payload):
                    self._tier.compression.sent(len(payload), time.monotonic() - began_s)
                    return True
                state = self._whole_state(key)
            elif state == "broken":
                self.remove(key)
                state = "none"
            else:
                return state == "ours"
        return False

    def remove(self, key: ChunkKey) -> bool:
        """Whether it was there. What is not ours is left alone. Raises TierUnavailable."""
        state, beginning, length = self._looked(key)
        return state in ("ours", "broken") and self._drop(head_name(self._prefix, key), beginning, length)

    def exist(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether there is something under the name of each. Raises TierUnavailable."""
        return existing(self._servers, [head_name(self._prefix, key) for key in keys])

    def _store(self, name: bytes, header: bytes, payload: memoryview) -> bool:
        """False where there is a head already."""
        if len(payload) <= self._segment_bytes:
            return self._run(name, lambda channel: set_head(channel, name, header, payload, self._ttl_ms))
        manifest = new_manifest(len(payload), self._segment_bytes)
        segments = segments_of(name, manifest, payload)
        unpublished_ms = round((_UNPUBLISHED_S + len(segments) * self._timeout_s) * 1000)
        names = [segment.name for segment in segments]
        head = header + manifest
        try:
            self._together(name, list(segments), lambda channel, left: send(channel, left, unpublished_ms))
            published = self._publish(name, head, segments)
        except (Missing, TierFull) as error:
            self._try_to_unlink(name, names)
            if isinstance(error, Missing):
                raise TierFull(f"{self._servers.name}: the server evicts chunks while they are written") from None
            raise
        if not published:
            self._try_to_unlink(name, names)
        return published

    def _publish(self, name: bytes, head: bytes, segments: list[Segment]) -> bool:
        """Whether the chunk is there by us now, and to stay; False where there is another head. Raises Missing.

        In one step: who sees a head takes the chunk for stored and never comes back to segments that still expire.
        """
        names = [name, *(segment.name for segment in segments)]
        try:
            return self._run(
                name,
                lambda channel: publish(channel, names, head, self._ttl_ms, self._segments_ttl_ms),
                several=True,
            )
        except Scattered:
            return self._publish_one_by_one(name, head, segments)

    def _publish_one_by_one(self, name: bytes, head: bytes, segments: list[Segment]) -> bool:
        """Its slot is moving. Should we not come to the end, the segments expire, but not soon."""
        wanted_ms, at_least_ms = self._segments_ttl_ms, round(_PUBLISHED_S * 1000)
        first_ms = at_least_ms if wanted_ms is None else min(wanted_ms, at_least_ms)
        self._together(name, list(segments), lambda channel, left: keep(channel, left, first_ms))
        if not self._run(name, lambda channel: set_head(channel, name, head, _NO_BYTES, self._ttl_ms)):
            # An answer may have been lost: then the head that was in the way is ours.
            found = self._run(name, lambda channel: look(channel, name), foreign=(b"?", 1))
            if found != (head, len(head)):
                return False
        try:
            self._together(name, list(segments), self._keep)
        except Missing:
            if self._drop(name, head, len(head)):
                raise
            return False  # somebody has removed it already, or stored another copy since; or the head was evicted
        return True

    def _keep(self, channel: Channel, segments: list[Segment]) -> None:
        keep(channel, segments, self._segments_ttl_ms)

    def _whole_state(self, key: ChunkKey) -> State:
        """As `state_of`, with a look at the segments: who published the chunk while its slot moved may have died before they
        were to stay. Then they are to stay from now on; a chunk whose segments have gone is broken."""
        state, beginning, length = self._looked(key)
        if state == "ours" and lies_elsewhere(beginning, length):
            name = head_name(self._prefix, key)
            names = segment_names(name, beginning, self._tier.settings.chunk_bytes)
            try:
                self._together(name, [Segment(each, _NO_BYTES) for each in names], self._keep)
            except Missing:
                return "broken"
        return state

    def _looked(self, key: ChunkKey) -> tuple[State, bytes, int]:
        """What lies under the name of the head, its beginning, and its length (-1 where there is nothing)."""
        name = head_name(self._prefix, key)
        beginning, length = self._run(name, lambda channel: look(channel, name), foreign=(b"?", 1))
        return state_of(key, self._tier.fingerprint, beginning, length), beginning, length

    def _forget(self, name: bytes, head: bytes) -> None:
        """Remove what is left of a chunk that has lost a segment, unless it was written anew; best effort."""
        with contextlib.suppress(TierUnavailable, TierFull):
            self._drop(name, head, len(head))

    def _drop(self, name: bytes, beginning: bytes, length: int) -> bool:
        """Remove the value that `_looked` found, with its segments, unless another one is there by now. Whether it was."""
        names = [name]
        if lies_elsewhere(beginning, length):
            names += segment_names(name, beginning, self._tier.settings.chunk_bytes)
        try:
            return self._run(name, lambda channel: take_away(channel, names, beginning, length), several=True)
        except Scattered:
            return self._drop_one_by_one(names, beginning, length)

    def _drop_one_by_one(self, names: list[bytes], beginning: bytes, length: int) -> bool:
        """Its slot is moving. Should we not come to the end, the segments expire."""
        name, *segments = names
        expiring = [Segment(each, _NO_BYTES) for each in segments]
        self._together(name, expiring, lambda channel, left: expire(channel, left, round(_UNPUBLISHED_S * 1000)))
        was_there = self._run(name, lambda channel: take_away(channel, [name], beginning, length))
        self._unlink(name, segments)
        return was_there

    def _try_to_unlink(self, name: bytes, names: list[bytes]) -> None:
        """What stays behind expires."""
        try:
            self._unlink(name, names)
        except (TierUnavailable, TierFull):
            return

    def _unlink(self, name: bytes, names: list[bytes]) -> bool:
        found = False

        def exchange(channel: Channel, left: list[Segment]) -> None:
            nonlocal found
            found = unlink(channel, left) or found

        self._together(name, [Segment(each, _NO_BYTES) for each in names], exchange)
        return found

    def _together(
        self, name: bytes, segments: list[Segment], exchange: Callable[[Channel, list[Segment]], object]
    ) -> None:
        """`exchange` about all of `segments`; about one after the other while their slot moves between two servers."""
        try:
            self._run(name, lambda channel: exchange(channel, segments), several=True)
        except Scattered:
            for segment in list(segments):
                self._run(segment.name, lambda channel, alone=[segment]: exchange(channel, alone))  # type: ignore[misc]

    def _run(
        self, name: bytes, exchange: Callable[[Channel], T], *, several: bool = False, foreign: T | None = None
    ) -> T:
        """As `Servers.run`; `foreign` is returned where a list, a hash or so lies under the name."""
        try:
            return self._servers.run(name, exchange, several=several)
        except ServerError as error:
            if error.code == FOREIGN_TYPE and foreign is not None:
                return foreign
            raise failure(self._servers.name, "the server", error) from None
