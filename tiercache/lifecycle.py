"""The parts of a cache, and how they are opened and closed: each resource pushes its close to one `AsyncExitStack`.

A device, a mount or a lock may hang. Calls that may block run in daemon threads, since those of an executor are joined when
the interpreter exits, and every step has a deadline. A step that outlives it is abandoned: it goes on by itself, and the
views that it has of the arena keep the memory mapped until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from tiercache.assembly import arena_settings, make_cpu, make_device, make_fan_out, make_tiers, reader_settings
from tiercache.checks import check_number
from tiercache.config import Config
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.core.prefetch import PrefetchPlan
from tiercache.device.device import Device
from tiercache.device.driver import Driver, Event, gpu_in_use
from tiercache.device.paged import DevicePayload, device_payload
from tiercache.errors import ConfigError, DeviceError, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import GIVE_UP_S, Workers, once_ended, retrieve_exception, wait_uncancelled
from tiercache.payloads import Source, source_of
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.ingest import Ingest
from tiercache.scheduler.prefetcher import Prefetcher
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.writer import FanOut, FlushReport, TierWriter
from tiercache.statistics import DeviceStatistics, Statistics
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, StagingTier

logger = logging.getLogger("tiercache")

T = TypeVar("T")

FILE_SYSTEMS_S = 30.0
"""The time that the file systems of the configured directories have to say what they are."""
DEVICE_S = 120.0
"""The time that an accelerator has to come up."""
_CALL_OFF_S = 2.0
"""The time that a tier or a device whose opening was called off has to give back what it holds, before it is abandoned."""
GRACE_S = 0.5
"""The time that all steps of a close together have at least, also where the deadline has passed."""
_LEAST_S = 0.1
"""The time that each step of a close has at least, also where others have used up the grace."""
_COPYING_THREADS = 2
"""Copying threads of one direction. Puts have their own, so that slow sources do not delay a get of hot chunks."""

Part = tuple[str, Callable[[], Coroutine[Any, Any, object]]]
"""The name of a resource in the log, and its close."""


class Operations:
    """Count the calls in flight that a close waits for: each enters it as a context."""

    __slots__ = ("_idle", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def ended(self) -> None:
        """Wait until none is in flight."""
        await self._idle.wait()

    def __enter__(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class Closing:
    """The exit stack of a cache, and the deadline by which it is unwound."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.operations = Operations()
        self.schedulers: list[TierWriter | Reader] = []
        self._deadline_s = float("inf")
        """A loop time. It may be brought forward while a step is waited for."""
        self._least_s = float("-inf")
        self._step: asyncio.Timeout | None = None
        self._task: asyncio.Task[FlushReport] | None = None
        self._callers = 0

    @property
    def report(self) -> FlushReport | None:
        """The result of a close that has ended."""
        return self._task.result() if self._task is not None and self._task.done() else None

    @property
    def abandoned(self) -> list[asyncio.Task[Any]]:
        """Reads and writes that outlived their deadline and still hold a slot."""
        return [task for scheduler in self.schedulers for task in scheduler.abandoned]

    @property
    def until_s(self) -> float:
        """The loop time until which the current step may take."""
        return max(self._deadline_s, self._least_s)

    def bring_forward(self, deadline_s: float) -> None:
        """Let the deadline be `deadline_s`, a loop time, unless it is before that already."""
        self._deadline_s = min(self._deadline_s, deadline_s)
        if self._step is not None and not self._step.expired():
            self._step.reschedule(self.until_s)

    def push(self, parts: Collection[Part]) -> None:
        """Close those that `parts` contains by then, side by side, and before all that was pushed earlier."""
        self.stack.push_async_callback(self._close, parts)

    async def run(self, deadline_s: float, close: Callable[[], Coroutine[Any, Any, FlushReport]]) -> FlushReport:
        """Return what `close` returns. The first of several callers begins it, and the nearest of their deadlines counts.

        Cancelled, the deadline is now, unless others wait too, and CancelledError comes out when everything is given back.
        """
        loop = asyncio.get_running_loop()
        task = self._task = self._task or loop.create_task(close(), name="tiercache-close")
        self.bring_forward(deadline_s)
        self._callers += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._callers == 1:
                self.bring_forward(loop.time())
                await wait_uncancelled([task], GIVE_UP_S)
            raise
        finally:
            self._callers -= 1

    async def wait(self, works: Collection[asyncio.Future[Any]]) -> None:
        """Wait until all of `works` have ended, or until the deadline. A cancellation makes the deadline now and ends
        nothing else: a loop that shuts down cancels every task."""
        loop = asyncio.get_running_loop()
        while left := [work for work in works if not work.done()]:
            try:
                async with asyncio.timeout_at(self.until_s) as self._step:
                    await asyncio.wait(left)
            except TimeoutError:
                return
            except asyncio.CancelledError:
                self._deadline_s = min(self._deadline_s, loop.time())
            finally:
                self._step = None

    async def unwind(self) -> None:
        """Close everything by the deadline, with a grace of half a second."""
        self._least_s = asyncio.get_running_loop().time() + GRACE_S
        await self.stack.aclose()

    async def settle(self) -> None:
        """Wait half a second for what has just heard that the cache is closed, and log what is abandoned."""
        now_s = asyncio.get_running_loop().time()
        self._least_s = max(self._least_s, now_s + _LEAST_S)
        self.bring_forward(now_s + GRACE_S)
        operations = asyncio.ensure_future(self.operations.ended())
        await self.wait([operations, *self.abandoned])
        operations.cancel()
        await asyncio.sleep(0)  # what has ended is no longer abandoned with the next step
        if count := len(self.abandoned) + self.operations.in_flight:
            logger.warning("%d operations are abandoned; the memory that they touch stays mapped until they end", count)

    async def _close(self, parts: Collection[Part]) -> None:
        loop = asyncio.get_running_loop()
        self._least_s = max(self._least_s, loop.time() + _LEAST_S)
        for _ in range(2):
            tasks = {loop.create_task(close(), name=f"tiercache-close-{name}"): (name, close) for name, close in parts}
            await self.wait(tasks)
            for task, (name, _) in tasks.items():
                task.add_done_callback(retrieve_exception)
                if not task.done():
                    logger.warning("%s: does not close in time, and is abandoned", name)
                elif not task.cancelled() and (error := task.exception()) is not None:
                    logger.error("%s: closing failed", name, exc_info=error)
            # Once more what was cancelled with all tasks of the loop: it has not ended.
            parts = [part for task, part in tasks.items() if task.done() and task.cancelled()]


