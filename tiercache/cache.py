"""TierCache, the main class for embedders."""

from __future__ import annotations

import asyncio
from _thread import get_ident
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import itemgetter
from types import TracebackType
from typing import Any

import numpy as np

from tiercache.config import Config
from tiercache.config.changes import merged
from tiercache.control.naming import Naming, TokenNaming
from tiercache.control.server import ControlServer, socket_path
from tiercache.core.keys import ChunkKey, check_key, check_keys, check_one_each, chunk_keys
from tiercache.core.layout import Layout
from tiercache.device.driver import Driver, Event
from tiercache.device.paged import DevicePayload, device_payload
from tiercache.errors import CacheClosed, ConfigError, TierCacheError
from tiercache.lifecycle import FILE_SYSTEMS_S, Closing, Parts, build, by_deadline, in_thread
from tiercache.live import apply, attach, detach, settle
from tiercache.memory.slots import Lease
from tiercache.payloads import Sink, Source, check_loop, check_number, check_seconds, sink_of, source_of
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.prefetcher import Prefetcher, PrefetchHandle
from tiercache.scheduler.reads import Hit
from tiercache.scheduler.writer import FlushReport
from tiercache.statistics import DeviceStatistics, Statistics
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.shared_memory import Mappings

_CLOSED = "the cache is closed"
_KEY_OF = itemgetter(0)


class Get:
    """The context manager that `TierCache.get` returns. A generator would be slower on a path of microseconds."""

    __slots__ = ("_cache", "_deadline_s", "_key", "_lease")

    def __init__(self, cache: TierCache, key: ChunkKey, deadline_s: float | None) -> None:
        self._cache = cache
        self._key = key
        self._deadline_s = deadline_s
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease | None:
        parts = self._cache.parts
        lease = parts.reader.lease_now(self._key)
        if lease is None:
            check_loop(parts.loop)
            lease = await parts.reader.fetch(self._key, self._cache._until_s(self._deadline_s))
        self._lease = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            self._lease.release()


