"""The parts of a cache, and how they are opened and closed: each resource pushes its close to one `AsyncExitStack`.

A device, a mount or a lock may hang. Calls that may block run in daemon threads, since those of an executor are joined
when the interpreter exits, and every step has a deadline. A step that exceeds it is abandoned: it continues by itself,
and its views of the arena keep the memory mapped until it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from tiercache.assembly import arena_settings, make_cpu, make_device, make_fan_out, make_tiers, reader_settings
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.core.prefetch import PrefetchPlan
from tiercache.device.device import Device
from tiercache.device.driver import Driver, gpu_in_use
from tiercache.errors import ConfigError, DeviceError, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import GIVE_UP_S, Workers, once_ended, retrieve_exception, wait_uncancelled
from tiercache.scheduler.advisor import Advisor
from tiercache.scheduler.device_path import DevicePath
from tiercache.scheduler.ingest import Ingest
from tiercache.scheduler.prefetcher import Prefetcher
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.warm_start import WarmStart
from tiercache.scheduler.writer import FanOut, FlushReport, TierWriter
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier, StagingTier

logger = logging.getLogger("tiercache")

T = TypeVar("T")

FILE_SYSTEMS_S = 30.0
"""Seconds for the file systems of the configured directories to report their type."""
DEVICE_S = 120.0
"""Seconds for an accelerator to start."""
_CALL_OFF_S = 2.0
"""Seconds for a tier or device whose opening was cancelled to release its resources, before it is abandoned."""
GRACE_S = 0.5
"""Least number of seconds for all steps of a close together, even if the deadline has passed."""
_LEAST_S = 0.1
"""Least number of seconds for each step of a close, even if others have used up the grace."""
_COPYING_THREADS = 2
"""Copying threads per direction. Puts have their own, so that slow sources do not delay a get of hot chunks."""

Close = Callable[[], Coroutine[Any, Any, object]]
Part = tuple[str, Close]
"""The name of a resource in the log, and its close."""


class Closing:
    """The exit stack of a cache, its deadline, and the calls in flight that it waits for.

    Each call enters it as a context.
    """

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.schedulers: list[TierWriter | Reader] = []
        self._deadline_s = float("inf")
        """The deadline of the close, a loop time. It may be brought forward during a step."""
        self._least_s = float("-inf")
        self._step: asyncio.Timeout | None = None
        self._task: asyncio.Task[FlushReport] | None = None
        self.unwinding = False
        """True once parts are being closed."""
        self._callers = 0

    def __enter__(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    @property
    def report(self) -> FlushReport | None:
        """The result of a close that has ended."""
        return self._task.result() if self._task is not None and self._task.done() else None

    @property
    def abandoned(self) -> list[asyncio.Task[Any]]:
        """Reads and writes that exceeded their deadline and still hold a slot."""
        return [task for scheduler in self.schedulers for task in scheduler.abandoned]

    @property
    def until_s(self) -> float:
        """The loop time by which the current step has to end."""
        return max(self._deadline_s, self._least_s)

    def bring_forward(self, deadline_s: float) -> None:
        """Set the deadline to `deadline_s`, a loop time, unless it is earlier already."""
        self._deadline_s = min(self._deadline_s, deadline_s)
        if self._step is not None and not self._step.expired():
            self._step.reschedule(self.until_s)

    def push(self, parts: Collection[Part]) -> None:
        """Push the close of `parts`, a collection that is read at the close.

        They are closed concurrently, before all parts that were pushed earlier.
        """
        self.stack.push_async_callback(self._close, parts)

    async def run(self, deadline_s: float, close: Callable[[], Coroutine[Any, Any, FlushReport]]) -> FlushReport:
        """Return the result of `close`. The first of several callers starts it, and the nearest of their deadlines
        counts.

        If the only caller is cancelled, the deadline becomes now, and CancelledError is raised when everything is
        released. If other callers wait, it is raised at once.
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
        """Wait until all of `works` have ended, or until the deadline.

        A cancellation sets the deadline to now and has no other effect, since a loop that shuts down cancels every
        task.
        """
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

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    async def unwind(self) -> None:
        """Close everything by the deadline, with a grace of half a second."""
        self.unwinding = True
        self._least_s = asyncio.get_running_loop().time() + GRACE_S
        await self.stack.aclose()

    async def settle(self) -> None:
        """Wait up to half a second for operations that were just notified of the close, and log those abandoned."""
        now_s = asyncio.get_running_loop().time()
        self._least_s = max(self._least_s, now_s + _LEAST_S)
        self.bring_forward(now_s + GRACE_S)
        calls = asyncio.ensure_future(self.idle())
        await self.wait([calls, *self.abandoned])
        calls.cancel()
        await asyncio.sleep(0)  # operations that have ended are no longer abandoned in the next step
        if count := len(self.abandoned) + self.in_flight:
            logger.warning("%d operations are abandoned; the memory that they touch stays mapped until they end", count)

    async def _close(self, parts: Collection[Part]) -> None:
        loop = asyncio.get_running_loop()
        self._least_s = max(self._least_s, loop.time() + _LEAST_S)
        for _ in range(2):
            tasks = {loop.create_task(close(), name=f"tiercache-close-{name}"): (name, close) for name, close in parts}
            await self.wait(tasks)
            for task, (name, _) in tasks.items():
                log_close(task, name)
            # Repeat the closes that were cancelled, as when all tasks of the loop are: their parts are still open.
            parts = [part for task, part in tasks.items() if task.done() and task.cancelled()]


