"""TierCache: the one class that an embedder meets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from _thread import get_ident
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from math import isfinite
from operator import index, itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.ahead import Ahead, check_loop, check_number, check_seconds
from tiercache.assembly import arena_settings, make_device, make_fan_out, reader_settings
from tiercache.closing import GRACE_S, Deadline, Lingering, Part, closed
from tiercache.control.naming import Naming, TokenNaming
from tiercache.control.server import ControlServer, socket_path
from tiercache.core.keys import ChunkKey, check_key, check_keys, chunk_keys
from tiercache.core.layout import Layout
from tiercache.core.prefetch import PrefetchSettings
from tiercache.device.device import Device, gpu_in_use
from tiercache.device.driver import Driver, Event
from tiercache.device.payloads import device_payload
from tiercache.errors import CacheClosed, ConfigError, TierCacheError
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import Workers, to_the_end
from tiercache.opening import (
    DEVICE_S,
    close_device,
    close_tier,
    made,
    make_arena,
    make_tiers_in_time,
    open_tier,
    when_ended,
)
from tiercache.payloads import Source, sink_of, source_of
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.fan_out import FlushReport
from tiercache.scheduler.host_path import HostPath
from tiercache.scheduler.prefetcher import PrefetchHandle
from tiercache.scheduler.reader import Hit, Reader, Sink
from tiercache.statistics import DeviceStatistics, Statistics
from tiercache.tiers.base import DeviceTier
from tiercache.tiers.cpu import CpuTier, Lease
from tiercache.tiers.staging import StagingTier, read_into_device

if TYPE_CHECKING:
    from tiercache.config import Config

logger = logging.getLogger("tiercache")

_COPYING_THREADS = 2
_CLOSED = "the cache is closed"
_KEY_OF = itemgetter(0)


class TierCache:
    """An embedded cache. Everything belongs to the event loop that entered `open`: calls from others, and from threads that
    run none, are RuntimeErrors and change nothing (`keys`, `statistics` and `describe`, which only look, are not refused).

    Keys come from `keys` (token ids) or from an engine's own hashes (`tiercache.keys_from_hashes`).
    """

    def __init__(
        self, config: Config, layout: Layout, *, device: Driver | None = None, naming: Naming | None = None
    ) -> None:
        """Prefer `open`; this is for those who cannot use a context manager: `await start()`, `await close()`.

        `naming` says which chunks the control socket means by token ids, where they are named by other than `keys`.
        """
        self.config = config
        self.layout = layout
        self._driver = device
        self._naming = naming or TokenNaming()
        self._control: ControlServer | None = None
        self._device: Device | None = None
        self._device_path: DevicePath | None = None
        self.namespace = layout.namespace(config.tenant_salt)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        """The one that the loop ran in last."""
        self._started = self._running = self._closed = False
        self._closing: asyncio.Task[FlushReport] | None = None
        self._closers = 0
        """Who waits for that."""
        self._close_by: Deadline
        self._lingering = Lingering(self._give_memory_back)
        self._operation = _Operations(self._give_memory_back)
        self._reading = _Operations(self._give_memory_back)
        """`close` does not wait for those: it ends what they wait for."""

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, layout: Layout, *, device: Driver | None = None) -> AsyncIterator[TierCache]:
        """Take the arena, open the tiers, and close all of it at the end (writing what is queued, up to
        `close_timeout_s`). Raises ConfigError with one clear sentence when something cannot be had.

        `device` is the accelerator whose memory the cache is handed; by default the GPU that torch uses in this process, if
        it uses one by now.
        """
        cache = cls(config, layout, device=device)
        await cache.start()
        try:
            yield cache
        finally:
            await cache.close()

    async def start(self) -> None:
        """Take the arena (pre-faulted off the loop) and open the tiers, each by a deadline of its own.

        Raises ConfigError with one clear sentence when something cannot be had, or hangs. Whatever comes out, and when it is
        cancelled: nothing that was taken is kept, but for what hangs, which gives itself back when it goes on. So one may
        start again at once.
        """
        if self._started:
            raise TierCacheError("the cache was started already: a cache is started once; make another one")
        self._started = True
        self._loop = asyncio.get_running_loop()
        try:
            async with AsyncExitStack() as taken:
                await self._start(taken)
                taken.pop_all()
        except BaseException:
            self._started = self._running = False
            raise

    async def _start(self, taken: AsyncExitStack) -> None:
        """Everything that is taken goes to `taken`, with how it is given back."""
        settings = arena_settings(self.config, self.layout)
        self._device = await made(
            "device", DEVICE_S, close_device, make_device, self.config, self.layout, self._driver, gpu_in_use()
        )
        # A tier that hangs in its opening may still register the arena with something: it stays mapped meanwhile.
        left_behind: set[asyncio.Future[None]] = set()
        taken.callback(lambda: when_ended(left_behind, lambda: close_device(self._device)))
        tiers = await make_tiers_in_time(self.config, self.layout, self._device)
        self._arena = arena = await make_arena(settings)
        taken.callback(lambda: when_ended(left_behind, arena.close))
        self._copiers = Workers("copy", _COPYING_THREADS)
        taken.callback(self._copiers.close)
        pool = SlotPool(arena, self.layout.chunk_bytes)
        taken.callback(pool.close)  # before the arena: a view of its memory keeps all of it mapped
        if self._device is not None:
            self._device.begin()
            await to_the_end(self._copiers.submit(self._device.pin, arena.memory))
        self.cpu = CpuTier(pool, self._copiers, policy=self.config.cache_policy, keep=self.config.local_cpu)
        await self.cpu.open()
        for tier in tiers:
            tier.use_arena(arena)
            await open_tier(tier, left_behind)
            taken.push_async_callback(close_tier, tier)
        self.tiers = tiers
        await self._connect(pool)
        taken.push_async_callback(self.ahead.close)
        self._running = True
        if self.config.control_socket is not None:
            path = socket_path(self.config.control_socket, (self.layout.rank, self.layout.world_size))
            control = ControlServer(path, self, self._naming)
            await control.start()
            self._control = control

    async def _connect(self, pool: SlotPool) -> None:
        """Readers, writers and the prefetcher, on tiers that are open."""
        tiers = self.tiers
        self._fan_out = make_fan_out(self.config, tiers, self._arena.size_bytes, pool.slot_bytes, self.cpu.budget)
        self._host_path = HostPath(self.cpu, self._fan_out)
        reading = reader_settings(self.config, self.layout)
        readable = [tier for tier in tiers if tier.reads]
        self._only_read = [tier for tier in readable if not tier.writes]
        if self._device is None:
            self._reader = Reader(self.cpu, readable, reading)
        else:
            staging = StagingTier(self._device, self._copiers)
            await staging.open()
            self._reader = Reader(self.cpu, [staging, *readable], reading)
            serving = [tier for tier in readable if isinstance(tier, DeviceTier) and tier.serves_device]
            self._device_reader = Reader(staging, serving, reading, read_into_device)
            self._device_path = DevicePath(
                self._device, self.cpu, staging, self._reader, self._device_reader, self._fan_out
            )
        hot_bytes = pool.count * self.layout.chunk_bytes
        share_bytes = int(self.config.prefetch_share * pool.count) * self.layout.chunk_bytes
        self.ahead = Ahead(
            self.cpu,
            self._reader,
            PrefetchSettings(hot_bytes, share_bytes, bytes_per_s=self.config.prefetch_bytes_per_s),
            self.layout.chunk_bytes,
            reading.deadline_s,
            self._fan_out.continued,
        )

    async def close(self, timeout_s: float | None = None) -> FlushReport:
        """Write what is queued for up to `timeout_s`, then give everything back. Idempotent; of several calls at a time the
        nearest deadline counts, and all get the same report.

        Returns what was not written. What hangs is left behind half a second after the deadline, and its memory stays mapped
        until it ends. Cancelled, it stops writing, gives everything back, and raises CancelledError then.
        """
        if not self._running and (self._closing is None or self._closing.done()):
            return FlushReport() if self._closing is None else self._closing.result()
        check_loop(self._loop)
        timeout_s = self.config.close_timeout_s if timeout_s is None else timeout_s
        check_number("timeout_s", timeout_s)
        if self._closing is None:
            self._close_by = Deadline()
            self._closing = asyncio.get_running_loop().create_task(self._close(self._close_by), name="tiercache-close")
        now_s = asyncio.get_running_loop().time()
        self._close_by.bring_forward(now_s + timeout_s)
        self._closers += 1
        try:
            return await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            if self._closers == 1:  # or it goes on for the others
                self._close_by.bring_forward(asyncio.get_running_loop().time())
                while not self._closing.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([self._closing])
            raise
        finally:
            self._closers -= 1

    async def _close(self, deadline: Deadline) -> FlushReport:
        loop = asyncio.get_running_loop()
        before = self._fan_out.counts()
        await deadline.bounds(self._finished())
        report = self._fan_out.report(before)
        self._running = False
        if not report.complete:
            logger.warning("closed before everything was written: %s", report.pending)
        deadline.least_s = loop.time() + GRACE_S
        parts: list[Part] = [("prefetching", self.ahead.close)]
        if self._control is not None:
            parts.append(("control socket", self._control.close))
        writing_until_s = (loop.time() + deadline.until_s) / 2  # the other half is for the tiers
        writing: Part = ("writing", lambda: self._fan_out.close(writing_until_s))
        for group in (parts, [("reading", reader.close) for reader in self._readers], [writing]):
            self._lingering.keep(await closed(deadline, *group))
        self._lingering.keep(await closed(deadline, *((tier.name, tier.close) for tier in self.tiers)))
        self._lingering.keep(self._behind)
        await self._lingering.ended(min(deadline.until_s, loop.time() + GRACE_S))
        await self.cpu.close()
        self._copiers.close()
        self._closed = True
        if hanging := self._lingering.hanging + self._operation.under_way:
            logger.warning("%d operations hang in a device; their memory stays mapped until they end", hanging)
        if called_off := self._lingering.called_off:
            logger.warning(
                "the event loop was shut down before the cache was closed, with %d operations under way: its memory stays "
                "mapped. Use `async with TierCache.open(...)`, or await `close`, before the loop ends",
                called_off,
            )
        self._give_memory_back()
        return report

    async def _finished(self) -> None:
        """Until no operation is under way (a put has nothing queued before its end, and copies of a device go on without
        their waiters), and everything is written or given up."""
        await self._operation.ended()
        await self._fan_out.drained()

    def _give_memory_back(self) -> None:
        """Once the cache is closed and nothing uses it any more."""
        if any(task.done() for task in self._behind):
            asyncio.get_running_loop().call_soon(self._give_memory_back)  # what they owe at their end comes before that
        elif self._closed and not (
            self._lingering.tasks or self._stuck or self._operation.under_way or self._reading.under_way
        ):
            close_device(self._device)
            self.cpu.pool.close()
            self._arena.close()

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
        returns. False: no slot came free by the deadline (in seconds; `blocking_timeout_secs` by default), or the chunk was
        forgotten meanwhile. Cancelled before it is copied it stores nothing; while it waits for room in a tier's queue, the
        chunk is hot. It no longer reads `payload` when CancelledError comes out.
        """
        if self._device_path is not None:
            return bool(await self.put_many([key], [payload], deadline_s=deadline_s))
        length, source = source_of(payload)
        return bool(await self.put_from([(key, length, source)], deadline_s=deadline_s))

    async def put_many(
        self,
        keys: Sequence[ChunkKey],
        payloads: Sequence[Any],
        *,
        after: Event | None = None,
        deadline_s: float | None = None,
        prefix: bool = False,
    ) -> int:
        """`put` for many chunks at once; returns how many are in the cache now.

        Tensors and `PagedChunk`s in device memory are copied on streams of the cache's own, which begin after the driver's
        event `after` (by default: after what the calling thread's current stream has been given), and are read until this
        returns. With `local_cpu: false` and only device tiers they never come to the host; they count as stored once they
        are on their way to those. `prefix` says that the chunks follow one another, which eviction wants to know. Raises
        LayoutError for device memory that is not laid out as it must be.
        """
        self._check_open()
        check_keys(keys)
        if len(keys) != len(payloads):
            raise ValueError(f"expected one payload a key: {len(keys)} keys, {len(payloads)} payloads")
        chunks, host = [], []
        for key, payload in zip(keys, payloads, strict=True):
            chunk = device_payload(self._device.driver, payload) if self._device is not None else None
            if chunk is None:
                host.append((key, *source_of(payload)))
            else:
                self._check_length(chunk.payload_bytes)
                chunks.append((key, chunk))
        stored = await self.put_from(host, deadline_s=deadline_s, prefix=prefix and not chunks) if host else 0
        if chunks and self._device_path is not None:
            deadline = asyncio.get_running_loop().time() + self._wait_s(deadline_s)
            with self._operation, self._caller_event(after) as event:
                stored += await self._device_path.put(chunks, event, deadline)
        if prefix and chunks:
            self.cpu.follow(keys)
        return stored

    async def put_from(
        self,
        items: Sequence[tuple[ChunkKey, int, Source]],
        *,
        deadline_s: float | None = None,
        prefix: bool = False,
    ) -> int:
        """Store chunks that are filled in by callables: (key, payload length in bytes, source).

        Each source gets a uint8 vector of that length on a worker thread; one hand-over serves the whole batch. Returns how
        many of the chunks are hot now. `prefix` and deadline as for `put_many`.

        Chunks become hot in parts, in order: at most a quarter of the arena and 32 MiB each, fewer where a slot has to be
        waited for, since a put that held filled slots while it waits would hold what others wait for. A source that raises
        ends the put with its exception, and a cancellation ends it too: of the part that is being copied nothing is stored
        and of those after it, those before it are, whole. So what is stored is a prefix of `items` (but for chunks that
        somebody else was storing at the same time).
        """
        self._check_open()
        check_keys(map(_KEY_OF, items))
        most_bytes = self.layout.chunk_bytes
        for _, length, _ in items:
            if not 0 < length <= most_bytes:
                self._check_length(length)
        with self._operation:
            stored = await self._host_path.put(items, self._wait_s(deadline_s), prefix=prefix)
        if prefix:
            self.cpu.follow([key for key, _, _ in items])
        return stored

    async def store(self, tokens: Sequence[int] | np.ndarray, payloads: Sequence[Any]) -> int:
        """`put` for the chunks of `tokens`, in order; returns how many are hot now."""
        keys = self.keys(tokens)
        if len(payloads) != len(keys):
            raise ValueError(f"payloads: expected {len(keys)} (one a chunk), found {len(payloads)}")
        return await self.put_many(keys, payloads, prefix=True)

    # Reading

    def get(self, key: ChunkKey, *, deadline_s: float | None = None) -> _Get:
        """`async with cache.get(key) as lease`: a zero-copy view of the chunk (`lease.view`), None on a miss.

        A hot chunk is answered without leaving the loop. `deadline_s` in seconds; what arrives later is a miss for this
        caller and is kept for the next.
        """
        if not self._running:
            raise CacheClosed(_CLOSED)
        # The thread: asking for the loop would cost a hot get 5 %. What is not hot asks for it (`_Get`); to answer what is
        # hot harms nobody as long as it is the loop's thread.
        if get_ident() != self._thread:
            check_loop(self._loop)
            self._thread = get_ident()
        check_key(key)
        return _Get(self, key, deadline_s)

    async def get_into(
        self,
        keys: Sequence[ChunkKey],
        buffers: Sequence[Any],
        *,
        after: Event | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Copy verified chunks into writable buffers, arrays, tensors or `PagedChunk`s of exactly their length.

        Returns how many chunks of the contiguous prefix were delivered by the deadline. Buffers behind a gap may have been
        written. When this has returned or raised, nothing touches the buffers any more (but for a device that hangs in a
        copy for 30 s, which DeviceError says). Buffers are either all in host memory or all in device memory; the latter
        are written after the driver's event `after`, by default after what the calling thread's stream has been given.
        """
        self._check_open()
        check_keys(keys)
        if len(keys) != len(buffers):
            raise ValueError(f"expected one buffer a key: {len(keys)} keys, {len(buffers)} buffers")
        if self._device is not None and self._device_path is not None and buffers:
            chunks = [device_payload(self._device.driver, buffer) for buffer in buffers]
            there = [chunk for chunk in chunks if chunk is not None]
            if len(there) == len(chunks):
                deadline = asyncio.get_running_loop().time() + self._wait_s(deadline_s)
                with self._operation, self._caller_event(after) as event:
                    delivered = await self._device_path.get(keys, there, event, deadline)
                self._fan_out.used(keys[:delivered], self._host_path.lease_for)
                return delivered
            if there:
                raise ValueError("buffers: expected all in host memory or all in device memory, found both")
        return await self.get_to(keys, [sink_of(buffer) for buffer in buffers], deadline_s=deadline_s)

    async def get_to(self, keys: Sequence[ChunkKey], sinks: Sequence[Sink], *, deadline_s: float | None = None) -> int:
        """As `get_into`, with a callable for each chunk that gets a read-only uint8 vector on a worker thread."""
        self._check_open()
        check_keys(keys)
        if len(keys) != len(sinks):
            raise ValueError(f"expected one buffer a key: {len(keys)} keys, {len(sinks)} buffers")
        deadline = asyncio.get_running_loop().time() + self._wait_s(deadline_s)
        with self._reading:
            delivered = await self._reader.deliver(keys, sinks, deadline)
        self._fan_out.used(keys[:delivered], self._host_path.lease_for)
        return delivered

    async def load(self, tokens: Sequence[int] | np.ndarray, buffers: Sequence[Any]) -> int:
        """`get_into` for the first chunks of `tokens`, as many as there are buffers. Returns tokens delivered."""
        keys = self.keys(tokens)[: len(buffers)]
        chunks = await self.get_into(keys, list(buffers)[: len(keys)])
        return min(chunks * self.layout.chunk_tokens, len(tokens))

    async def warm(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> int:
        """Promote chunks into the hot cache; returns how many of the contiguous prefix got there."""
        self._check_open()
        check_keys(keys)
        return await self._reader.warm(keys, asyncio.get_running_loop().time() + self._wait_s(deadline_s))

    def warm_soon(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to promote the chunks of a request that is here and waits for its turn. Does not wait.

        They are prefetched, after those of earlier requests and before all that is only predicted, within the prefetcher's
        share and bandwidth. With `local_cpu: false` there is nothing to promote into.
        """
        check_loop(self._loop)
        check_keys(keys)
        if self.cpu.keep:
            self.ahead.queued(keys)

    def prefetch(
        self,
        what: Sequence[int] | Sequence[ChunkKey] | np.ndarray,
        *,
        deadline: float = 0.0,
        priority: int = 0,
        ttl: float = 60.0,
    ) -> PrefetchHandle:
        """Promote the chunks of a prefix (token ids, or chunk keys) into the hot cache before somebody asks for them.

        `deadline` is in how many seconds they will be needed: among prefetches of one `priority` (smaller goes first) the
        sooner one does. They are kept until they are read, at most until `ttl` seconds after the deadline. Returns at once;
        await the handle for what became of it, or look at its `progress`, or `cancel()` it. Demand reads go first, and all
        prefetches together stay within `prefetch_share` and `prefetch_bytes_per_s`. A deadline below 0 counts as 0. Raises
        ValueError or TypeError for times and priorities that are no numbers, and ConfigError with `local_cpu: false`: there
        is no hot cache to promote into.
        """
        self._check_open()
        if not isfinite(deadline):
            raise ValueError(f"deadline: expected a number of seconds, found {deadline}")
        check_seconds("ttl", ttl)
        priority = index(priority)
        if not self.cpu.keep:
            raise ConfigError("prefetch: local_cpu is false, so there is no hot cache to promote into; set local_cpu: true")
        given = list(what)
        keys: list[Any] = given if given and isinstance(given[0], bytes) else self.keys(given)
        check_keys(keys)
        return self.ahead.prefetch(keys, deadline, ttl, priority, self._reader.settings.probe_deadline_s)

    # Asking

    async def lookup(self, tokens: Sequence[int] | np.ndarray) -> Hit:
        """How far the contiguous prefix of `tokens` reaches, and in which tiers; never longer than `lookup_timeout_ms`."""
        hit = await self.lookup_keys(self.keys(tokens))
        return Hit(hit.chunks, min(hit.chunks * self.layout.chunk_tokens, len(tokens)), hit.by_tier)

    async def lookup_keys(self, keys: Sequence[ChunkKey]) -> Hit:
        """As `lookup`, for keys; `tokens` counts full chunks."""
        self._check_open()
        check_keys(keys)
        chunks, by_tier = await self._reader.lookup(keys)
        return Hit(chunks, chunks * self.layout.chunk_tokens, by_tier)

    def lookup_hot(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on without a gap, are hot. Does not wait; does not count as a use."""
        check_loop(self._loop)
        check_keys(keys)
        return self.cpu.prefix(keys)

    def describe(self) -> str:
        """One line for a log: the arena and the tiers below it."""
        arena = f"{self._arena.size_bytes / 2**30:.2f} GB of {self._arena.kind} memory in {self.cpu.pool.count} slots"
        device = [self._device_path.staging.describe()] if self._device_path is not None else []
        return " -> ".join([f"cpu ({arena})", *device, *(tier.describe() for tier in self.tiers)])

    def statistics(self) -> Statistics:
        if not self._running:
            raise CacheClosed(_CLOSED)
        return Statistics(
            tiers={tier.name: tier.statistics() for tier in (self.cpu, *self.tiers)},
            writers={writer.tier.name: writer.statistics() for writer in self._fan_out.writers},
            reader=self._reader.counters,
            breakers=self._reader.breakers(),
            slots=self.cpu.pool.count,
            slots_free=self.cpu.pool.free,
            prefetch=self.ahead.plan.accounts,
            puts_skipped=self._host_path.skipped + (self._device_path.skipped if self._device_path is not None else 0),
            device=self._device_statistics(),
            stuck=self._stuck,
        )

    # Upkeep

    async def flush(self, timeout_s: float = 60.0) -> FlushReport:
        """Wait until all that was put is written to its tiers, for up to `timeout_s`."""
        self._check_open()
        check_number("timeout_s", timeout_s)
        return await self._fan_out.flush(timeout_s)

    async def forget(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> None:
        """Remove chunks from every tier, waiting for up to `deadline_s` (`blocking_timeout_secs` by default).

        What began before this - a put, a read, a prefetch, a write, even a stuck one - brings nothing of them back; what
        begins after it is stored, and read back from every tier. Leases that somebody has stay valid. A tier that fails
        keeps no other from it; its error is raised at the end, and TierUnavailable where a chunk could not be removed in
        time. Also then, and when this is cancelled, nobody gets it from there any more, and its removal goes on until it is
        done or the cache is closed (a durable tier that could not be reached until then has it again after a restart). From
        tiers that are only read nothing is removed; they are not asked for these chunks any more.
        """
        self._check_open()
        check_keys(keys)
        timeout_s = self._wait_s(deadline_s)
        with self._operation:
            await self._fan_out.forget(keys, timeout_s, self._forget_from_memory)

    def _forget_from_memory(self, key: ChunkKey) -> None:
        self.cpu.forget(key)
        if self._device_path is not None:
            self._device_path.staging.forget(key)
        for tier in self._only_read:
            tier.traffic.refuse(key)

    def clear_hot(self) -> int:
        """Empty the hot cache (chunks in use stay until their leases end); returns how many chunks left it."""
        check_loop(self._loop)
        return self.cpu.clear()

    @property
    def _readers(self) -> list[Reader]:
        return [self._reader] if self._device_path is None else [self._reader, self._device_reader]

    @property
    def _behind(self) -> Iterator[asyncio.Task[Any]]:
        """Reads and writes that were left behind."""
        for writer in self._fan_out.writers:
            yield from writer.lingering
        for reader in self._readers:
            yield from reader.flights.lingering

    @property
    def _stuck(self) -> int:
        device = self._device_reader.stuck + self._device_path.device.unfinished if self._device_path is not None else 0
        return device + self._reader.stuck + sum(writer.stuck for writer in self._fan_out.writers)

    def _device_statistics(self) -> DeviceStatistics | None:
        if self._device is None:
            return None
        pool = self._device.pool
        return DeviceStatistics(pool.count, pool.free, self._device_reader.counters, self._device_reader.breakers())

    @contextmanager
    def _caller_event(self, after: Event | None) -> Iterator[Event]:
        """`after`, or an event of the calling thread's own stream."""
        assert self._device is not None
        driver = self._device.driver
        own = driver.record(driver.current_stream()) if after is None else None
        try:
            yield own if after is None else after
        finally:
            if own is not None:
                driver.release(own)

    def _check_length(self, length_bytes: int) -> None:
        if not 0 < length_bytes <= self.layout.chunk_bytes:
            raise ValueError(
                f"payload: expected 1..{self.layout.chunk_bytes} bytes (the layout's chunk), found {length_bytes}"
            )

    def _wait_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return float(self.config.blocking_timeout_secs)
        check_number("deadline_s", deadline_s)
        return deadline_s

    def _check_open(self) -> None:
        if not self._running:
            raise CacheClosed(_CLOSED)
        check_loop(self._loop)


class _Operations:
    """What `close` waits for. `with` it: one more, until the end of that."""

    __slots__ = ("_idle", "_when_ended", "under_way")

    def __init__(self, when_ended: Callable[[], None]) -> None:
        self.under_way = 0
        self._when_ended = when_ended
        self._idle: asyncio.Event | None = None

    async def ended(self) -> None:
        """Until none is under way."""
        if self.under_way:
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()

    def __enter__(self) -> None:
        self.under_way += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.under_way -= 1
        if not self.under_way:
            if self._idle is not None:
                self._idle.set()
            self._when_ended()


class _Get:
    """What `TierCache.get` returns. A class and not a generator: it is on the path that must take microseconds."""

    __slots__ = ("_cache", "_deadline_s", "_key", "_lease")

    def __init__(self, cache: TierCache, key: ChunkKey, deadline_s: float | None) -> None:
        self._cache = cache
        self._key = key
        self._deadline_s = deadline_s
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease | None:
        reader = self._cache._reader
        lease = reader.lease_now(self._key)
        if lease is None:
            check_loop(self._cache._loop)
            until_s = asyncio.get_running_loop().time() + self._cache._wait_s(self._deadline_s)
            lease = await reader.fetch(self._key, until_s)
        self._lease = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.release()