@dataclass
class OnDevice:
    """The further parts of a cache that has an accelerator."""

    device: Device
    staging: StagingTier
    reader: Reader
    """Reads device tiers into device memory."""
    path: DevicePath

    def payload(self, given: Any) -> DevicePayload | None:
        """Return `given` if it lies in device memory."""
        return device_payload(self.device.driver, given)

    def all_of(self, buffers: Sequence[Any]) -> list[DevicePayload]:
        """Return `buffers` if they lie in device memory, and nothing if they lie in host memory. Raises ValueError for a
        mixture."""
        there = [chunk for chunk in map(self.payload, buffers) if chunk is not None]
        if there and len(there) < len(buffers):
            raise ValueError("buffers: expected all in host memory or all in device memory, found both")
        return there

    def statistics(self) -> DeviceStatistics:
        pool = self.device.pool
        return DeviceStatistics(
            pool.count, pool.free, self.reader.counters, self.reader.reads(), self.reader.breakers()
        )

    def event(self, after: Event | None) -> Event:
        """Return `after`, or an event of the calling thread's own stream."""
        driver = self.device.driver
        return driver.record(driver.current_stream()) if after is None else after


@dataclass
class Parts:
    """The parts of a cache that has started. They stay when it is closed."""

    loop: asyncio.AbstractEventLoop
    chunk_bytes: int
    blocking_s: float
    """The timeout of an operation that was given no deadline."""
    closing: Closing
    arena: Arena
    cpu: CpuTier
    tiers: list[Tier]
    """The tiers below the hot cache."""
    fan_out: FanOut
    ingest: Ingest
    reader: Reader
    on_device: OnDevice | None
    ahead: Prefetcher

    @property
    def stuck(self) -> int:
        """Abandoned operations that have not ended."""
        copies = self.on_device.device.unfinished if self.on_device is not None else 0
        return len(self.closing.abandoned) + copies

    def describe(self) -> str:
        arena = f"{self.arena.size_bytes / 2**30:.2f} GB of {self.arena.kind} memory in {self.cpu.pool.count} slots"
        device = [self.on_device.staging.describe()] if self.on_device is not None else []
        return " -> ".join([f"cpu ({arena})", *device, *(tier.describe() for tier in self.tiers)])

    def statistics(self) -> Statistics:
        on_device = self.on_device
        return Statistics(
            tiers={tier.name: tier.statistics() for tier in (self.cpu, *self.tiers)},
            writers={writer.tier.name: writer.statistics() for writer in self.fan_out.writers},
            reader=self.reader.counters,
            reads=self.reader.reads(),
            breakers=self.reader.breakers(),
            slots=self.cpu.pool.count,
            slots_free=self.cpu.pool.free,
            prefetch=self.ahead.plan.accounts,
            puts_skipped=self.ingest.skipped + (on_device.path.skipped if on_device is not None else 0),
            device=on_device.statistics() if on_device is not None else None,
            stuck=self.stuck,
        )

    def wait_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.blocking_s
        check_number("deadline_s", deadline_s)
        return deadline_s

    def until_s(self, deadline_s: float | None) -> float:
        """Return the deadline of an operation as a loop time."""
        return self.loop.time() + self.wait_s(deadline_s)

    def asked_until_s(self, deadline_s: float | None) -> float:
        """Return the deadline of a look-up as a loop time."""
        return self.until_s(self.reader.settings.probe_deadline_s if deadline_s is None else deadline_s)

    def check_length(self, length_bytes: int) -> None:
        if not 0 < length_bytes <= self.chunk_bytes:
            raise ValueError(
                f"payload: expected 1..{self.chunk_bytes} bytes (the layout's chunk), found {length_bytes}"
            )

    def by_memory(
        self, keys: Sequence[ChunkKey], payloads: Sequence[Any]
    ) -> tuple[list[tuple[ChunkKey, int, Source]], list[tuple[ChunkKey, DevicePayload]]]:
        """Return the chunks in host memory, as calls that copy them, and those in device memory."""
        host, chunks = [], []
        for key, payload in zip(keys, payloads, strict=True):
            chunk = self.on_device.payload(payload) if self.on_device is not None else None
            if chunk is None:
                host.append((key, *source_of(payload)))
            else:
                self.check_length(chunk.payload_bytes)
                chunks.append((key, chunk))
        return host, chunks

    def used(self, keys: Sequence[ChunkKey]) -> None:
        """Tell the tiers that a request was served with `keys`."""
        self.fan_out.used(keys, self.cpu)

    def served(self, keys: Sequence[ChunkKey], delivered: int) -> None:
        """Tell the tiers and the prefetcher that a request came for `keys`, and got so many of them."""
        self.used(keys[:delivered])
        self.ahead.served(keys)

    async def forget(self, keys: Sequence[ChunkKey], timeout_s: float) -> None:
        only_read = [tier for tier in self.tiers if tier.reads and not tier.writes]

        def from_memory(keys: Sequence[ChunkKey]) -> None:
            for key in keys:
                self.cpu.forget(key)
            for mapped in self.reader.mapped:
                for key in keys:
                    mapped.mappings.forget(key)
            if self.on_device is not None:
                for key in keys:
                    self.on_device.staging.forget(key)
            for tier in only_read:
                for key in keys:
                    tier.traffic.refuse(key)

        with self.closing.operations:
            await self.fan_out.forget(keys, timeout_s, from_memory)

    async def written(self) -> FlushReport:
        """Write what is queued until the deadline, or until a cancellation, and return what happened to it."""
        before = self.fan_out.counts()
        writing = asyncio.ensure_future(self._written())
        await self.closing.wait([writing])
        writing.cancel()
        writing.add_done_callback(retrieve_exception)
        report = self.fan_out.report(before)
        if not report.complete:
            logger.warning("closed before everything was written: %s", report.pending)
        return report

    async def _written(self) -> None:
        """Wait until no operation is in flight, everything is written or given up, and what was forgotten is removed.

        A put has queued nothing before its end, and copies of a device go on without their waiters.
        """
        await self.closing.operations.ended()
        await self.fan_out.drained()
        await self.fan_out.removed()


