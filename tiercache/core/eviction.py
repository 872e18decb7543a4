"""Eviction from the hot cache: least recently used leaf first.

Chunk keys are chained, so the residents form a forest of prefixes. A chunk is useless without the chunks before it, so
only leaves are evicted: residents that no other evictable resident continues. The policy's rank decides among the
leaves, the lowest first.

The leaves are in buckets of 1,024 ranks, each a heap of (rank, key) with lazy deletion: an item is valid only while it
matches the rank with which its resident was queued. An access that raises the rank of a queued leaf within its bucket
leaves the heap as it is; the leaf is queued again when the old item surfaces. A bucket counts its valid items, and is
removed with the last of them. So an eviction reads the items of one bucket at most, however many leaves were accessed
since the last eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from tiercache.core.keys import ChunkKey, Tenant, tenant_of

_BUCKET = 10
"""Number of low bits that ranks in the same bucket may differ in."""

_USE = 1 << 64
"""An access in an LFU rank, whose lower bits are the time of the last access."""

_ORPHAN = -_USE
"""Rank of a chunk whose parent is known and not resident, and of its descendants.

They are useless until the parent returns, and are evicted before all others.
"""

Rank = Callable[[int, int], int]
"""Return the new rank of a resident from its old rank (0 at insertion) and the time of the access."""

RANKS: dict[str, Rank] = {
    "LRU": lambda _rank, time: time,
    "FIFO": lambda rank, time: rank or time,
    "LFU": lambda rank, time: (max(rank, 0) // _USE + 1) * _USE + time,
    "MRU": lambda _rank, time: -time,
}

MEAN_LRU = ("COST", "S3FIFO", "SLRU")
"""Policies of the first edition. The configuration accepts their names; the cache then uses LRU."""

POLICIES = (*RANKS, *MEAN_LRU)
"""All values of `cache_policy`."""


class Resident:
    """A chunk in a slot of the hot cache."""

    __slots__ = (
        "children", "hot", "key", "leases", "parent", "payload_bytes", "queued_rank", "rank", "slot",
        "unleased_children",
    )  # fmt: skip

    def __init__(self, key: ChunkKey, slot: int = -1, payload_bytes: int = 0) -> None:
        self.key = key
        self.slot = slot
        self.payload_bytes = payload_bytes
        self.hot = True
        """True while a lookup finds the chunk."""
        self.leases = 0
        """Number of leases; 0 means that the chunk may be evicted."""
        self.parent: Resident | None = None
        self.children: dict[ChunkKey, Resident] | None = None
        """The residents that continue this chunk, by key; None stands for an empty dictionary."""
        self.unleased_children = 0
        self.rank = 0
        self.queued_rank: int | None = None
        """The rank of this resident's item in the queue; None if it has no item."""


class _Bucket:
    """A heap of leaves with about the same rank, including stale items."""

    __slots__ = ("heap", "valid")

    def __init__(self) -> None:
        self.heap: list[tuple[int, ChunkKey]] = []
        self.valid = 0
        """Number of leaves in this bucket."""


class _Queue:
    """Leaves by rank."""

    __slots__ = ("buckets", "order", "residents")

    def __init__(self) -> None:
        self.buckets: dict[int, _Bucket] = {}
        """Buckets with a leaf, by the upper bits of its rank."""
        self.order: list[int] = []
        """A heap of bucket numbers, including those of removed buckets."""
        self.residents = 0
        """Residents that may have an item here."""