def log_close(task: asyncio.Future[Any], name: str) -> None:
    """Log that a close has failed, or has not ended in time; then it goes on by itself."""
    task.add_done_callback(retrieve_exception)
    if not task.done():
        logger.warning("%s: does not close in time, and is abandoned", name)
    elif not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: closing failed", name, exc_info=error)


@dataclass
class Parts:
    """The parts of a cache that has started. They remain after its close."""

    loop: asyncio.AbstractEventLoop
    closing: Closing
    arena: Arena
    cpu: CpuTier
    tiers: list[Tier]
    """The tiers below the hot cache."""
    fan_out: FanOut
    ingest: Ingest
    reader: Reader
    on_device: DevicePath | None
    """Set with an accelerator."""
    ahead: Prefetcher
    advisor: Advisor
    opened: dict[str, Close]
    """How the open tiers are closed, by name."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a limit or a tier changes."""

    @property
    def readers(self) -> list[Reader]:
        return [self.reader] if self.on_device is None else [self.reader, self.on_device.reader]

    @property
    def stuck(self) -> int:
        """Number of abandoned operations that have not ended."""
        copies = self.cpu.copiers.abandoned + self.ingest.copiers.abandoned
        if self.on_device is not None:
            copies += self.on_device.device.unfinished
        return len(self.closing.abandoned) + copies

    async def written(self) -> FlushReport:
        """Write queued chunks until the deadline, or until a cancellation, and return the outcome."""
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
        """Wait until no call is in flight, all chunks are written or given up, and forgotten chunks are removed.

        A put queues chunks only at its end, and device copies continue without their waiters.
        """
        await self.closing.idle()
        await self.fan_out.drained()
        await self.fan_out.removed()


async def by_deadline(
    work: asyncio.Future[T],
    timeout_s: float | None,
    late: str,
    undo: Callable[[T], asyncio.Future[Any] | None] = lambda made: None,
    call_off: Callable[[], object] = lambda: None,
    give_up_s: float | None = None,
) -> T:
    """Return the result of `work`, which makes or opens a part. Raises ConfigError (`late`) after `timeout_s`.

    After that, or a cancellation, calls `call_off`, and passes a late result to `undo`. Waits up to two seconds for
    each of `work` and `undo`, or up to `give_up_s` if it is given and the call is cancelled, and then abandons it.
    """
    try:
        await asyncio.wait([work], timeout=timeout_s)
    except asyncio.CancelledError:
        await _call_off(work, undo, call_off, give_up_s or _CALL_OFF_S)
        raise
    if not work.done():
        if await _call_off(work, undo, call_off, _CALL_OFF_S):
            raise asyncio.CancelledError
        raise ConfigError(f"{late} within {timeout_s:.0f} s; does a device, a mount or a server hang, or a lock's owner?")
    return work.result()


async def _call_off(
    work: asyncio.Future[T],
    undo: Callable[[T], asyncio.Future[Any] | None],
    call_off: Callable[[], object],
    give_up_s: float,
) -> bool:
    """Return True if a cancellation came meanwhile."""
    undoing: list[asyncio.Future[Any]] = []

    def ended() -> None:
        if not work.cancelled() and work.exception() is None and (undone := undo(work.result())) is not None:
            undoing.append(undone)

    call_off()
    cancelled = await wait_uncancelled([work], give_up_s)
    once_ended([work], ended)
    return await wait_uncancelled(undoing, give_up_s) or cancelled


