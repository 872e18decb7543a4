"""The chunks of a tier, least recently used first: the exact index of a directory, and the keys seen in a server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from statistics import median_low
from typing import Any

from tiercache.core.keys import ChunkKey, Tenant, tenant_of
from tiercache.core.tenants import Shares, TenantStatistics

PARTS = 256
"""Number of parts, by the first byte of a key. Keys are hashes, so parts have about the same size."""

TIME = 1 << 44
"""A step of the clock, larger than any size in bytes."""
_SIZE = TIME - 1
_UNDIVIDED = 4096
"""Largest number of entries in one dict."""


class LruMap:
    """Sizes in bytes by chunk key, least recently used first.

    A dict grows in one call, which takes hundreds of milliseconds for a million entries. So a map of many entries is divided
    into 256 dicts by the first byte of the key. A value holds the time of the last access, a counter, above the size, so
    the coldest entry is the smallest of the parts' first values. A heap has a lower bound of each part's first value; a
    bound that is too low is raised when it surfaces.

    Every operation takes O(1), `coldest` O(log 256) more.
    """

    __slots__ = ("_bounds", "_clock", "_count", "_divided", "_front", "_heap", "parts")

    def __init__(self) -> None:
        self.parts: list[OrderedDict[ChunkKey, int]] = [OrderedDict()] * PARTS
        """`key in parts[key[0]]` is the fastest lookup. The list stays the same object; its items change."""
        self._count = 0
        self._divided = False
        self._clock = 0
        """Time of the last access, in steps of `TIME`."""
        self._front = 0
        """Time of the coldest entry that was inserted, or moved, in front of all others."""
        self._bounds: list[int | None] = [None]
        """The valid heap item of each part, None for an empty part. The list has one item while the map is undivided."""
        self._heap: list[tuple[int, int]] = []
        """Items (bound, part), including stale items that are not in `_bounds`."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Any) -> bool:
        return key in self.parts[key[0]]

    def __iter__(self) -> Iterator[ChunkKey]:
        """Yield all keys, by part. No key may be added or removed meanwhile."""
        for part in self.parts if self._divided else self.parts[:1]:
            yield from dict.keys(part)

    def part(self, first_byte: int) -> list[ChunkKey]:
        """Return the keys that begin with this byte, in no order, since an order by access takes ten times as long."""
        keys = list(dict.keys(self.parts[first_byte]))
        return keys if self._divided else [key for key in keys if key[0] == first_byte]

    def get(self, key: ChunkKey) -> int | None:
        """Return the size, or None if the key is absent. Does not count as an access."""
        value = self.parts[key[0]].get(key)
        return None if value is None else value & _SIZE

    def time(self, key: ChunkKey) -> int | None:
        """Return the time of the last access in the unit passed to `put`, or None if the key is absent."""
        value = self.parts[key[0]].get(key)
        return None if value is None else value // TIME

    def put(self, key: ChunkKey, size_bytes: int, *, cold: bool = False, time: int = 0) -> int | None:
        """Set the size of `key` and record an access. Return the previous size, or None for a new key.

        A new key that is `cold` comes before all others, and a known key keeps its place. The clock advances to at
        least `time`.
        """
        part = self.parts[key[0]]
        before = part.get(key)
        if cold:
            if before is not None:
                part[key] = before - (before & _SIZE) + size_bytes
                return before & _SIZE
            self._front -= TIME
            part[key] = self._front + size_bytes
            part.move_to_end(key, last=False)
            self._lower(key[0], self._front + size_bytes)
        else:
            clock = self._clock + TIME
            if time and clock < time * TIME:
                clock = time * TIME
            self._clock = clock
            part[key] = value = clock + size_bytes
            if before is not None:
                part.move_to_end(key)
                return before & _SIZE
            if len(part) == 1:
                self._lower(key[0], value)
        self._count += 1
        if self._count > _UNDIVIDED and not self._divided:
            self._divide()
        return None

    def touch(self, key: ChunkKey) -> bool:
        """Make `key` the most recently used. Return False if it is absent."""
        part = self.parts[key[0]]
        value = part.get(key)
        if value is None:
            return False
        self._clock = clock = self._clock + TIME
        part[key] = clock + (value & _SIZE)
        part.move_to_end(key)
        return True

    def age(self, key: ChunkKey) -> bool:
        """Move `key` before all others. Return False if it is absent."""
        part = self.parts[key[0]]
        value = part.get(key)
        if value is None:
            return False
        self._front -= TIME
        part[key] = value = self._front + (value & _SIZE)
        part.move_to_end(key, last=False)
        self._lower(key[0], value)
        return True

    def pop(self, key: ChunkKey) -> int | None:
        """Remove `key` and return its size, or None if it is absent."""
        value = self.parts[key[0]].pop(key, None)
        if value is None:
            return None
        self._count -= 1
        return value & _SIZE

    def coldest(self) -> ChunkKey | None:
        """Return the least recently used key, or None if the map is empty."""
        heap, bounds = self._heap, self._bounds
        while heap:
            bound, number = heap[0]
            if bounds[number] != bound:
                heappop(heap)
                continue
            part = self.parts[number]
            if not part:
                bounds[number] = None
                heappop(heap)
                continue
            key = next(iter(part))
            if (value := part[key]) == bound:
                return key
            bounds[number] = value
            heapreplace(heap, (value, number))
        return None

    def _lower(self, first_byte: int, value: int) -> None:
        """Record that the first value of a part is now `value`."""
        number = first_byte if self._divided else 0
        bounds = self._bounds
        if (bound := bounds[number]) is not None and bound <= value:
            return
        bounds[number] = value
        heappush(self._heap, (value, number))
        if len(self._heap) > 2 * PARTS:
            self._heap = [(bound, number) for number, bound in enumerate(bounds) if bound is not None]
            heapify(self._heap)

    def _divide(self) -> None:
        whole = self.parts[0]
        self.parts[:] = [OrderedDict() for _ in range(PARTS)]
        self._divided = True
        for key, value in whole.items():
            self.parts[key[0]][key] = value
        self._bounds = [next(iter(part.values()), None) for part in self.parts]
        self._heap = [(bound, number) for number, bound in enumerate(self._bounds) if bound is not None]
        heapify(self._heap)