async def in_thread(
    what: str,
    timeout_s: float | None,
    make: Callable[..., T],
    *arguments: Any,
    close: Callable[[T], object] = lambda made: None,
    call_off: Callable[[], object] = lambda: None,
    give_up_s: float = _CALL_OFF_S,
) -> T:
    """Return `make(*arguments)`, called in a daemon thread. Raises ConfigError about `what` after `timeout_s`.

    A result that comes after that, or after a cancellation, is given to `close`. Cancelled, this calls `call_off`, and ends
    when the thread has, or after `give_up_s`.
    """
    workers = Workers("start", 1)
    try:
        work = workers.submit(make, *arguments)
    except TierUnavailable as error:
        raise ConfigError(f"{what}: {error}") from error
    workers.close()

    def close_result() -> None:
        if not work.cancelled() and work.exception() is None:
            close(work.result())

    try:
        await asyncio.wait([work], timeout=timeout_s)
    except asyncio.CancelledError:
        call_off()
        await wait_uncancelled([work], give_up_s)
        once_ended([work], close_result)
        raise
    if not work.done():
        once_ended([work], close_result)
        raise ConfigError(f"{what}: no answer within {timeout_s:.0f} s; does a device, a mount or a server hang?")
    return work.result()


async def make_arena(settings: ArenaSettings) -> Arena:
    """Return an arena whose pages were touched, however long that takes; a cancellation stops it.

    No device can hang in that, and a start that follows at once needs its name, so a cancellation waits for longer.
    """
    unwanted = threading.Event()
    return await in_thread(
        "max_local_cpu_size",
        None,
        Arena,
        settings,
        unwanted.is_set,
        close=Arena.close,
        call_off=unwanted.set,
        give_up_s=GIVE_UP_S,
    )