def in_thread(option: str, make: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call `make(*arguments)` in a separate daemon thread. Raises ConfigError if none can be started."""
    workers = Workers("start", 1)
    try:
        return workers.submit(make, *arguments)
    except TierUnavailable as error:
        raise ConfigError(f"{option}: {error}") from error
    finally:
        workers.close()


def _close_device(device: Device | None) -> None:
    if device is not None:
        device.close()


async def new_tiers(config: Config, layout: Layout, device: Device | None) -> list[Tier]:
    """Return the tiers below the hot cache, which are not open. Raises ConfigError if their file systems do not answer."""
    places = f"gds_path, weka_path: {', '.join([*(config.gds_path or ()), *(config.weka_path or ())])}"
    making = in_thread(places, make_tiers, config, layout, device)
    return await by_deadline(making, FILE_SYSTEMS_S, f"{places}: no answer")


async def open_tier(tier: Tier) -> None:
    """Call `tier.open` by the tier's own deadline. Raises ConfigError if it fails or is too late.

    If the tier is too late, or this call is cancelled, the opening is cancelled, and a tier that still opens is closed.
    """
    option = getattr(tier, "option", tier.name)
    opening = asyncio.ensure_future(tier.open())

    def close(opened: None) -> asyncio.Future[None]:
        logger.warning("%s: came up too late, and is closed again", tier.name)
        return asyncio.ensure_future(tier.close())

    timeout_s = max(tier.open_s, 2 * (tier.patience_s or 0.0))
    try:
        await by_deadline(opening, timeout_s, f"{option}: {tier.describe()} did not open", close, opening.cancel)
    except (TierUnavailable, DeviceError, OSError) as error:
        raise ConfigError(f"{option}: {error}") from error


async def build(config: Config, layout: Layout, driver: Driver | None, closing: Closing) -> Parts:
    """Make and open the parts of the configuration, each by a deadline, and connect them.

    Every part that exists, also after an error, has pushed its close to `closing`.
    """
    loop, stack = asyncio.get_running_loop(), closing.stack
    settings = arena_settings(config, layout)
    coming_up = in_thread("device", make_device, config, layout, driver, gpu_in_use())
    device = await by_deadline(coming_up, DEVICE_S, "device: it did not come up", _close_device)
    stack.callback(_close_device, device)
    tiers = await new_tiers(config, layout, device)
    # A cancelled start waits longer for the arena than for other parts: no device can hang here, and an immediate new start
    # needs the arena's name.
    option = "max_local_cpu_size"
    arena = await by_deadline(in_thread(option, Arena, settings), None, option, Arena.close, give_up_s=GIVE_UP_S)
    stack.callback(arena.close)
    pool = SlotPool(arena, layout.chunk_bytes)
    stack.callback(pool.close)
    copiers, fillers = Workers("copy", _COPYING_THREADS), Workers("fill", _COPYING_THREADS)
    for workers in (copiers, fillers):
        stack.callback(workers.close)
    if device is not None:
        arena.pinned = True
        pinning = in_thread("device", device.pin, arena.memory, pool.slot_bytes)
        await by_deadline(pinning, DEVICE_S, "device: it did not pin the arena", give_up_s=GIVE_UP_S)
    cpu = make_cpu(config, pool, copiers)
    await cpu.open()
    stack.push_async_callback(closing.settle)
    stack.push_async_callback(cpu.close)
    opened: dict[str, Close] = {}
    closing.push(opened.items())
    for tier in tiers:
        tier.use_arena(arena)
        await open_tier(tier)
        opened[tier.name] = tier.close
    # The rest uses tiers that are open.
    reading, readable = reader_settings(config, layout), [tier for tier in tiers if tier.reads]
    fan_out = make_fan_out(config, layout, tiers, cpu.pool.slot_bytes, cpu.budget)
    # Writes in flight have half of the time; the other half is for closing the tiers.
    closing.push([("writing", lambda: fan_out.close((loop.time() + closing.until_s) / 2))])
    on_device = None
    if device is None:
        reader = Reader(cpu, readable, reading, maps=True)
    else:
        # Device copies need pinned memory, which mappings are not.
        staging = StagingTier(device, cpu.copiers)
        await staging.open()
        reader = Reader(cpu, [staging, *readable], reading)
        serving = [tier for tier in readable if tier.serves_device]
        device_reader = Reader(staging, serving, reading, counts_with=reader)
        on_device = DevicePath(staging, reader, device_reader, fan_out)
    readers = [reader] if on_device is None else [reader, on_device.reader]
    closing.push([("reading", reader.close) for reader in readers])
    closing.schedulers += [*fan_out.writers, *readers]
    chunk_bytes, slots = layout.chunk_bytes, cpu.pool.count
    share_bytes = int(config.prefetch_share * slots) * chunk_bytes
    plan = PrefetchPlan(chunk_bytes, share_bytes, config.prefetch_bytes_per_s)
    ahead = Prefetcher(reader, plan, on_continued=fan_out.continued)
    closing.push([("prefetching", ahead.close)])
    if config.preload == "recent":
        warm_start = WarmStart(tiers, layout.namespace(config.tenant_salt), layout.rank, cpu, ahead)
        closing.push([("warm start", warm_start.close)])
    return Parts(
        loop=loop,
        closing=closing,
        arena=arena,
        cpu=cpu,
        tiers=tiers,
        fan_out=fan_out,
        ingest=Ingest(cpu, fan_out, fillers),
        reader=reader,
        on_device=on_device,
        ahead=ahead,
        advisor=Advisor(reader, chunk_bytes, layout.chunk_tokens),
        opened=opened,
    )