_STEP = 128
"""Keys looked up together; after the first missing key, fewer than this many are looked up in vain."""


def counts_in(places: Sequence[Container[ChunkKey]], keys: Sequence[ChunkKey]) -> list[int]:
    """Return how many of the leading keys are in each of `places`, up to the first key in none.

    Each key counts for the first place that has it. Each place is searched for a step of keys in one loop, which is
    faster than key by key.
    """
    counts = [0] * len(places)
    for start in range(0, len(keys), _STEP):
        step = left = keys[start : start + _STEP]
        found = []
        for place in places:
            if isinstance(place, LruMap):
                parts = place.parts
                lacking = [key for key in left if key not in parts[key[0]]]
            else:
                lacking = [key for key in left if key not in place]
            found.append(len(left) - len(lacking))
            if not (left := lacking):
                break
        if left:
            found = counts_in(places, step[: step.index(left[0])])
        for number, count in enumerate(found):
            counts[number] += count
        if left:
            break
    return counts


class CappedIndex:
    """Keys and occupied bytes of the chunks in a directory, least recently used first.

    Methods return the chunks that the caller has to delete; they never wait and never use the tier. With a quota,
    chunks of a tenant above it are evicted before those of others, and bytes being written for a tenant count from
    `expect` on.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        """`quota_bytes` limits each tenant; 0 means no limit."""
        self.keys = LruMap()
        """The resident keys and the bytes that each occupies."""
        self._parts = self.keys.parts
        self.used_bytes = 0
        """Bytes that all resident keys occupy."""
        self._shares = Shares(quota_bytes) if quota_bytes else None
        self._of_tenant: dict[Tenant, LruMap] = {}
        """The keys of each tenant in the same order; only with a quota."""
        self.on_change: Callable[[ChunkKey], None] | None = None
        """Called after a key was added or removed."""

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Any) -> bool:
        return key in self._parts[key[0]]

    def add(self, key: ChunkKey, occupied_bytes: int, *, cold: bool = False) -> None:
        """Make `key` resident, or correct its size if it is. A `cold` key, of unknown age, is evicted first."""
        before = self.keys.put(key, occupied_bytes, cold=cold)
        self.used_bytes += occupied_bytes - (before or 0)
        if self._shares is not None:
            tenant = tenant_of(key)
            self._shares.hold(tenant, occupied_bytes - (before or 0), before is None)
            if (own := self._of_tenant.get(tenant)) is None:
                own = self._of_tenant[tenant] = LruMap()
            own.put(key, occupied_bytes, cold=cold)
        if before is None and self.on_change is not None:
            self.on_change(key)

    def touch(self, key: ChunkKey) -> None:
        """Record an access."""
        if self.keys.touch(key) and self._shares is not None:
            self._of_tenant[tenant_of(key)].touch(key)

    def touch_prefix(self, keys: Sequence[ChunkKey]) -> None:
        """Record an access to the residents among `keys`, a prefix whose head is evicted last."""
        for key in reversed(keys):
            self.touch(key)

    def remove(self, key: ChunkKey) -> int | None:
        """Remove `key` from the index. Return the bytes that it occupied, or None if it was not resident."""
        occupied = self.keys.pop(key)
        if occupied is not None:
            self._removed(key, occupied)
        return occupied

    def age(self, keys: Sequence[ChunkKey]) -> None:
        """Make resident `keys` the coldest of all; the last key is evicted first."""
        for key in keys:
            if self.keys.age(key) and self._shares is not None:
                self._of_tenant[tenant_of(key)].age(key)

    def evict(self, needed_bytes: int, most: int | None = None) -> list[tuple[ChunkKey, int]]:
        """Choose victims of at least `needed_bytes` in total, at most `most`, and remove them from the index.

        Victims of tenants above their quota come first. Returns their keys and the bytes that each occupies; the caller
        deletes them.
        """
        victims: list[tuple[ChunkKey, int]] = []
        while needed_bytes > 0 and len(victims) != most:
            tenant = None if self._shares is None else self._shares.over
            key = (self.keys if tenant is None else self._of_tenant[tenant]).coldest()
            if key is None:
                break
            victims.append(self._evict(key))
            needed_bytes -= victims[-1][1]
        return victims

    def _evict(self, key: ChunkKey) -> tuple[ChunkKey, int]:
        occupied = self.keys.pop(key)
        assert occupied is not None
        if self._shares is not None:
            self._shares.note_evicted(tenant_of(key))
        self._removed(key, occupied)
        return key, occupied

    def _removed(self, key: ChunkKey, occupied_bytes: int) -> None:
        self.used_bytes -= occupied_bytes
        if self._shares is not None:
            tenant = tenant_of(key)
            own = self._of_tenant[tenant]
            own.pop(key)
            if not own:
                del self._of_tenant[tenant]
            self._shares.hold(tenant, -occupied_bytes, -1)
        if self.on_change is not None:
            self.on_change(key)

    # Tenants

    @property
    def excess_bytes(self) -> int:
        """Bytes of tenants above their quotas, after a quota was lowered or another process has written."""
        return self._shares.excess_bytes if self._shares is not None else 0

    def limit(self, quota_bytes: int) -> None:
        """Change the quota of an index that has one."""
        if self._shares is not None:
            self._shares.limit(quota_bytes)

    def expect(self, key: ChunkKey, needed_bytes: int) -> None:
        """Count bytes that are being written for the tenant of `key`; a negative number subtracts."""
        if self._shares is not None:
            self._shares.expect(tenant_of(key), needed_bytes)

    def lacking_bytes(self, key: ChunkKey, needed_bytes: int = 0) -> int:
        """Return the bytes to evict from the tenant of `key` so that `needed_bytes` more fit into its quota."""
        return self._shares.lacking_bytes(tenant_of(key), needed_bytes) if self._shares is not None else 0

    def fits(self, key: ChunkKey, needed_bytes: int) -> bool:
        """Return True if `needed_bytes` more fit into the quota of the tenant of `key` after evicting its own chunks."""
        if self._shares is None:
            return True
        tenant = tenant_of(key)
        return self._shares.lacking_bytes(tenant, needed_bytes) <= self._shares.held_bytes(tenant)

    def evict_own(self, key: ChunkKey, needed_bytes: int) -> list[tuple[ChunkKey, int]]:
        """Evict as `evict` does, from the chunks of the tenant of `key`."""
        victims: list[tuple[ChunkKey, int]] = []
        while self._shares is not None and needed_bytes > 0 and (own := self._of_tenant.get(tenant_of(key))):
            victim = own.coldest()
            assert victim is not None
            victims.append(self._evict(victim))
            needed_bytes -= victims[-1][1]
        return victims

    def tenant_statistics(self) -> dict[Tenant, TenantStatistics]:
        """Return the statistics of each tenant; empty without quotas."""
        return self._shares.statistics() if self._shares is not None else {}

    # Comparing with a listing of a directory

    def group(self, directory: int) -> frozenset[ChunkKey]:
        """Return the chunks known in a directory, as a copy."""
        return frozenset(self.keys.part(directory))


class Freshness:
    """Finds the directories that changed since they were listed, by their modification times.

    A file system's clock ticks in steps: a directory can change again without its time changing. So a directory is listed
    again until a listing begins at least `settle_s` after its time was first seen.
    """

    def __init__(self, settle_s: float) -> None:
        self.settle_s = settle_s
        self._times_ns = [-1] * PARTS
        self._seen_s = [0.0] * PARTS
        self._settled = [False] * PARTS

    def stale(self, times_ns: Sequence[int], now_s: float) -> list[int]:
        """Return the directories to list now. `times_ns` has a modification time for each, 0 if there is no directory."""
        found = []
        for directory, time_ns in enumerate(times_ns):
            if time_ns != self._times_ns[directory]:
                self._times_ns[directory] = time_ns
                self._seen_s[directory] = now_s
                self._settled[directory] = False
            if not self._settled[directory]:
                found.append(directory)
        return found

    def listed(self, directory: int, began_s: float) -> None:
        """Record that the index has a listing of `directory` that began at `began_s`, after its time was taken."""
        self._settled[directory] = began_s >= self._seen_s[directory] + self.settle_s


def pause_s(calls_s: Sequence[float]) -> float:
    """Return the pause after a listing whose calls took `calls_s`: ten times the length of the listing.

    The length is estimated by the median, so that a call that hung does not lengthen the pause tenfold.
    """
    return 10 * median_low(calls_s) * len(calls_s) if calls_s else 0.0


_DROPPED_AT_ONCE = 2
"""Expired keys dropped per added key: their number falls, and no call takes long."""


class RememberedKeys:
    """The most recently seen keys, at most `limit`, each with the bytes that it takes in the store (0: not known).

    A key costs 200 bytes. Expired keys are dropped as others are added.
    """

    def __init__(self, limit: int, keep_s: float) -> None:
        self.limit = limit
        self.keep_s = keep_s
        self.bytes_known = 0
        self._seen = LruMap()
        """The time of an access is in microseconds."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, key: ChunkKey, now_s: float, stored_bytes: int = 0) -> None:
        """Record that `key` was seen at `now_s` (monotonic)."""
        old_bytes = self._seen.get(key) or 0
        stored_bytes = stored_bytes or old_bytes
        self._seen.put(key, stored_bytes, time=int(now_s * 1e6))
        self.bytes_known += stored_bytes - old_bytes
        if len(self._seen) > self.limit:
            self.discard(self._seen.coldest())
        for _ in range(_DROPPED_AT_ONCE):
            oldest = self._seen.coldest()
            if oldest is None or self.has(oldest, now_s):
                break
            self.discard(oldest)

    def has(self, key: ChunkKey, now_s: float) -> bool:
        """Return True if the key was seen at most `keep_s` ago."""
        seen_us = self._seen.time(key)
        return seen_us is not None and now_s * 1e6 - seen_us <= self.keep_s * 1e6

    def discard(self, key: ChunkKey | None) -> bool:
        """Remove a key; return False if it was not remembered."""
        stored_bytes = None if key is None else self._seen.pop(key)
        self.bytes_known -= stored_bytes or 0
        return stored_bytes is not None

    def clear(self) -> None:
        self._seen = LruMap()
        self.bytes_known = 0