def _close_device(device: Device | None) -> None:
    if device is not None:
        device.close()


async def open_tier(tier: Tier) -> None:
    """Call `tier.open` by the tier's own deadline. Raises ConfigError where it fails or is too late.

    A tier that is too late, or whose opening is cancelled, is cancelled and closed. It has two seconds for that, and is
    abandoned then.
    """
    opening = asyncio.ensure_future(tier.open())
    timeout_s = max(tier.open_s, 2 * (tier.patience_s or 0.0))
    option = getattr(tier, "option", tier.name)
    try:
        await asyncio.wait([opening], timeout=timeout_s)
    except asyncio.CancelledError:
        await _call_off(tier, opening)
        raise
    if not opening.done():
        await _call_off(tier, opening)
        raise ConfigError(
            f"{option}: {tier.describe()} did not open within {timeout_s:.0f} s; does its device, "
            "mount or server hang, or a process that holds its lock?"
        )
    try:
        opening.result()
    except (TierUnavailable, DeviceError, OSError) as error:
        raise ConfigError(f"{option}: {error}") from error


async def _call_off(tier: Tier, opening: asyncio.Future[None]) -> None:
    opening.cancel()

    async def close() -> None:
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            logger.warning("%s: came up too late, and is closed again", tier.name)
            await tier.close()

    await wait_uncancelled([asyncio.ensure_future(close())], _CALL_OFF_S)


