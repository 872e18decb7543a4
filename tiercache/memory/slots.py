"""Slots: the arena cut into equal parts of one chunk each, their budget and waiters, and the leases on their chunks."""

from __future__ import annotations

import asyncio
import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, ConfigError, TierUnavailable
from tiercache.memory.arena import Arena, whole_pages
from tiercache.memory.workers import Workers, retrieve_exception, wait_shielded

T = TypeVar("T")

FEWEST_SLOTS = 4
"""One slot each for a read, a write and their floors. With fewer, reads and writes would wait for each other."""

Slot = int

Fill = tuple[Slot, int, Callable[[np.ndarray], None]]
"""A slot, the number of bytes that are written into it, and the call that writes them."""


class Pool(ABC):
    """Memory cut into equal slots. The last released slot is taken next, since it is warm in the CPU's caches."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        """Slots that are free or in use."""
        self.slot_bytes = slot_bytes
        self._free: list[Slot] = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    @abstractmethod
    def view(self, slot: Slot, length_bytes: int | None = None) -> Any:
        """Return the slot's payload memory, or its first bytes."""

    @abstractmethod
    def readable(self, slot: Slot, length_bytes: int) -> Any:
        """Return the slot's first bytes, read-only if the kind of memory supports that."""

    def close(self) -> None:
        """Drop the reference to the memory. No slot may be used afterwards; existing views stay valid. Idempotent."""
        self._free.clear()


def slots_in(size_bytes: int, chunk_bytes: int) -> int:
    """Return the number of slots in an arena of `size_bytes`. Raises ConfigError if there are too few."""
    size_bytes, slot_bytes = whole_pages(size_bytes), aligned(chunk_bytes)
    count = size_bytes // slot_bytes
    if count < FEWEST_SLOTS:
        enough_gb = math.ceil(1000 * FEWEST_SLOTS * slot_bytes / 2**30) / 1000
        raise ConfigError(
            f"max_local_cpu_size: {size_bytes / 2**30:.4g} GB hold {count} chunks of "
            f"{chunk_bytes / 2**20:.2f} MiB; at least {FEWEST_SLOTS} are needed: raise it to "
            f"{enough_gb:g} or more, or lower chunk_size"
        )
    return count