class LeafLru:
    """The residents of the hot cache and their order of eviction.

    Time is a counter. An access to n chunks of a prefix advances it by n; the first chunk gets the new time and each later
    chunk a time lower by 1, so the tail of a prefix is colder than its head.

    Every operation takes O(1), or O(log n) if a leaf enters or leaves the queue. Stale items are removed bucket by bucket: a
    bucket with more than twice as many items as leaves is rebuilt. So the queue never exceeds twice the number of residents.
    """

    def __init__(self, policy: str = "LRU", *, by_tenant: bool = False) -> None:
        """`policy` is a name in `POLICIES`, in any case. `by_tenant` allows victims of a single tenant."""
        self.policy = "LRU" if policy.upper() in MEAN_LRU else policy.upper()
        self.entries: dict[ChunkKey, Resident] = {}
        self.evictable = 0
        """Residents without a lease."""
        self._rank = RANKS[self.policy]
        self._clock = 0
        self._queue = _Queue()
        self._tenants: dict[Tenant, _Queue] | None = {} if by_tenant else None

    def access(self, keys: Sequence[ChunkKey], *, prefix: bool = True) -> int:
        """Refresh the residents among `keys`, which follow one another in a prefix.

        Returns the time of the first key: the chunk at position i has this time less i, also if it is inserted later.
        An orphan of the prefix stays one if the chunk before it is not resident, or an orphan. Without `prefix` the keys
        are independent, and the most recent comes first.
        """
        self._clock = time = self._clock + len(keys)
        get, rank_of, lru = self.entries.get, self._rank, self.policy == "LRU"
        at = time
        joins = True
        for key in keys:
            entry = get(key)
            if entry is None:
                joins = not prefix
            elif joins or entry.rank != _ORPHAN:
                joins = True
                rank = entry.rank = at if lru else rank_of(entry.rank, at)
                queued = entry.queued_rank
                if not entry.unleased_children and (
                    queued is None or rank < queued or rank >> _BUCKET != queued >> _BUCKET
                ):
                    self._enqueue(entry)
            at -= 1
        return time

    def renew(self, keys: Sequence[ChunkKey]) -> None:
        """Make the residents among `keys` as recent as by an access without counting one. Only LRU has recency to renew."""
        if self.policy == "LRU":
            self.access(keys)

    def insert(
        self, entry: Resident, parent_key: ChunkKey | None = None, time: int | None = None, *, in_order: bool = False
    ) -> None:
        """Add a resident with its leases. Its key must not be resident.

        `parent_key` is the chunk before it in its prefix. `in_order` says that the chunks of the prefix are inserted in
        order: if the parent is not resident, as in a prefix that is larger than the cache, the new resident is an
        orphan and is evicted first. `time` is the time of its access, by default a new time.
        """
        if time is None:
            self._clock = time = self._clock + 1
        key = entry.key
        entry.rank = self._rank(0, time)
        self.entries[key] = entry
        self._queue.residents += 1
        if self._tenants is not None:
            self._tenants.setdefault(tenant_of(key), _Queue()).residents += 1
        parent = self.entries.get(parent_key) if parent_key is not None else None
        if parent is not None and parent is not entry:
            self._attach(entry, parent)
        if in_order and parent_key is not None and (parent is None or parent.rank == _ORPHAN):
            entry.rank = _ORPHAN
        if not entry.leases:
            self.evictable += 1
            self._enqueue(entry)

    def link(self, keys: Sequence[ChunkKey], time: int | None = None) -> None:
        """Record that `keys` follow one another in a prefix, for each pair of resident neighbours.

        `time` is the time of the first key in the access that brought them, by default a new time. A resident with a
        parent keeps it, since a chained key has only one parent. Keys that are not chained can be named in any order; a link
        that would close a circle is left out. An orphan gets the rank of an access again.
        """
        if time is None:
            self._clock = time = self._clock + len(keys)
        get = self.entries.get
        before: Resident | None = None
        root: Resident | None = None
        for position, key in enumerate(keys):
            entry = get(key)
            if entry is None or before is None:
                root = None
            elif entry.parent is not before:
                if entry.parent is None and entry is not (root := root or _root_of(before)):
                    self._attach(entry, before)
                else:
                    root = None
            if entry is not None and entry.rank == _ORPHAN and (parent := entry.parent) and parent.rank != _ORPHAN:
                entry.rank = self._rank(0, time - position)
                self._enqueue(entry)
            before = entry

    def discard(self, key: ChunkKey) -> Resident | None:
        """Remove and return a resident in any state; return None if `key` is not resident. Its children become roots."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return None
        if not entry.leases:
            self.evictable -= 1
        if entry.queued_rank is not None:
            self._unqueue(entry)
        self._queue.residents -= 1
        if self._tenants is not None:
            tenant = tenant_of(key)
            queue = self._tenants[tenant]
            queue.residents -= 1
            if not queue.residents:
                del self._tenants[tenant]
        for child in (entry.children or {}).values():
            child.parent = None
        entry.children, entry.unleased_children = None, 0
        parent = entry.parent
        if parent is not None:
            entry.parent = None
            children = parent.children
            assert children is not None
            del children[key]
            if not children:
                parent.children = None
            if not entry.leases:
                self._less_unleased(parent)
        return entry

    def leased(self, entry: Resident) -> None:
        """Called when a resident gets its first lease."""
        self.evictable -= 1
        if entry.parent is not None:
            self._less_unleased(entry.parent)

    def released(self, entry: Resident) -> None:
        """Called when the last lease on a resident ends."""
        self.evictable += 1
        if entry.parent is not None:
            self._more_unleased(entry.parent)
        self._enqueue(entry)

    def victim(self, tenant: Tenant | None = None) -> Resident | None:
        """Return the leaf that `pop_victim` would remove now, of `tenant` if given; None if all are leased."""
        queue = self._queue
        if tenant is not None:
            assert self._tenants is not None, "made without by_tenant"
            found = self._tenants.get(tenant)
            if found is None:
                return None
            queue = found
        order, get = queue.order, self.entries.get
        while order:
            bucket = queue.buckets.get(order[0])
            if bucket is None:
                heappop(order)
                continue
            rank, key = bucket.heap[0]
            entry = get(key)
            if entry is None or entry.queued_rank != rank:
                heappop(bucket.heap)
            elif entry.rank == rank and not entry.leases:
                return entry
            else:
                heappop(bucket.heap)
                self._unqueue(entry)
                self._enqueue(entry)
        return None

    def pop_victim(self, tenant: Tenant | None = None) -> Resident | None:
        """Remove and return the coldest leaf, of `tenant` if given; None if every resident is leased."""
        entry = self.victim(tenant)
        if entry is not None:
            self.discard(entry.key)
        return entry

    def _attach(self, entry: Resident, parent: Resident) -> None:
        entry.parent = parent
        if parent.children is None:
            parent.children = {}
        parent.children[entry.key] = entry
        if not entry.leases:
            self._more_unleased(parent)

    def _more_unleased(self, parent: Resident) -> None:
        """Record that a child prevents `parent` from being a leaf."""
        parent.unleased_children += 1
        if parent.queued_rank is not None:
            self._unqueue(parent)

    def _less_unleased(self, parent: Resident) -> None:
        """Record that a child of `parent` no longer prevents it from being a leaf."""
        parent.unleased_children -= 1
        if not parent.unleased_children:
            self._enqueue(parent)

    def _enqueue(self, entry: Resident) -> None:
        """Queue a resident if it is a leaf, unless it has an item that surfaces early enough."""
        if entry.leases or entry.unleased_children:
            return
        rank, queued = entry.rank, entry.queued_rank
        if queued is not None:
            if queued == rank or (queued < rank and queued >> _BUCKET == rank >> _BUCKET):
                return
            self._unqueue(entry)
        entry.queued_rank = rank
        item = (rank, entry.key)
        _push(self._queue, item)
        if self._tenants is not None:
            _push(self._tenants[tenant_of(entry.key)], item)

    def _unqueue(self, entry: Resident) -> None:
        """Invalidate the item of a resident."""
        rank = entry.queued_rank
        assert rank is not None
        entry.queued_rank = None
        self._uncount(self._queue, rank)
        if self._tenants is not None:
            self._uncount(self._tenants[tenant_of(entry.key)], rank)

    def _uncount(self, queue: _Queue, rank: int) -> None:
        number = rank >> _BUCKET
        bucket = queue.buckets[number]
        bucket.valid -= 1
        if not bucket.valid:
            del queue.buckets[number]
            if len(queue.order) > 2 * len(queue.buckets) + 64:
                queue.order[:] = queue.buckets
                heapify(queue.order)
        elif len(bucket.heap) > 2 * bucket.valid:
            get = self.entries.get
            current = {item for item in bucket.heap if (entry := get(item[1])) is not None and entry.queued_rank == item[0]}
            bucket.heap[:] = current
            heapify(bucket.heap)


def _push(queue: _Queue, item: tuple[int, ChunkKey]) -> None:
    number = item[0] >> _BUCKET
    bucket = queue.buckets.get(number)
    if bucket is None:
        bucket = queue.buckets[number] = _Bucket()
        heappush(queue.order, number)
    heappush(bucket.heap, item)
    bucket.valid += 1


def _root_of(entry: Resident) -> Resident:
    while entry.parent is not None:
        entry = entry.parent
    return entry