async def build(config: Config, layout: Layout, driver: Driver | None, closing: Closing) -> Parts:
    """Make and open what the configuration describes, each part by a deadline. Whatever of it there is, also when this
    raises, has pushed its close to `closing`."""
    stack = closing.stack
    settings = arena_settings(config, layout)
    device = await in_thread(
        "device", DEVICE_S, make_device, config, layout, driver, gpu_in_use(), close=_close_device
    )
    stack.callback(_close_device, device)
    places = ", ".join([*(config.gds_path or ()), *(config.weka_path or ())])
    tiers = await in_thread(f"gds_path, weka_path: {places}", FILE_SYSTEMS_S, make_tiers, config, layout, device)
    arena = await make_arena(settings)
    stack.callback(arena.close)
    pool = SlotPool(arena, layout.chunk_bytes)
    stack.callback(pool.close)
    copiers, fillers = Workers("copy", _COPYING_THREADS), Workers("fill", _COPYING_THREADS)
    for workers in (copiers, fillers):
        stack.callback(workers.close)
    if device is not None:
        await in_thread("device", DEVICE_S, device.pin, arena.memory, pool.slot_bytes, give_up_s=GIVE_UP_S)
    cpu = make_cpu(config, pool, copiers)
    await cpu.open()
    stack.push_async_callback(closing.settle)
    stack.push_async_callback(cpu.close)
    opened: list[Part] = []
    closing.push(opened)
    for tier in tiers:
        tier.use_arena(arena)
        await open_tier(tier)
        opened.append((tier.name, tier.close))
    return await _connected(config, layout, closing, device, arena, cpu, tiers, fillers)


async def _connected(
    config: Config,
    layout: Layout,
    closing: Closing,
    device: Device | None,
    arena: Arena,
    cpu: CpuTier,
    tiers: list[Tier],
    fillers: Workers,
) -> Parts:
    """Add readers, writers and the prefetcher to tiers that are open. `fillers` run the sources of puts."""
    loop = asyncio.get_running_loop()
    reading, readable = reader_settings(config, layout), [tier for tier in tiers if tier.reads]
    fan_out = make_fan_out(config, layout, tiers, arena.size_bytes, cpu.pool.slot_bytes, cpu.budget)
    # Writes in flight have half of the time; the other half is for closing the tiers.
    closing.push([("writing", lambda: fan_out.close((loop.time() + closing.until_s) / 2))])
    on_device = None
    if device is None:
        reader = Reader(cpu, readable, reading, maps=True)
    else:
        # Copies of a device come from pinned memory, which mappings are not.
        staging = StagingTier(device, cpu.copiers)
        await staging.open()
        reader = Reader(cpu, [staging, *readable], reading)
        serving = [tier for tier in readable if tier.serves_device]
        device_reader = Reader(staging, serving, reading)
        path = DevicePath(device, cpu, staging, reader, device_reader, fan_out)
        on_device = OnDevice(device, staging, device_reader, path)
    readers = [reader] if on_device is None else [reader, on_device.reader]
    closing.push([("reading", reader.close) for reader in readers])
    closing.schedulers += [*fan_out.writers, *readers]
    chunk_bytes, slots = layout.chunk_bytes, cpu.pool.count
    share_bytes = int(config.prefetch_share * slots) * chunk_bytes
    plan = PrefetchPlan(chunk_bytes, share_bytes, config.prefetch_bytes_per_s)
    ahead = Prefetcher(reader, plan, read_s=reading.deadline_s, on_continued=fan_out.continued)
    closing.push([("prefetching", ahead.close)])
    return Parts(
        loop=loop,
        chunk_bytes=chunk_bytes,
        blocking_s=float(config.blocking_timeout_secs),
        closing=closing,
        arena=arena,
        cpu=cpu,
        tiers=tiers,
        fan_out=fan_out,
        ingest=Ingest(cpu, fan_out, fillers),
        reader=reader,
        on_device=on_device,
        ahead=ahead,
    )