class SlotPool(Pool):
    """Slots of the arena."""

    def __init__(self, arena: Arena, chunk_bytes: int) -> None:
        slot_bytes, count = aligned(chunk_bytes), slots_in(arena.size_bytes, chunk_bytes)
        super().__init__(count, slot_bytes)
        self._arena = arena
        self.reserved = self.most = count
        """The number of slots in the arena, and of those to use: slots that are given back above it go out of use."""
        self._unused: list[Slot] = []
        """Slots out of use, without pages."""
        self._pages = Workers("pages", 1)
        """Gives pages up and brings them back: one call after the other, so that no page goes that is in use again."""
        self._use(arena.memory[: count * slot_bytes].reshape(count, slot_bytes))

    def view(self, slot: Slot, length_bytes: int | None = None) -> np.ndarray:
        """Return uint8[length_bytes] of the slot, by default the whole slot, aligned to 4096 bytes.

        Raises CacheClosed after `close`.
        """
        try:
            return self._memory[slot] if length_bytes is None else self._memory[slot, :length_bytes]
        except IndexError:
            self._check_open()
            raise

    def readable(self, slot: Slot, length_bytes: int) -> np.ndarray:
        try:
            return self._read_only[slot, :length_bytes]
        except IndexError:
            self._check_open()
            raise

    def give_back(self, slot: Slot) -> None:
        if self.count > self.most:
            self.withdraw([slot])
        else:
            super().give_back(slot)

    async def populated(self, count: int) -> list[Slot]:
        """Return slots out of use with new pages, as many as `resize` to `count` needs.

        Raises OSError if there is no memory. A cancelled call keeps none.
        """
        found: list[Slot] = []
        try:
            while (missing := count - self.count - len(found)) > 0:  # more may go out of use meanwhile
                more = self._unused[:missing]
                del self._unused[:missing]
                found += more
                await wait_shielded(self._pages.submit(self._arena.populate, self._places(more)))
        except BaseException:
            self._give_up(found)
            raise
        return found

    def resize(self, count: int, populated: Sequence[Slot]) -> None:
        """Use `count` slots, with those that `populated` returned for it. Slots in use above that go when given back."""
        self._free += populated
        self.count += len(populated)
        self.most = count
        self._free.sort()  # neighbours go together
        kept = min(len(self._free), max(0, len(self._free) + count - self.count))
        self._free, surplus = self._free[:kept], self._free[kept:]
        self.withdraw(surplus)

    def withdraw(self, slots: Sequence[Slot]) -> None:
        """Take slots that nobody has out of use."""
        self.count -= len(slots)
        self._give_up(slots)

    def _give_up(self, slots: Sequence[Slot]) -> None:
        self._unused += slots
        if slots:
            with suppress(CacheClosed, TierUnavailable):  # closed, or no thread can be started: the pages stay
                giving_up = self._pages.submit(self._arena.give_up, self._places(slots))
                giving_up.add_done_callback(retrieve_exception)

    def _places(self, slots: Sequence[Slot]) -> list[range]:
        """Return the bytes of slots in the arena, those of neighbours together."""
        places: list[range] = []
        for slot in sorted(slots):
            start, end = slot * self.slot_bytes, (slot + 1) * self.slot_bytes
            if places and places[-1].stop == start:
                start = places.pop().start
            places.append(range(start, end))
        return places

    def close(self) -> None:
        super().close()
        self.most = self.reserved  # leases may end later
        self._pages.close()
        self._use(np.empty((0, self.slot_bytes), dtype=np.uint8))

    def _use(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._read_only = memory.view()
        self._read_only.flags.writeable = False  # slices inherit this, which is faster than setting a flag on each

    def _check_open(self) -> None:
        if not self._memory.size:
            raise CacheClosed("the cache is closed, and its memory given back") from None


def fill_slot(slot: np.ndarray, length_bytes: int, source: Callable[[np.ndarray], object]) -> None:
    """Let `source` write a payload, and zero the padding after it, so that no tier stores another chunk's bytes."""
    if length_bytes == slot.nbytes:
        source(slot)
        return
    source(slot[:length_bytes])
    zero_padding(slot, length_bytes)


def zero_padding(slot: np.ndarray, length_bytes: int) -> None:
    """Zero the bytes between a payload and the next page."""
    if (end := aligned(length_bytes)) != length_bytes:
        slot[length_bytes:end] = 0


class Purpose(IntEnum):
    """The purpose of a held slot. Integers, since hashing an Enum is slow and budgets are counted per chunk."""

    READ = 0
    """A demand read: a caller waits for this chunk."""
    WRITE = 1
    """A chunk being put into the cache."""
    PREFETCH = 2
    """A chunk that is read, or pinned, for a future reader."""


READ, WRITE, PREFETCH = Purpose
"""Module-level names for hot paths: an attribute lookup on the class costs as much as a call in Python 3.11."""


class SlotBudget:
    """Counts of held slots. `obtainable` slots are those free or evictable now.

    A write leaves enough for reads to hold `floor` slots, a read leaves as much for writes, and a prefetch leaves both.
    Abandoned reads do not count as held, so that a tier that hangs does not use up the floor.
    """

    def __init__(self, slots: int) -> None:
        self.resize(slots)
        self.held = [0] * len(Purpose)
        """Held slots by purpose."""
        self.tiers = 1
        """Number of tiers that read into these slots."""

    def resize(self, slots: int) -> None:
        self.slots = slots
        self.floor = max(1, slots // 8)

    @property
    def reads_at_once(self) -> int:
        """Limit of slots for the reads of one tier, including abandoned reads.

        All tiers together get half of the slots.
        """
        return max(1, self.slots // (2 * max(1, self.tiers)))

    def writes_at_once(self, tiers: int) -> int:
        """Return the limit of slots for the writes of one of `tiers` tiers, including abandoned writes.

        All tiers together get a quarter of the slots.
        """
        return max(1, self.slots // (4 * max(1, tiers)))

    def allows(self, purpose: Purpose, obtainable: int) -> bool:
        """Return True if one more slot may be held."""
        if obtainable > 2 * self.floor:
            return True  # no purpose has to leave more than that
        for_reads = 0 if purpose is READ else max(0, self.floor - self.held[READ])
        for_writes = 0 if purpose is WRITE else max(0, self.floor - self.held[WRITE])
        return obtainable > for_reads + for_writes

    def writes_allowed(self, obtainable: int) -> int:
        """Return how many more slots writes may hold."""
        return max(0, obtainable - max(0, self.floor - self.held[READ]))

    def take(self, purpose: Purpose) -> None:
        self.held[purpose] += 1

    def give_back(self, purpose: Purpose) -> None:
        self.held[purpose] -= 1
        assert self.held[purpose] >= 0, f"{purpose.name} slots given back twice"


class WaitQueue(Generic[T]):
    """Waiters for a scarce resource, a slot or a place at a tier: demand before prefetch, first come, first served."""

    def __init__(
        self,
        take: Callable[[Purpose, ChunkKey | None], T | None],
        give_back: Callable[[T, Purpose], None],
        blocks_only_itself: Callable[[Purpose, ChunkKey | None], bool] = lambda purpose, key: False,
    ) -> None:
        """`take` returns an item if it may be taken now, else None.

        `give_back` gets an item whose waiter has given up. `blocks_only_itself` returns True if a waiter for this chunk
        is blocked only by its own quota, so that others may overtake it.
        """
        self._take = take
        self._give_back = give_back
        self.blocks_only_itself = blocks_only_itself
        self.waiting: list[deque[tuple[asyncio.Future[T | None], ChunkKey | None]]] = [deque() for _ in Purpose]
        """Waiters by purpose, with the chunks that they need the item for."""
        self.closed = False
        self._pauses = 0

    async def wait(self, purpose: Purpose, until_s: Callable[[], float], key: ChunkKey | None = None) -> T | None:
        """Return an item; None at the loop time `until_s()`, which may change meanwhile, and when the queue is closed.

        `key` is the chunk that the item is for. Holds no item if cancelled.
        """
        if self.closed:
            return None
        waiting = self.waiting[purpose]
        if not waiting and (taken := self._take(purpose, key)) is not None:
            return taken
        outcome: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiter = outcome, key
        waiting.append(waiter)
        try:
            self.serve()
            return outcome.result() if await done_by(outcome, until_s) else None
        except BaseException:
            if outcome.done() and (taken := outcome.result()) is not None:
                self._give_back(taken, purpose)
            raise
        finally:
            if not outcome.done():
                waiting.remove(waiter)
                self.serve()  # it may have blocked the waiters after it

    def pause(self) -> None:
        """Serve no waiter until `resume`, which must follow without an await."""
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        self.serve()

    def serve(self) -> None:
        """Give waiters the items that are now available."""
        if self._pauses or not any(self.waiting):
            return
        for purpose in (READ, WRITE, PREFETCH):
            while self._serve_first(purpose):
                pass

    def _serve_first(self, purpose: Purpose) -> bool:
        """Give an item to the first waiter that may have it. Return False if there is none."""
        waiting = self.waiting[purpose]
        for waiter in waiting:
            outcome, key = waiter
            if (taken := self._take(purpose, key)) is not None:
                waiting.remove(waiter)
                outcome.set_result(taken)
                return True
            if not self.blocks_only_itself(purpose, key):
                break
        return False

    def close(self) -> None:
        """End all waits; later waits end at once."""
        self.closed = True
        for waiting in self.waiting:
            while waiting:
                waiting.popleft()[0].set_result(None)


async def done_by(work: asyncio.Future[Any], until_s: Callable[[], float]) -> bool:
    """Wait for `work` until the loop time `until_s()`, which may change meanwhile; return True if it is done.

    Never cancels `work`, even if this call is cancelled.
    """
    loop = asyncio.get_running_loop()
    while not work.done() and (left_s := until_s() - loop.time()) > 0:
        await asyncio.wait([work], timeout=left_s)
    return work.done()


ONE = (1 << 32, 1 << 64, 1)
"""The number that a lease adds to the sum of its chunk's leases (`Leased.leases`), by purpose.

A write lease exceeds any number of read leases, and a read lease any number of pins, so that a comparison gives the
purpose.
"""


def purpose_of(leases: int) -> Purpose | None:
    """Return the purpose that the memory of a chunk with these leases counts for; None without a lease."""
    return WRITE if leases >= ONE[WRITE] else READ if leases >= ONE[READ] else PREFETCH if leases else None


def pins_in(leases: int) -> int:
    """Return how many of these leases are pins."""
    return leases % ONE[READ]


class Leased(Protocol):
    """A chunk in memory that can be leased: a resident of the hot cache, or a mapping."""

    key: ChunkKey
    payload_bytes: int
    leases: int
    """Sum of `ONE[purpose]` over all leases; 0 means that the memory may be reused."""
    hot: bool
    """True while a lookup finds the chunk."""


class LeaseOwner(ABC):
    """The owner of leased memory: the CPU tier, or a tier's mappings. Each owner gets the entries that it made."""

    on_device = False
    """True for device memory."""

    def __init__(self) -> None:
        self.on_pinned_access: Callable[[ChunkKey], None] | None = None
        """Called on a read of a pinned chunk."""
        self.on_forget: Callable[[ChunkKey], None] | None = None
        """Called when a pinned chunk was removed."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def view(self, entry: Any, length_bytes: int) -> Any:
        """Return the first bytes of a chunk and its padding, as its readers get them."""

    @abstractmethod
    def begin_lease(self, entry: Any, purpose: Purpose) -> Lease: ...

    @abstractmethod
    def end_lease(self, entry: Any, purpose: Purpose) -> None: ...

    def serve(self, entry: Any, purpose: Purpose, *, counted: bool) -> Lease:
        """Return a lease for a caller that asked for the chunk.

        A read counts as an access unless the access is `counted` already; a pin is not an access.
        """
        pinned = entry.leases and pins_in(entry.leases)
        lease = self.begin_lease(entry, purpose)
        if purpose is READ:
            self.count_read(entry, counted)
            if pinned and self.on_pinned_access is not None:
                self.on_pinned_access(entry.key)  # this ends the pin: the lease keeps the memory from waiters
        return lease

    def count_read(self, entry: Any, counted: bool) -> None:  # noqa: B027 - mappings do not count reads
        """Count a read, and its access unless the access is `counted` already."""

    def end_lease_from_anywhere(self, entry: Any, purpose: Purpose) -> None:
        """Called in the thread in which a lease was garbage-collected."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end_lease, entry, purpose)


class Lease:
    """A counted reference to a chunk in memory, which is not reused before `release`.

    `view` is uint8[payload length], read-only (a tensor for a chunk in device memory), and valid until `release`. A
    view from before the cache was closed stays valid; a later access to `view` raises CacheClosed. Release on the event
    loop; using the lease as a context manager does.
    """

    __slots__ = ("_entry", "_owner", "_purpose")

    def __init__(self, owner: LeaseOwner, entry: Leased, purpose: Purpose) -> None:
        self._owner = owner
        self._entry: Leased | None = entry
        self._purpose = purpose

    @property
    def key(self) -> ChunkKey:
        return self._held().key

    @property
    def findable(self) -> bool:
        """True while a lookup finds the chunk, that is, until its removal."""
        return self._held().hot

    @property
    def on_device(self) -> bool:
        return self._owner.on_device

    @property
    def payload_bytes(self) -> int:
        return self._held().payload_bytes

    @property
    def view(self) -> Any:
        entry = self._entry or self._held()
        return self._owner.view(entry, entry.payload_bytes)

    @property
    def padded(self) -> Any:
        """The payload with its zero padding to 4096 bytes, for tiers that transfer whole pages."""
        entry = self._held()
        return self._owner.view(entry, aligned(entry.payload_bytes))

    def sibling(self) -> Lease | None:
        """Return another lease on the same memory, for a tier to write from; None if the chunk was removed meanwhile."""
        entry = self._held()
        return self._owner.begin_lease(entry, WRITE) if entry.hot else None

    def another(self, purpose: Purpose, *, counted: bool) -> Lease:
        """Return another lease for a caller that asked for the chunk, even if it was removed meanwhile.

        See `LeaseOwner.serve`.
        """
        return self._owner.serve(self._held(), purpose, counted=counted)

    def release(self) -> None:
        """End the lease. Idempotent."""
        entry = self._entry
        if entry is not None:
            self._entry = None
            self._owner.end_lease(entry, self._purpose)

    def _held(self) -> Leased:
        if self._entry is None:
            raise ValueError("the lease was released; its memory may hold another chunk by now")
        return self._entry

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        entry = self._entry
        if entry is not None:
            self._entry = None
            warnings.warn(f"lease on chunk {entry.key.hex()[:12]} was never released", ResourceWarning, stacklevel=2)
            self._owner.end_lease_from_anywhere(entry, self._purpose)
