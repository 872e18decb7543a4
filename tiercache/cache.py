"""TierCache: the one class that an embedder meets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.assembly import arena_settings, make_tiers
from tiercache.core.budget import Purpose
from tiercache.core.header import aligned
from tiercache.core.keys import ChunkKey, chunk_keys
from tiercache.core.layout import Layout
from tiercache.errors import CacheClosed
from tiercache.memory.arena import Arena
from tiercache.memory.slots import Slot, SlotPool
from tiercache.memory.workers import Workers, to_the_end
from tiercache.payloads import Source, sink_of, source_of
from tiercache.scheduler.reader import Hit, Reader, ReaderSettings, ReaderStatistics, Sink
from tiercache.scheduler.writer import FanOut, FlushReport, TierWriter, WriterSettings, WriterStatistics
from tiercache.tiers.base import TierStatistics
from tiercache.tiers.cpu import CpuTier, Lease

if TYPE_CHECKING:
    from tiercache.config import Config

logger = logging.getLogger("tiercache")

_COPYING_THREADS = 2
_BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Statistics:
    """A snapshot: what each tier holds and did, what the writers did and still have to do, what the readers found."""

    tiers: dict[str, TierStatistics]
    writers: dict[str, WriterStatistics]
    reader: ReaderStatistics
    breakers: dict[str, str]
    slots: int
    slots_free: int
    puts_skipped: int
    stuck: int
    """Operations that outlived their deadline and still hold a slot."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class TierCache:
    """An embedded cache. Everything belongs to the event loop that entered `open`.

    Keys come from `keys` (token ids) or from an engine's own hashes (`tiercache.keys_from_hashes`).
    """

    def __init__(self, config: Config, layout: Layout) -> None:
        """Prefer `open`; this is for those who cannot use a context manager: `await start()`, `await close()`."""
        self.config = config
        self.layout = layout
        self.namespace = layout.namespace(config.tenant_salt)
        self._filling: dict[ChunkKey, asyncio.Future[None]] = {}
        self._warming: set[asyncio.Task[int]] = set()
        self._puts_skipped = 0
        self._running = False

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, layout: Layout) -> AsyncIterator[TierCache]:
        """Take the arena, open the tiers, and close all of it at the end (writing what is queued, up to
        `close_timeout_s`). Raises ConfigError with one clear sentence when something cannot be had."""
        cache = cls(config, layout)
        await cache.start()
        try:
            yield cache
        finally:
            await cache.close()

    async def start(self) -> None:
        """Take the arena (pre-faulted off the loop) and open the tiers."""
        # Both may raise for a wrong configuration: nothing is taken by then.
        tiers = make_tiers(self.config, self.layout)
        settings = arena_settings(self.config)
        self._arena = await asyncio.to_thread(Arena, settings)
        try:
            pool = SlotPool(self._arena, self.layout.chunk_bytes)
            self._copiers = Workers("copy", _COPYING_THREADS)
            self.cpu = CpuTier(
                pool, self._copiers, policy=self.config.cache_policy, keep=self.config.local_cpu
            )
            await self.cpu.open()
            opened = []
            try:
                for tier in tiers:
                    await tier.open()
                    opened.append(tier)
            except BaseException:
                for tier in opened:
                    await tier.close()
                raise
        except BaseException:
            self._arena.close()
            raise
        self.tiers = tiers
        queue_bytes = self.config.write_queue_bytes or self._arena.size_bytes // 2
        self._fan_out = FanOut(
            [
                TierWriter(
                    tier,
                    WriterSettings(
                        queue_bytes=max(queue_bytes, pool.slot_bytes),
                        on_full=self.config.on_queue_full,
                        wait_s=self.config.queue_wait_s,
                    ),
                )
                for tier in tiers
            ]
        )
        self._reader = Reader(
            self.cpu,
            tiers,
            ReaderSettings(
                deadline_s=self.config.blocking_timeout_secs, probe_deadline_s=self.config.lookup_timeout_ms / 1000
            ),
        )
        self._running = True

    async def close(self, timeout_s: float | None = None) -> FlushReport:
        """Write what is queued for up to `timeout_s`, then give everything back. Idempotent.

        Returns what was not written. Memory that a hung operation still uses stays mapped until the process ends.
        """
        if not self._running:
            return FlushReport()
        report = await self._fan_out.flush(self.config.close_timeout_s if timeout_s is None else timeout_s)
        self._running = False
        for task in list(self._warming):
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        if not report.complete:
            logger.warning("closed before everything was written: %s", report.pending)
        await self._reader.close()
        await self._fan_out.close()
        for tier in (*self.tiers, self.cpu):
            await tier.close()
        self._copiers.close()
        if self._stuck:
            logger.warning("%d operations hang in a device; their memory stays mapped", self._stuck)
        else:
            self.cpu.pool.close()
            self._arena.close()
        return report

    # Keys

    def keys(self, tokens: Sequence[int] | np.ndarray) -> list[ChunkKey]:
        """Keys of the full chunks of `tokens`, and of the partial tail when `save_unfull_chunk` is set."""
        return chunk_keys(
            self.namespace, tokens, self.layout.chunk_tokens, partial=self.config.save_unfull_chunk
        )

    # Writing

    async def put(self, key: ChunkKey, payload: Any, *, deadline_s: float | None = None) -> bool:
        """Store a chunk; returns once it is hot, and True if it is. Other tiers are written in the background.

        `payload` is bytes-like, a numpy array or a torch tensor of at most `layout.chunk_bytes`, and is read until this
        returns. False: no slot came free by the deadline (in seconds; `blocking_timeout_secs` by default).
        Cancelled, it stores nothing, and no longer reads `payload` when CancelledError comes out.
        """
        length, source = source_of(payload)
        return bool(await self.put_from([(key, length, source)], deadline_s=deadline_s))

    async def put_from(
        self, items: Sequence[tuple[ChunkKey, int, Source]], *, deadline_s: float | None = None
    ) -> int:
        """Store chunks that are filled in by callables: (key, payload length in bytes, source).

        Each source gets a uint8 vector of that length on a worker thread; one hand-over serves the whole batch. Returns how
        many of the chunks are hot now. Cancellation and deadline as for `put`. A source that raises fails the batch
        with its exception; none of the batch is stored then.
        """
        self._check_open()
        chunk_bytes = self.layout.chunk_bytes
        for _, length, _ in items:
            if not 0 < length <= chunk_bytes:
                raise ValueError(f"payload: expected 1..{chunk_bytes} bytes (the layout's chunk), found {length}")
        wait_s = self._wait_s(deadline_s)
        stored = 0
        for start in range(0, len(items), self._batch_items):
            stored += await self._put_batch(items[start : start + self._batch_items], wait_s)
        return stored

    async def _put_batch(self, items: Sequence[tuple[ChunkKey, int, Source]], wait_s: float) -> int:
        fills: dict[ChunkKey, tuple[Slot, int, Source]] = {}
        leases: list[Lease] = []
        elsewhere: list[tuple[ChunkKey, asyncio.Future[None]]] = []
        filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for key, length, source in items:
                if key in fills:
                    continue
                lease = self.cpu.lease(key, writes=True)
                if lease is not None:
                    self.cpu.touch([key])
                    leases.append(lease)
                elif key in self._filling:
                    elsewhere.append((key, self._filling[key]))
                else:
                    slot = self.cpu.try_reserve(Purpose.WRITE)
                    if slot is not None:
                        self._filling[key] = filled
                    else:
                        slot = await self._slot_to_fill(key, filled, wait_s)
                    if slot is not None:
                        fills[key] = (slot, length, source)
            if fills:
                work = [(self.cpu.pool.view(slot), length, source) for slot, length, source in fills.values()]
                await to_the_end(self._copiers.submit(_fill, work))
        except BaseException:
            for slot, _, _ in fills.values():
                self.cpu.abandon(slot, Purpose.WRITE)
            for lease in leases:
                lease.release()
            raise
        else:
            leases += [
                self.cpu.publish(key, slot, length, Purpose.WRITE) for key, (slot, length, _) in fills.items()
            ]
        finally:
            for key in fills:
                self._filling.pop(key, None)
            filled.set_result(None)
        stored = len(leases)
        await self._fan_out.offer(leases, self._write_lease)
        for key, other in elsewhere:
            # Somebody else is filling the same chunk at this moment: theirs is as good as ours.
            await asyncio.wait([other], timeout=wait_s)
            stored += self.cpu.contains(key)
        return stored

    async def _slot_to_fill(self, key: ChunkKey, filled: asyncio.Future[None], wait_s: float) -> Slot | None:
        """A slot for `key`, announced as being filled; None when none came free in time."""
        slot = await self.cpu.reserve(Purpose.WRITE, wait_s)
        if slot is None:
            self._puts_skipped += 1
        elif self._filling.setdefault(key, filled) is not filled or self.cpu.contains(key):
            # While we waited, somebody else began the same chunk, or finished it.
            self.cpu.abandon(slot, Purpose.WRITE)
            return None
        return slot

    async def store(self, tokens: Sequence[int] | np.ndarray, payloads: Sequence[Any]) -> int:
        """`put` for the chunks of `tokens`, in order; returns how many are hot now."""
        keys = self.keys(tokens)
        if len(payloads) != len(keys):
            raise ValueError(f"payloads: expected {len(keys)} (one a chunk), found {len(payloads)}")
        return await self.put_from([(key, *source_of(payload)) for key, payload in zip(keys, payloads, strict=True)])

    # Reading

    def get(self, key: ChunkKey, *, deadline_s: float | None = None) -> _Get:
        """`async with cache.get(key) as lease`: a zero-copy view of the chunk (`lease.view`), None on a miss.

        A hot chunk is answered without leaving the loop. `deadline_s` in seconds; what arrives later is a miss for this
        caller and is kept for the next.
        """
        self._check_open()
        return _Get(self, key, self._wait_s(deadline_s))

    async def get_into(self, keys: Sequence[ChunkKey], buffers: Sequence[Any], *, deadline_s: float | None = None) -> int:
        """Copy verified chunks into writable buffers, arrays or tensors of exactly their length.

        Returns how many chunks of the contiguous prefix were delivered by the deadline. Buffers behind a gap may have been
        written. When this has returned or raised, nothing touches the buffers any more.
        """
        return await self.get_to(keys, [sink_of(buffer) for buffer in buffers], deadline_s=deadline_s)

    async def get_to(self, keys: Sequence[ChunkKey], sinks: Sequence[Sink], *, deadline_s: float | None = None) -> int:
        """As `get_into`, with a callable for each chunk that gets a read-only uint8 vector on a worker thread."""
        self._check_open()
        if len(keys) != len(sinks):
            raise ValueError(f"expected one buffer a key: {len(keys)} keys, {len(sinks)} buffers")
        return await self._reader.deliver(keys, sinks, asyncio.get_running_loop().time() + self._wait_s(deadline_s))

    async def load(self, tokens: Sequence[int] | np.ndarray, buffers: Sequence[Any]) -> int:
        """`get_into` for the first chunks of `tokens`, as many as there are buffers. Returns tokens delivered."""
        keys = self.keys(tokens)[: len(buffers)]
        chunks = await self.get_into(keys, list(buffers)[: len(keys)])
        return min(chunks * self.layout.chunk_tokens, len(tokens))

    async def warm(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> int:
        """Promote chunks into the hot cache; returns how many of the contiguous prefix got there."""
        self._check_open()
        return await self._reader.warm(keys, asyncio.get_running_loop().time() + self._wait_s(deadline_s))

    def warm_soon(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to promote chunks and do not wait: somebody is about to ask for them."""
        task = asyncio.get_running_loop().create_task(self.warm(keys), name="tiercache-warm")
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    # Asking

    async def lookup(self, tokens: Sequence[int] | np.ndarray) -> Hit:
        """How far the contiguous prefix of `tokens` reaches, and in which tiers; never longer than `lookup_timeout_ms`."""
        hit = await self.lookup_keys(self.keys(tokens))
        return Hit(hit.chunks, min(hit.chunks * self.layout.chunk_tokens, len(tokens)), hit.by_tier)

    async def lookup_keys(self, keys: Sequence[ChunkKey]) -> Hit:
        """As `lookup`, for keys; `tokens` counts full chunks."""
        self._check_open()
        chunks, by_tier = await self._reader.lookup(keys)
        return Hit(chunks, chunks * self.layout.chunk_tokens, by_tier)

    def lookup_hot(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on without a gap, are hot. Does not wait; does not count as a use."""
        return self.cpu.prefix(keys)

    def describe(self) -> str:
        """One line for a log: the arena and the tiers below it."""
        arena = f"{self._arena.size_bytes / 2**30:.2f} GB of {self._arena.kind} memory in {self.cpu.pool.count} slots"
        return " -> ".join([f"cpu ({arena})", *(tier.describe() for tier in self.tiers)])

    def statistics(self) -> Statistics:
        self._check_open()
        return Statistics(
            tiers={tier.name: tier.statistics() for tier in (self.cpu, *self.tiers)},
            writers={writer.tier.name: writer.statistics() for writer in self._fan_out.writers},
            reader=self._reader.counters,
            breakers=self._reader.breakers(),
            slots=self.cpu.pool.count,
            slots_free=self.cpu.pool.free,
            puts_skipped=self._puts_skipped,
            stuck=self._stuck,
        )

    # Upkeep

    async def flush(self, timeout_s: float = 60.0) -> FlushReport:
        """Wait until all that was put is written to its tiers, for up to `timeout_s`."""
        self._check_open()
        return await self._fan_out.flush(timeout_s)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from every tier."""
        self._check_open()
        for key in keys:
            self.cpu.forget(key)
            for tier in self.tiers:
                await tier.remove(key)

    def clear_hot(self) -> int:
        """Empty the hot cache (chunks in use stay until their leases end); returns how many chunks left it."""
        return self.cpu.clear()

    @property
    def _stuck(self) -> int:
        return self._reader.stuck + sum(writer.stuck for writer in self._fan_out.writers)

    @property
    def _batch_items(self) -> int:
        """Chunks that are copied in one hand-over: few enough that tiers begin to write while the rest is copied, and that a
        batch fits beside the floor for reads (it would wait for its own slots)."""
        return max(1, min(self.cpu.pool.count // 4, max(1, _BATCH_BYTES // self.cpu.pool.slot_bytes)))

    def _wait_s(self, deadline_s: float | None) -> float:
        return float(self.config.blocking_timeout_secs) if deadline_s is None else deadline_s

    def _write_lease(self, key: ChunkKey) -> Lease | None:
        return self.cpu.lease(key, writes=True)

    def _check_open(self) -> None:
        if not self._running:
            raise CacheClosed("the cache is closed")


class _Get:
    """What `TierCache.get` returns. A class and not a generator: it is on the path that must take microseconds."""

    __slots__ = ("_cache", "_key", "_lease", "_wait_s")

    def __init__(self, cache: TierCache, key: ChunkKey, wait_s: float) -> None:
        self._cache = cache
        self._key = key
        self._wait_s = wait_s
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease | None:
        reader = self._cache._reader
        lease = reader.lease_now(self._key)
        if lease is None:
            lease = await reader.fetch(self._key, asyncio.get_running_loop().time() + self._wait_s)
        self._lease = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.release()


def _fill(work: Sequence[tuple[np.ndarray, int, Source]]) -> None:
    """Fill slots and zero the padding behind each payload, so that no tier ever stores another chunk's bytes."""
    for slot, length, source in work:
        source(slot[:length])
        end = aligned(length)
        if end != length:
            slot[length:end] = 0