class TierCache:
    """An embedded cache, bound to the event loop that entered `open`.

    Calls from other loops, and from threads without a loop, raise RuntimeError and change nothing. `keys`, `statistics`
    and `describe` may be called from anywhere, and a `get` of a hot chunk from the thread of that loop. Keys come from
    `keys` (token ids) or from an engine's own hashes (`tiercache.keys_from_hashes`).
    """

    def __init__(
        self, config: Config, layout: Layout, *, device: Driver | None = None, naming: Naming | None = None
    ) -> None:
        """Prefer `open`. Without a context manager, call `await start()` and `await close()`.

        `naming` maps token ids to chunks for the control socket, if chunks have other names than those from `keys`.
        """
        self.config = config
        self.layout = layout
        self._driver = device
        self._naming = naming
        self._chunk_bytes = layout.chunk_bytes
        self.namespace, _ = self._named = layout.named_by(config.tenant_salt)
        self._thread = 0
        """Identifier of the thread in which the loop was last seen."""
        self._started = False
        self._parts: Parts | None = None
        """Set when the cache has started, and kept when it is closed."""
        self._running: Parts | None = None
        """The same parts, until a close has written the queued chunks."""

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, layout: Layout, *, device: Driver | None = None) -> AsyncIterator[TierCache]:
        """Allocate the arena and open the tiers; at the end write queued chunks, for up to `close_timeout_s`, and close
        all.

        `device` is the accelerator whose memory the caller passes to the cache; by default the GPU that torch uses in
        this process, if any. Raises ConfigError as `start` does.
        """
        cache = cls(config, layout, device=device)
        await cache.start()
        try:
            yield cache
        finally:
            await cache.close()

    async def start(self) -> None:
        """Allocate the arena (pre-faulted off the loop) and open the tiers, each by its own deadline.

        Raises ConfigError with one clear sentence if a resource is unavailable or hangs. After a failure or
        cancellation nothing is kept, except resources that hang, which are released when they continue. So a cache may
        be started again at once.
        """
        if self._started:
            raise TierCacheError("the cache was started already: a cache is started once; make another one")
        self._started = True
        closing = Closing()
        try:
            self._parts = self._running = await build(self.config, self.layout, self._driver, closing)
            if self.config.control_socket is not None:
                path = socket_path(self.config.control_socket, (self.layout.rank, self.layout.world_size))
                server = ControlServer(path, self, self._naming or TokenNaming())
                await server.start()
                closing.push([("control socket", server.close)])
        except GeneratorExit:
            raise  # the loop has ended, so this cannot wait
        except BaseException:
            self._parts = self._running = None
            closing.bring_forward(asyncio.get_running_loop().time())
            await closing.unwind()
            self._started = False
            raise

    async def close(self, timeout_s: float | None = None) -> FlushReport:
        """Write queued chunks for up to `timeout_s`, then release everything. Idempotent.

        Concurrent calls use the nearest deadline, and all get the same report. Returns what became of
        the chunks that were queued at the call, by tier. An operation that hangs is abandoned half a second after the
        deadline and logged, and its memory stays mapped until it ends. Cancellation stops the writes, releases
        everything, and raises CancelledError afterwards.
        """
        parts = self._parts
        if parts is None:
            return FlushReport()
        if (report := parts.closing.report) is not None:
            return report
        check_loop(parts.loop)
        timeout_s = self.config.close_timeout_s if timeout_s is None else timeout_s
        check_number("timeout_s", timeout_s)
        return await parts.closing.run(parts.loop.time() + timeout_s, lambda: self._close(parts))

    async def _close(self, parts: Parts) -> FlushReport:
        report = await parts.written()
        self._running = None
        await parts.closing.unwind()
        return report

    @property
    def parts(self) -> Parts:
        """The parts of the cache, for tools and tests. Raises CacheClosed before the start."""
        if self._parts is None:
            raise CacheClosed(_CLOSED)
        return self._parts

    @property
    def cpu(self) -> CpuTier:
        """The hot cache."""
        return self.parts.cpu

    @property
    def tiers(self) -> list[Tier]:
        """The tiers below the hot cache."""
        return self.parts.tiers

    @property
    def ahead(self) -> Prefetcher:
        """The prefetcher, which manages sessions and pins."""
        return self.parts.ahead

    def keys(self, tokens: Sequence[int] | np.ndarray, *, salt: str = "") -> list[ChunkKey]:
        """Return the keys of the full chunks of `tokens`, and of the partial tail if `save_unfull_chunk` is set.

        `salt` identifies a tenant, in addition to the cache's own `tenant_salt`: tenants share no chunk, and each has
        its own quota.
        """
        namespace, tenant = self.layout.named_by(self.config.tenant_salt, salt) if salt else self._named
        partial = self.config.save_unfull_chunk is True
        return chunk_keys(namespace, tokens, self.layout.chunk_tokens, partial=partial, tenant=tenant)

    # Writes

    async def put(self, key: ChunkKey, payload: Any, *, deadline_s: float | None = None) -> bool:
        """Store a chunk, and return True once it is hot. Other tiers are written in the background.

        `payload` is bytes-like, a numpy array or a torch tensor of at most `layout.chunk_bytes`, and is read until this
        returns. Returns False if no slot or copying thread was free by the deadline (in seconds;
        `blocking_timeout_secs` by default), or the chunk was forgotten meanwhile. Raises TierUnavailable if the copy
        has not ended 30 s after the deadline, and still reads `payload`. Cancellation before the copy stores nothing;
        cancellation during the wait for a tier's queue leaves the chunk hot. `payload` is no longer read when
        CancelledError is raised.
        """
        if self._running is not None and self._running.on_device is not None:
            return bool(await self.put_many([key], [payload], deadline_s=deadline_s))
        return bool(await self.put_from([(key, *source_of(payload))], deadline_s=deadline_s))

    async def put_many(
        self, keys: Sequence[ChunkKey], payloads: Sequence[Any], *, after: Event | None = None,
        deadline_s: float | None = None, prefix: bool = False,
    ) -> int:  # fmt: skip
        """Store many chunks as `put` does, and return how many were stored or there already. Repeated keys count once.

        Tensors and `PagedChunk`s in device memory are copied on the cache's own streams, which begin after the driver's
        event `after` (by default: after the work given to the calling thread's current stream), and are read until this
        returns. With `local_cpu: false` and only device tiers they never reach the host; chunks that full queues skip
        (`on_queue_full`) also count as stored. `prefix` says that the chunks follow one another, which eviction
        uses. Raises LayoutError for device memory of the wrong layout.
        """
        parts = self._in_use()
        check_one_each(keys, payloads, "payload")
        there = self._on_device(payloads)
        host = [(keys[at], *source_of(payloads[at])) for at, chunk in enumerate(there) if chunk is None]
        chunks = [(key, chunk) for key, chunk in zip(keys, there, strict=True) if chunk is not None]
        for _, chunk in chunks:
            self._check_length(chunk.payload_bytes)
        stored = 0
        if host:
            in_order = prefix and not chunks
            stored = await self.put_from(host, deadline_s=deadline_s, prefix=in_order)
        if chunks and parts.on_device is not None:
            with parts.closing:
                event = _event(parts.on_device, after)
                until_s = self._until_s(deadline_s)
                stored += await parts.on_device.put(chunks, event, until_s, prefix=prefix)
            parts.advisor.stored(map(_KEY_OF, chunks))
            if prefix:
                parts.cpu.link(keys)
        return stored

    async def put_from(
        self,
        items: Sequence[tuple[ChunkKey, int, Source]],
        *,
        deadline_s: float | None = None,
        prefix: bool = False,
    ) -> int:
        """Store chunks that callables fill in: (key, payload length in bytes, source).

        Each source gets a uint8 vector of that length on a worker thread. Returns how many chunks became hot or were: in a
        put of more than the hot cache holds, later chunks evict earlier ones. `prefix`, the deadline and repeated
        keys are as for `put_many`.

        Chunks become hot in batches, in order: at most an eighth of the arena and 32 MiB each, and less if a slot has
        to be waited for, since a put does not hold filled slots during the wait. Two batches are copied at a time. A
        source that raises ends the put with its exception, and a cancellation ends it too: batches that are hot by then
        stay, and the others are not stored. So the stored chunks are a prefix of `items`, except for
        chunks that were skipped for lack of room, or forgotten.
        """
        parts = self._in_use()
        check_keys(map(_KEY_OF, items))
        chunk_bytes = self._chunk_bytes
        for _, length, _ in items:
            if not 0 < length <= chunk_bytes:
                self._check_length(length)
        with parts.closing:
            stored = await parts.ingest.put(items, self._wait_s(deadline_s), prefix=prefix)
        parts.advisor.stored(map(_KEY_OF, items))
        return stored

    async def store(self, tokens: Sequence[int] | np.ndarray, payloads: Sequence[Any]) -> int:
        """Store the chunks of `tokens`, in order, and return how many were stored, as `put_many` does."""
        keys = self.keys(tokens)
        if len(payloads) != len(keys):
            raise ValueError(f"payloads: expected {len(keys)} (one a chunk), found {len(payloads)}")
        return await self.put_many(keys, payloads, prefix=True)

    # Reads

    def get(self, key: ChunkKey, *, deadline_s: float | None = None) -> Get:
        """Lease a chunk: `async with cache.get(key) as lease` gives a zero-copy view (`lease.view`), or None on a miss.

        A hot chunk is returned without leaving the loop. A chunk that arrives after `deadline_s` seconds is a miss for
        this caller, and is kept for later callers.
        """
        parts = self._running
        if parts is None:
            raise CacheClosed(_CLOSED)
        # Checking the thread is faster than checking the loop, and is enough for a hot chunk; `Get` checks the loop.
        if get_ident() != self._thread:
            check_loop(parts.loop)
            self._thread = get_ident()
        check_key(key)
        return Get(self, key, deadline_s)

    async def get_into(
        self,
        keys: Sequence[ChunkKey],
        buffers: Sequence[Any],
        *,
        after: Event | None = None,
        deadline_s: float | None = None,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:
        """Copy verified chunks into writable buffers, arrays, tensors or `PagedChunk`s of exactly their length.

        Returns how many chunks of the contiguous prefix were delivered by the deadline. Buffers after a gap may have
        been written. After a return, error or cancellation the buffers are no longer in use, except by a copy that has
        not ended 30 s after the deadline, which raises TierUnavailable, or DeviceError for a device. Buffers are either
        all in host memory or all in device memory; device buffers are written after the driver's event `after`, by
        default after the work given to the calling thread's stream. `held` are leases of the caller; their chunks are
        delivered even if they were forgotten meanwhile.
        """
        parts = self._in_use()
        check_one_each(keys, buffers, "buffer")
        there = [chunk for chunk in self._on_device(buffers) if chunk is not None]
        if there and len(there) < len(buffers):
            raise ValueError("buffers: expected all in host memory or all in device memory, found both")
        if there and parts.on_device is not None:
            until_s = self._until_s(deadline_s)
            with parts.closing:
                event = _event(parts.on_device, after)
                delivered = await parts.on_device.get(keys, there, event, until_s, held)
            self._served(keys, delivered, until_s)
            return delivered
        return await self.get_to(keys, [sink_of(buffer) for buffer in buffers], deadline_s=deadline_s, held=held)

    async def get_to(
        self, keys: Sequence[ChunkKey], sinks: Sequence[Sink], *, deadline_s: float | None = None,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> int:  # fmt: skip
        """Deliver chunks as `get_into` does, each to a callable that gets a read-only uint8 vector on a worker thread."""
        parts = self._in_use()
        check_one_each(keys, sinks, "buffer")
        until_s = self._until_s(deadline_s)
        delivered = await parts.reader.deliver(keys, sinks, until_s, held)
        self._served(keys, delivered, until_s)
        return delivered

    async def load(self, tokens: Sequence[int] | np.ndarray, buffers: Sequence[Any]) -> int:
        """Copy the first chunks of `tokens`, as many as there are buffers, as `get_into` does.

        Returns the number of delivered tokens.
        """
        keys = self.keys(tokens)[: len(buffers)]
        chunks = await self.get_into(keys, list(buffers)[: len(keys)])
        return min(chunks * self.layout.chunk_tokens, len(tokens))

    async def warm(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> int:
        """Promote chunks into the hot cache, and return how many of the contiguous prefix are hot."""
        parts = self._in_use()
        check_keys(keys)
        return await parts.reader.warm(keys, self._until_s(deadline_s))

    def warm_soon(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to promote the chunks of a request that is queued in the engine. Non-blocking.

        They are prefetched after those of earlier requests and before predictions, within the prefetcher's share and
        bandwidth. With `local_cpu: false` and no shared memory tier this does nothing.
        """
        parts = self.parts
        check_loop(parts.loop)
        check_keys(keys)
        if parts.ahead.promotes:
            parts.ahead.queued(keys)

    def prefetch(
        self,
        what: Sequence[int] | Sequence[ChunkKey] | np.ndarray,
        *,
        deadline: float = 0.0,
        priority: int = 0,
        ttl: float = 60.0,
    ) -> PrefetchHandle:
        """Promote the chunks of a prefix (token ids, or chunk keys) into the hot cache before a request reads them.

        They will be needed in `deadline` seconds: among prefetches of equal `priority` (smaller goes first) the sooner
        goes first. Programs misjudge times, so it begins three seconds before half of the deadline is over. They are kept
        until they are read, at most until `ttl` seconds after the deadline. Returns at once; await the handle for the
        outcome, read its `progress`, or `cancel()` it, which lets go of the chunks too. Demand reads go first, and all
        prefetches together stay within `prefetch_share` and `prefetch_bytes_per_s`. A deadline below 0 counts as 0.
        Raises ValueError or TypeError for times and priorities that are not numbers, and ConfigError with `local_cpu:
        false` and no shared memory tier, since there is no memory to promote into.
        """
        parts = self._in_use()
        given = list(what)
        keys: list[Any] = given if given and isinstance(given[0], bytes) else self.keys(given)
        return parts.ahead.prefetch(keys, deadline, ttl, priority)

    # Lookups

    async def lookup(self, tokens: Sequence[int] | np.ndarray) -> Hit:
        """Return the length of the contiguous prefix of `tokens`, and its tiers, within `lookup_timeout_ms`."""
        keys = self.keys(tokens)
        hit = await self.lookup_keys(keys)
        if hit.chunks == len(keys) and (tail := len(tokens) - len(keys) * self.layout.chunk_tokens) > 0:
            self.parts.advisor.asked_partial(keys, tail)
        return Hit(hit.chunks, min(hit.chunks * self.layout.chunk_tokens, len(tokens)), hit.by_tier)

    async def lookup_keys(
        self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None, counts: bool = True
    ) -> Hit:
        """Look up keys as `lookup` does within `deadline_s` seconds (`lookup_timeout_ms` by default).

        `tokens` counts full chunks. `counts` is False if this is not a request's first question, so that
        `tiercache advise` counts the request once.
        """
        parts = self._in_use()
        check_keys(keys)
        until_s = self._until_s(deadline_s, parts.reader.settings.probe_deadline_s)
        chunks, by_tier = await parts.reader.lookup(keys, until_s)
        if counts:
            parts.advisor.looked_up(keys, chunks, until_s)
        return Hit(chunks, chunks * self.layout.chunk_tokens, by_tier)

    async def lookup_each(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> list[bool]:
        """Return for each of `keys` if a tier has it, with one question to each tier, within the time of `lookup_keys`."""
        parts = self._in_use()
        check_keys(keys)
        return await parts.reader.lookup_each(keys, self._until_s(deadline_s, parts.reader.settings.probe_deadline_s))

    def lookup_hot(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` that is hot or mapped. Non-blocking; not an access."""
        check_loop(self.parts.loop)
        check_keys(keys)
        return self.parts.reader.prefix_at_hand(keys)

    def describe(self) -> str:
        """Describe the arena and the tiers below it in one line for a log."""
        parts = self.parts
        arena = f"{parts.arena.size_bytes / 2**30:.2f} GB of {parts.arena.kind} memory in {parts.cpu.pool.count} slots"
        device = [parts.on_device.staging.describe()] if parts.on_device is not None else []
        return " -> ".join([f"cpu ({arena})", *device, *(tier.describe() for tier in parts.tiers)])

    def statistics(self) -> Statistics:
        """Return a snapshot. Raises CacheClosed if the cache is closed."""
        if (parts := self._running) is None:
            raise CacheClosed(_CLOSED)
        device, skipped, breakers = None, parts.ingest.skipped, parts.reader.breakers()
        if (on_device := parts.on_device) is not None:
            device = DeviceStatistics(on_device.device.pool.count, on_device.device.pool.free)
            skipped += on_device.skipped
            breakers |= on_device.reader.breakers()
        return Statistics(
            tiers={tier.name: tier.statistics() for tier in (parts.cpu, *parts.tiers)},
            writers={writer.tier.name: writer.statistics() for writer in parts.fan_out.writers},
            reader=parts.reader.statistics(),
            reads=parts.reader.reads(),
            breakers=breakers,
            slots=parts.cpu.pool.count,
            slots_free=parts.cpu.pool.free,
            prefetch={source: replace(account) for source, account in parts.ahead.plan.accounts.copy().items()},
            puts_skipped=skipped,
            device=device,
            stuck=parts.stuck,
            advice=parts.advisor.advice(),
        )

    # Maintenance

    def computing_takes(self, chunk_s: float) -> None:
        """Set the seconds that the engine takes to compute a chunk; `prefill_tokens_per_s` sets the initial value.

        A chunk that would load more slowly is a miss from now on, and a load that takes longer than expected ends with
        the chunks that have arrived.
        """
        check_loop(self.parts.loop)
        check_seconds("chunk_s", chunk_s)
        self.parts.reader.settings.recompute_s = chunk_s

    async def flush(self, timeout_s: float = 60.0) -> FlushReport:
        """Wait for up to `timeout_s` until all stored chunks are written to their tiers, or dropped by a tier that fails."""
        parts = self._in_use()
        check_number("timeout_s", timeout_s)
        return await parts.fan_out.flush(timeout_s)

    async def forget(self, keys: Iterable[ChunkKey], *, deadline_s: float | None = None) -> None:
        """Remove chunks from every tier, waiting for up to `deadline_s` (`blocking_timeout_secs` by default).

        A put, read, prefetch or write that began before this, even an abandoned operation, restores none of them; a
        later put is stored, and read back from every tier. Leases stay valid. A tier that fails does not prevent
        removal from others; TierUnavailable, or another TierCacheError of the tier, is raised at the end, also if a
        chunk could not be removed in time. A chunk that could not be removed, even if this call was cancelled, is no
        longer read from that tier. Its removal is retried until it succeeds or the cache is closed, for up to 65,536
        keys per tier; for further keys the tier is neither read nor written. A durable tier that kept a chunk has it
        again after a restart. Read-only tiers no longer serve the chunk, nor any chunk once 262,144 were forgotten.
        """
        parts = self._in_use()
        keys = list(keys)
        check_keys(keys)
        only_read = [tier.traffic for tier in parts.tiers if tier.reads and not tier.writes]
        staging = [] if parts.on_device is None else [parts.on_device.staging]
        owners: list[CpuTier | Mappings] = [parts.cpu, *staging, *(mapped.mappings for mapped in parts.reader.mapped)]

        def from_memory(keys: Sequence[ChunkKey]) -> None:
            for key in keys:
                for owner in owners:
                    owner.forget(key)
                for traffic in only_read:
                    traffic.refuse(key)

        parts.advisor.forgotten(keys)
        with parts.closing:
            await parts.fan_out.forget(keys, self._wait_s(deadline_s), from_memory)

    def clear_hot(self, keys: Sequence[ChunkKey] | None = None) -> int:
        """Remove chunks from the hot cache only (by default all), and return how many left it.

        The memory of chunks in use stays until their leases end. Chunks that are being written stay hot.
        """
        check_loop(self.parts.loop)
        if keys is not None:
            self.parts.advisor.forgotten(keys)  # others have replaced them, so no cache of any size keeps them
        return self.cpu.clear(keys)

    # Changes

    async def reconfigure(self, changes: Mapping[str, Any]) -> list[str]:
        """Change limits, quotas and credentials, by configuration keys as in the file, and return what changed, in words.

        The hot cache grows up to its size at the start. A limit that is lowered holds for new chunks at once; older ones
        are evicted, in the background on disks, and those in use when their leases end. Raises ConfigError, and changes
        nothing, for wrong values, for keys that need a restart, and if another change does not end in time. A call that is
        cancelled has changed nothing, or everything.
        """
        async with self._changing() as parts:
            return await self._apply(parts, self.config.changed(changes))

    async def reload(self) -> list[str]:
        """Read the configuration's file again and apply it as `reconfigure` does. Raises ConfigError if a key differs that
        needs a restart, and changes nothing then.
        """
        async with self._changing() as parts:
            reading = in_thread("reload", self.config.reloaded)
            found = await by_deadline(reading, FILE_SYSTEMS_S, "reload: the file could not be read")
            return await self._apply(parts, merged(self.config, found))

    async def detach(self, name: str, *, timeout_s: float = 10.0) -> None:
        """Write what is queued for a tier for up to `timeout_s`, and close it until `attach`. Its chunks stay in it, and
        are not found meanwhile; a `forget` raises TierUnavailable and removes them there when the tier is attached.

        Raises ConfigError if there is no such tier. A cancelled call leaves the tier attached, or closes it at once.
        """
        check_number("timeout_s", timeout_s)
        async with self._changing() as parts:
            await detach(parts, name, timeout_s)

    async def attach(self, name: str) -> None:
        """Open a tier that was detached. Raises ConfigError as `start` does; the tier stays detached then."""
        async with self._changing() as parts:
            await attach(parts, self.layout, self.config, name)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[Parts]:
        """Wait for another change to end. Raises ConfigError if that takes too long, as when a mount hangs.

        A close waits for the change that is under way, which uses its parts.
        """
        parts = self._in_use()
        try:
            async with asyncio.timeout(FILE_SYSTEMS_S):
                await parts.changing.acquire()
        except TimeoutError as error:
            raise ConfigError(
                f"nothing was changed: another change has not ended for {FILE_SYSTEMS_S:.0f} s"
            ) from error
        try:
            self._in_use()
            with parts.closing:
                yield parts
        finally:
            parts.changing.release()

    async def _apply(self, parts: Parts, config: Config) -> list[str]:
        found, replaced = await apply(parts, self.layout, self.config, config)
        self.config = config
        await settle(parts, replaced)
        return [str(change) for change in found]

    # Helpers

    def _on_device(self, memory: Sequence[Any]) -> list[DevicePayload | None]:
        """Return the device payload for each payload or buffer; None for host memory."""
        on_device = None if self._running is None else self._running.on_device
        if on_device is None:
            return [None] * len(memory)
        return [device_payload(on_device.device.driver, each) for each in memory]

    def _check_length(self, length_bytes: int) -> None:
        if not 0 < length_bytes <= self._chunk_bytes:
            raise ValueError(
                f"payload: expected 1..{self._chunk_bytes} bytes (the layout's chunk), found {length_bytes}"
            )

    def _wait_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.config.blocking_timeout_secs
        check_number("deadline_s", deadline_s)
        return max(0.0, deadline_s)  # however late the call is, its copies have their time

    def _until_s(self, deadline_s: float | None, default_s: float | None = None) -> float:
        """Return the deadline of a call as a loop time; `default_s` applies if it is None."""
        return self.parts.loop.time() + self._wait_s(default_s if deadline_s is None else deadline_s)

    def _served(self, keys: Sequence[ChunkKey], delivered: int, until_s: float) -> None:
        """Tell the tiers, the prefetcher and the advisor that a request got the first `delivered` of `keys`."""
        parts = self.parts
        parts.advisor.got(keys, delivered, until_s)
        parts.fan_out.used(keys[:delivered], parts.cpu)
        parts.ahead.served(keys)

    def _in_use(self) -> Parts:
        parts = self._running
        if parts is None:
            raise CacheClosed(_CLOSED)
        check_loop(parts.loop)
        return parts


def _event(on_device: DevicePath, after: Event | None) -> Event:
    """Return `after`, or an event of the calling thread's own stream."""
    driver = on_device.device.driver
    return driver.record(driver.current_stream()) if after is None else after
