"""One process of a simulation: a cache, and the callers who use it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.breaker import BreakerState
from tiercache.core.layout import Layout
from tiercache.device.driver import DeviceError
from tiercache.errors import CacheClosed, ConfigError, TierCacheError, TierUnavailable
from tiercache.opening import DEVICE_S, FILE_SYSTEMS_S
from tiercache.testing.simulation.deletions import Deletions
from tiercache.testing.simulation.device_calls import DeviceCalls
from tiercache.testing.simulation.fitting_checks import check_fittings, watch_errors
from tiercache.testing.simulation.machine import Machine
from tiercache.testing.simulation.oracle import Truth, Violation, check_idle, check_memory
from tiercache.testing.simulation.plan import CHUNK_BYTES, Operation
from tiercache.testing.simulation.process import Process
from tiercache.testing.simulation.watch import Watch, breakers_of
from tiercache.tiers.remote.base import RemoteTier

if TYPE_CHECKING:
    from tiercache.scheduler.fan_out import FlushReport
    from tiercache.scheduler.writer import TierWriter
    from tiercache.testing.simulation.remote import Server
    from tiercache.tiers.base import Tier
    from tiercache.tiers.cpu import Lease

_SLACK_S = 0.005
"""What a wait may take beyond its deadline: the pauses of copying threads."""
_CANCELLED_S = 0.05
"""How soon a cancelled call ends, when nothing hangs."""
_NEVER_PUT = 100
"""So far from the keys that are put at the end are some that never are."""
_START_S = 5.0
"""What a start may take besides the times of its tiers."""
_CLEANUP_S = 0.2
"""How long a put waits that is made in the clean-up of a cancelled caller."""
_REMEMBERED_S = 11.0
"""For so long a cache may believe that a server has what it has evicted."""
_PATIENCE_S = 1.0
"""How long a get waits for a remote tier, its `timeout_s`, before it goes on."""
_AT_A_TIME = 4
"""Keys that are put at once to see whether everything is written."""
_CLOSE_S = 1.2
"""What a close may take beyond its time-out: half a second for what hangs, and the same for what it leaves behind."""

Note = Callable[[str], None]


_REMEMBER = frozenset({"put", "put_many", "put_prefix", "get", "get_into", "warm", "lookup", "flush", "statistics"})
"""Operations that leave what was used just before them where it is."""


_SPARED = 0.8
"""The part of the arena that holds what was used last."""


class Source(Exception):
    """Raised by a source of a put on purpose."""


@dataclass(frozen=True)
class _Began:
    """What held when an operation began."""

    at_s: float
    waited_from_s: float
    """When others had begun to wait for a tier that it waits for, too: its patience with one is theirs."""
    until_s: float
    keys: Sequence[int]
    forgets: int
    """How often its keys had been forgotten."""
    there: int
    """How many of the first of its keys were in memory, or in a tier that knew it."""
    losses: int
    """How often tiers had lost them."""
    callers: int
    """Who had begun by then; 0 where others were under way, so that what comes of it is not its doing alone."""
    lost: tuple[int, ...]
    """What each writer had not written by then, or its tier could not read any more, and counted."""


class Node:
    """Lives as long as its process; made anew after it."""

    def __init__(
        self,
        process: Process,
        config: Config,
        layout: Layout,
        truth: Truth,
        keys: list[bytes],
        note: Note,
        *,
        faults: Callable[[], bool],
        start_may_fail: Callable[[], bool],
        server: Server | None,
        tiers: Sequence[str],
        alone: bool,
        prefix: int,
        machine: Machine,
    ) -> None:
        self.process = process
        self.truth = truth
        self.keys = keys
        self.state = "starting"
        self.cache = TierCache(config, layout)
        self.counts: Counter[str] = Counter()
        self.running = 0
        self.reaches_all = True
        """Whether its tiers are all there are; else what it forgets may lie in another one."""
        self.failure: BaseException | None = None
        self._config = config
        self._tier_names = tiers
        self._note = note
        self._faults = faults
        """Whether something has gone wrong outside of late, so that an error is no surprise."""
        self._start_may_fail = start_may_fail
        self._opened: dict[str, tuple[int, float]] = {}
        """How often breakers of writes were seen to open, and when that was last seen to be less."""
        self._server = server
        self._deletions = Deletions(self.cache, keys)
        self._prefix = prefix
        self._alone = alone
        """Whether no other process uses the same files."""
        self._machine = machine
        self._flown: dict[bytes, float] = {}
        """When somebody last began to look for a chunk in tiers."""
        self._device: DeviceCalls | None = None
        self._stop = asyncio.Event()
        self._close_s: float | None = None
        self._cancel_close_s: float | None = None
        self._ended = asyncio.Event()
        self._leases: set[Lease] = set()
        self._handles: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()
        self._begun = 0
        self._forgets: Counter[int] = Counter()
        self._overtaken = 0
        """Passages that a forget may have met."""
        self._stored: dict[int, _Began] = {}
        """The latest put of each key that stored it, and that no forget has followed."""
        self._recent: list[tuple[int, ...]] = []
        """Prefixes that were stored or read last, the latest last, with nobody else about."""

    # From its own loop

    async def main(self) -> None:
        """Open, serve until `stop`, close."""
        loop = asyncio.get_running_loop()
        limit_s = FILE_SYSTEMS_S + DEVICE_S + 30.0 * len(self._tier_names) + _START_S
        late = loop.call_later(limit_s, lambda: self._fail(Violation(f"start takes more than {limit_s:.0f} s")))
        try:
            await self.cache.start()
        except ConfigError as error:
            self._note(f"start failed: {error}")
            self.state = "failed"
            if not self._start_may_fail():
                raise Violation(f"the cache does not start, though nothing fails: {error}") from error
            return
        finally:
            late.cancel()
        watch_errors(self.cache.tiers, self._fail)
        self._watch_flights()
        if (twin := self._machine.twins.get(self.process)) is not None:
            self._device = DeviceCalls(twin, self.truth, CHUNK_BYTES)
        self.state = "open"
        assert self.process.loop is not None
        self.process.loop.after_each = Watch(self.cache, self._fail).after_each
        await self._stop.wait()
        self.state = "closing"
        await self._close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for lease in list(self._leases):
            lease.release()
        self._leases.clear()
        self._handles.clear()
        if self._device is not None:
            self._device.close()
        self.state = "closed"

    async def on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have it done in the process's own loop, from another's. What it raises ends the run."""
        loop = self.process.loop
        assert loop is not None
        here = asyncio.get_running_loop()
        if here is loop:
            await work()
            return
        outcome: asyncio.Future[None] = here.create_future()

        async def do() -> None:
            try:
                await work()
            except BaseException as error:
                self._fail(error)
            else:
                here.call_soon_threadsafe(outcome.set_result, None)

        loop.call_soon_threadsafe(lambda: self._tasks.add(loop.create_task(do())))
        await outcome

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        limit_s = self._config.close_timeout_s if self._close_s is None else self._close_s
        was_cancelled = False

        def cancel() -> None:
            nonlocal was_cancelled, limit_s
            if not closing.done():
                was_cancelled = closing.cancel()
                limit_s = min(limit_s, loop.time() - began_s)

        async def close() -> FlushReport:
            if self._cancel_close_s is not None:  # not before its first step: then nothing is closed
                loop.call_later(self._cancel_close_s, cancel)
            return await self.cache.close(self._close_s)

        closing = loop.create_task(close())
        await asyncio.wait([closing])
        took_s = loop.time() - began_s
        if took_s > limit_s + _CLOSE_S:
            raise Violation(f"close: expected {limit_s + _CLOSE_S:.3f} s at most, took {took_s:.3f} s")
        if closing.cancelled() is not was_cancelled:
            raise Violation(f"close: was cancelled: {was_cancelled}, ended cancelled: {closing.cancelled()}")
        self._note("closed" if was_cancelled else f"closed: {closing.result()}")

    def stop(self, timeout_s: float | None, cancel_s: float | None = None) -> None:
        self._close_s = timeout_s
        self._cancel_close_s = cancel_s
        self._stop.set()

    def others_deleted(self, keys: Iterable[int]) -> None:
        """Files of these keys, in each directory that tiers have, beside this process."""
        self._deletions.happened(keys, self.process.world.now_s)

    def begin(self, operation: Operation) -> None:
        """A caller comes."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(operation), name=operation.kind)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if operation.cancel_s is not None:
            loop.call_later(operation.cancel_s, self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self._cancelled.add(task)
            task.cancel()

    async def _said(self, operation: Operation) -> str:
        """What became of it, cancellation included. Who was cancelled ends cancelled, and soon, whatever hangs."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        task = asyncio.current_task()
        try:
            said: str = await getattr(self, f"_{operation.kind}")(operation)
        except asyncio.CancelledError:
            self._recent.clear()
            late_s = loop.time() - began_s - (operation.cancel_s or 0.0)
            hangs = operation.values.get("memory", "host") != "host" and self._faults()  # its device uses the memory
            if task not in self._cancelled or (late_s > _CANCELLED_S and not hangs):
                raise Violation(f"cancelled, and ended {late_s:.3f} s after that") from None
            if "cleanup" in operation.values:
                values = {"deadline_s": _CLEANUP_S}
                put = replace(operation, kind="put", keys=(operation.values["cleanup"],), values=values)
                return f"cancelled, and its clean-up put: {await self._put(put)}"
            return "cancelled"
        if task in self._cancelled:
            raise Violation(f"was cancelled, and ended as if it were not: {said}")
        return said

    async def _serve(self, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.running += 1
        self._begun += 1
        said = "nothing"
        try:
            said = await self._said(operation)
        except CacheClosed:
            said = "closed"
            if self.state == "open":
                self._fail(Violation(f"{operation}: CacheClosed from an open cache"))
        except Violation as error:
            error.add_note(str(operation))
            self._fail(error)
        except (TierCacheError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            no_thread = isinstance(error, TierUnavailable) and "no thread" in str(error)
            in_vain = operation.kind == "forget" and loop.time() - began_s >= self._limit_s(operation) - 1e-6
            of_device = isinstance(error, DeviceError) and operation.values.get("memory", "host") != "host"
            lost = isinstance(error, DeviceError) and error.lost  # for good
            expected = operation.kind == "forget" or no_thread or of_device
            if not (in_vain or (expected and (lost or self._faults()))):
                error.add_note(str(operation))
                self._fail(error)
        except BaseException as error:
            error.add_note(str(operation))
            self._fail(error)
        finally:
            self.running -= 1
            took_s = loop.time() - began_s
            limit_s = self._limit_s(operation)
            if took_s > limit_s + (_CLEANUP_S if said.startswith("cancelled") else 0.0) + _SLACK_S:
                self._fail(Violation(f"{operation}: expected an end within {limit_s:.3f} s, took {took_s:.3f} s"))
            if operation.kind not in _REMEMBER:
                self._recent.clear()
            self.counts[f"{operation.kind} {said.split(':')[0]}"] += 1
            self._note(f"{operation.kind} {operation.keys} -> {said}")
        self.check()

    def check(self) -> None:
        """What holds after each step."""
        if self.state == "open":
            try:
                check_memory(self.cache)
                self._check_pauses()
            except Violation as error:
                self._fail(error)

    def _check_pauses(self) -> None:
        """A pause is doubled by a probe that failed, and that one waited for the pause before: it is never longer than the
        time since the breaker opened, and a second."""
        now_s = asyncio.get_running_loop().time()
        for writer in self.cache._fan_out.writers:
            breaker = writer.breaker
            opened_count, before_s = self._opened.get(writer.tier.name, (-1, now_s))
            if breaker.opened_count != opened_count or breaker.state is BreakerState.CLOSED:
                if opened_count < 0 or breaker.state is BreakerState.CLOSED:
                    before_s = now_s
                self._opened[writer.tier.name] = breaker.opened_count, before_s
            open_s = breaker._opened_s - before_s
            if opened_count >= 0 and breaker.state is BreakerState.OPEN and breaker._pause_s > open_s + 1.001:
                raise Violation(f"writes of {writer.tier.name}: a pause of {breaker._pause_s} s after {open_s:.3f} s")

    def check_idle(self) -> None:
        check_idle(self.cache, self._leases)
        check_fittings(self.cache, self._machine.memory.calls.opened)

    def _check_reads(self) -> None:
        """What a tier has read whole is a hit for somebody, or kept for the next one, unless it was forgotten meanwhile."""
        if self._device is not None:
            return
        counters = self.cache._reader.counters
        read = sum(tier.statistics().reads for tier in self.cache.tiers)
        of_use = sum(counters.hits.values()) - counters.hits[self.cache.cpu.name] + counters.kept
        if read > of_use + self._overtaken:
            raise Violation(
                f"{read} chunks were read from tiers, {of_use} were given to somebody or kept, and {self._overtaken} may "
                "have been forgotten meanwhile"
            )

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.process.world.stop()

    def _limit_s(self, operation: Operation) -> float:
        values = operation.values
        if operation.kind == "lookup":
            return self._config.lookup_timeout_ms / 1000
        if operation.kind in ("statistics", "clear_hot", "prefetch", "cancel_prefetch"):
            return 0.0
        if operation.kind == "flush":
            return float(values["timeout_s"])
        limit_s = float(values.get("deadline_s", self._config.blocking_timeout_secs)) + float(values.get("for_s", 0.0))
        if values.get("memory", "host") != "host" and self._faults():
            limit_s += DeviceCalls.longest_s
        return limit_s

    # What callers do. Each says what became of it.

    def _names(self, operation: Operation) -> list[bytes]:
        return [self.keys[key] for key in operation.keys]

    async def _put(self, operation: Operation) -> str:
        (key,) = operation.keys
        began = self._put_begins(operation)
        stored = await self.cache.put(self.keys[key], self.truth.payload(key), deadline_s=self._deadline_s(operation))
        self._check_stored(began, int(stored))
        self._used(began, [(key,)] if stored else None)
        return str(stored)

    async def _put_many(self, operation: Operation) -> str:
        prefix = operation.kind == "put_prefix"
        where = operation.values.get("memory", "host")
        if self._device is not None and where != "host":
            return str(
                await self._device.put(
                    self.cache, self._names(operation), operation.keys, where, self._deadline_s(operation), prefix
                )
            )
        payloads = [self.truth.payload(key) for key in operation.keys]
        began = self._put_begins(operation)
        stored = await self.cache.put_many(
            self._names(operation), payloads, deadline_s=self._deadline_s(operation), prefix=prefix
        )
        if stored > len(payloads):
            raise Violation(f"{stored} of {len(payloads)} chunks are said to be stored")
        self._check_stored(began, stored)
        if prefix and stored:
            self._check_head(began)
        whole = stored == len(payloads)
        self._used(began, ([operation.keys] if prefix else [(key,) for key in operation.keys]) if whole else None)
        return str(stored)

    async def _put_prefix(self, operation: Operation) -> str:
        return await self._put_many(operation)

    async def _put_raising(self, operation: Operation) -> str:
        def fails(slot: np.ndarray) -> None:
            slot[:] = 255
            raise Source

        items: list[Any] = [(self.keys[key], self.truth.length(key), fails) for key in operation.keys]
        try:
            stored = await self.cache.put_from(items)
        except Source:
            return "raised"
        return str(stored)

    async def _get(self, operation: Operation) -> str:
        (key,) = operation.keys
        floor = self.truth.floor[key]
        began = self._began(operation)
        async with self.cache.get(self.keys[key], deadline_s=self._deadline_s(operation)) as lease:
            if lease is None:
                self._check_found(began, 0)
                self._used(began, None)
                return "miss"
            self.truth.check(key, lease.view, floor)
            self._used(began, [(key,)])
            return "hit"

    async def _hold(self, operation: Operation) -> str:
        floors = [self.truth.floor[key] for key in operation.keys]
        until_s = asyncio.get_running_loop().time() + self._limit_s(operation) - operation.values["for_s"]
        held: list[tuple[int, int, Lease]] = []
        try:
            for key, floor in zip(operation.keys, floors, strict=True):
                deadline_s = max(0.0, until_s - asyncio.get_running_loop().time())
                lease = await self.cache.get(self.keys[key], deadline_s=deadline_s).__aenter__()
                if lease is not None:
                    held.append((key, floor, lease))
                    self._leases.add(lease)
                    self.truth.check(key, lease.view, floor)
            await asyncio.sleep(operation.values["for_s"] if held else 0.0)
            if self.state == "open":  # a lease ends with its cache
                for key, floor, lease in held:
                    self.truth.check(key, lease.view, floor)
        finally:
            for _, _, lease in held:
                self._leases.discard(lease)
                lease.release()
        return f"{len(held)}"

    async def _get_into(self, operation: Operation) -> str:
        where = operation.values.get("memory", "host")
        if self._device is not None and where != "host":
            return str(
                await self._device.get(
                    self.cache, self._names(operation), operation.keys, where, self._deadline_s(operation)
                )
            )
        floors = [self.truth.floor[key] for key in operation.keys]
        buffers = [np.full(self.truth.length(key), 170, np.uint8) for key in operation.keys]
        began = self._began(operation)
        delivered = await self.cache.get_into(self._names(operation), buffers, deadline_s=self._deadline_s(operation))
        for key, buffer, floor in list(zip(operation.keys, buffers, floors, strict=True))[:delivered]:
            self.truth.check(key, buffer, floor)
        self._check_found(began, delivered)
        self._used(began, [operation.keys] if delivered == len(operation.keys) else None)
        return str(delivered)

    async def _lookup(self, operation: Operation) -> str:
        hit = await self.cache.lookup_keys(self._names(operation))
        if hit.chunks != sum(hit.by_tier.values()) or hit.chunks > len(operation.keys):
            raise Violation(f"lookup of {len(operation.keys)} keys: {hit}")
        return str(hit.chunks)

    async def _warm(self, operation: Operation) -> str:
        began = self._began(operation)
        warm = await self.cache.warm(self._names(operation), deadline_s=self._deadline_s(operation))
        self._check_found(began, warm)
        self._used(began, [operation.keys] if warm == len(operation.keys) else None)
        return str(warm)

    async def _prefetch(self, operation: Operation) -> str:
        if not self.cache.cpu.keep:
            return "no"
        values = {name: operation.values[name] for name in ("deadline", "ttl")}
        self._handles.append(self.cache.prefetch(self._names(operation), **values))
        return "begun"

    async def _cancel_prefetch(self, operation: Operation) -> str:
        if not self._handles:
            return "none"
        self._handles.pop(0).cancel()
        return "cancelled prefetch"

    async def _forget(self, operation: Operation) -> str:
        for key in operation.keys:
            self.truth.forget_begins(key)
            self._forgets[key] += 1
            self._stored.pop(key, None)
            passages = self.cache.cpu.under_way._by_key.get(self.keys[key], ())
            self._overtaken += len(passages) if isinstance(passages, tuple) else 1
        generations = [self.truth.newest[key] for key in operation.keys]
        await self.cache.forget(self._names(operation), deadline_s=self._deadline_s(operation))
        for key, generation in zip(operation.keys, generations, strict=True):
            if self.reaches_all:
                self.truth.forget_ended(key, generation)
        return "done"

    async def _flush(self, operation: Operation) -> str:
        writers = self.cache._fan_out.writers
        before = {writer.tier.name: writer.statistics() for writer in writers}
        report = await self.cache.flush(operation.values["timeout_s"])
        for writer in writers:
            name = writer.tier.name
            expected = (
                writer.counters.written - before[name].written,
                writer.counters.dropped - before[name].dropped,
                writer.pending,
            )
            found = (report.written[name], report.dropped[name], report.pending[name])
            if found != expected:
                raise Violation(f"flush: {name}: expected written, dropped, pending {expected}, found {found}")
            if not writer.pending:
                self._check_written(writer)
        return "complete" if report.complete else "pending"

    async def _clear_hot(self, operation: Operation) -> str:
        return str(self.cache.clear_hot())

    async def _statistics(self, operation: Operation) -> str:
        self.cache.statistics()
        self.cache.describe()
        return "said"

    def _deadline_s(self, operation: Operation) -> float | None:
        return operation.values.get("deadline_s")

    # What must have become of it

    def _put_begins(self, operation: Operation) -> _Began:
        self._deletions.put_begins(operation.keys, asyncio.get_running_loop().time())
        return self._began(operation)

    def _began(self, operation: Operation) -> _Began:
        loop = asyncio.get_running_loop()
        cache = self.cache
        keys = operation.keys
        there = 0
        while there < len(keys) and self._is_there(keys[there]):
            there += 1
        flights = cache._reader.flights
        quiet = self.running == 1 and not (any(cache.cpu.budget.held) or flights._flights or flights.stuck)
        if not quiet:
            self._recent.clear()
        return _Began(
            at_s=loop.time(),
            waited_from_s=min(
                (self._flown[self.keys[key]] for key in keys if self.keys[key] in flights._flights), default=loop.time()
            ),
            until_s=loop.time() + self._limit_s(operation),
            keys=keys,
            forgets=sum(self._forgets[key] for key in keys),
            there=there,
            losses=self._losses(keys),
            callers=self._begun if quiet else 0,
            lost=tuple(_counted_as_lost(writer) for writer in cache._fan_out.writers),
        )

    def _watch_flights(self) -> None:
        flights, loop = self.cache._reader.flights, asyncio.get_running_loop()
        fetch = flights.fetch

        def watched(key: bytes, *arguments: Any, **named: Any) -> Any:
            if key not in flights._flights:
                self._flown[key] = loop.time()
            return fetch(key, *arguments, **named)

        flights.fetch = watched  # type: ignore[method-assign]

    def _check_stored(self, began: _Began, stored: int) -> None:
        """A put stores everything, or finds no room until its deadline, or is overtaken by a forget."""
        if self.state != "open" or sum(self._forgets[key] for key in began.keys) != began.forgets:
            return
        if stored >= len(set(began.keys)):
            if stored == len(began.keys):  # else one that is named twice may be counted for another
                for key in began.keys:
                    self._stored[key] = began
                    self._deletions.stored(key, began.at_s)
            return
        now_s = asyncio.get_running_loop().time()
        if now_s < began.until_s - 1e-6:
            raise Violation(
                f"{stored} of {len(began.keys)} chunks are stored after {now_s - began.at_s:.6f} s, though there was more "
                "time"
            )

    def _check_found(self, began: _Began, found: int) -> None:
        """What is in memory, or in a tier that knows it, is found while there is time."""
        now_s = asyncio.get_running_loop().time()
        # Where others wait for memory, a tier is not waited for.
        until_s = min(began.until_s, began.waited_from_s + _PATIENCE_S)
        if found >= began.there or now_s >= until_s - 1e-6 or self.state != "open" or self._faults():
            return
        if sum(self._forgets[key] for key in began.keys) != began.forgets or self._losses(began.keys) != began.losses:
            return
        raise Violation(
            f"{found} of {began.there} chunks that were there are found after {now_s - began.at_s:.6f} s, though there was "
            "more time"
        )

    def _check_written(self, writer: TierWriter) -> None:
        """Nothing is queued: what was stored is in the tier, or was counted since."""
        if not self._alone or not self._knows(writer.tier):
            return
        is_remote = isinstance(writer.tier, RemoteTier)
        if self._faults() and not is_remote:
            return
        place = self.cache._fan_out.writers.index(writer)
        missing = []
        for key, began in self._stored.items():
            if is_remote:
                misled = self._misled_s(key) + _REMEMBERED_S >= began.at_s
            else:
                misled = self._deletions.mislead(key, began.at_s)
            if not misled and not self._in_tier(writer.tier, self.keys[key]):
                missing.append((began.at_s, began.lost[place], key))
        missing.sort(reverse=True)
        for count, (_, lost_then, _) in enumerate(missing, start=1):
            lost = _counted_as_lost(writer) - lost_then
            if count > lost:
                raise Violation(
                    f"{writer.tier.name}: nothing is queued, and of what was stored keys {[key for *_, key in missing]} "
                    f"are not there; since the first of those {lost} were counted as not written, or as unreadable"
                )

    def _check_head(self, began: _Began) -> None:
        """Of a prefix that was just stored what is hot is its head: a tail alone is of no use."""
        cpu = self.cache.cpu
        if self.cache.tiers:
            return  # while chunks are being written, what can go goes
        hot = [cpu.contains(self.keys[key]) for key in began.keys]
        whole = began.keys[0] % self._prefix == 0
        if whole and began.callers == self._begun and cpu.keep and self.state == "open" and any(hot) and not hot[0]:
            raise Violation(f"the head of a prefix that was just stored is not hot: {hot}")

    def _used(self, began: _Began, groups: list[tuple[int, ...]] | None) -> None:
        """What was used last is hot, up to four fifths of the arena, whatever the policy thinks of it."""
        cpu = self.cache.cpu
        disturbed = began.callers != self._begun or self._device is not None
        if groups is None or disturbed or not cpu.keep or self.state != "open":
            self._recent.clear()
            return
        self._recent += groups
        left = int(_SPARED * cpu._order._most)
        held = sum(map(len, groups)) if self.cache.tiers else 0
        for group in reversed(self._recent):
            left -= max(group) % self._prefix + 1  # what it follows stays with it
            held = max(0, held - len(group))  # those before it in this put may be being written: they stay
            if left < held:
                return
            gone = [key for key in group if not cpu.contains(self.keys[key])]
            if gone:
                raise Violation(f"keys {gone} were just used and are not hot; used last: {self._recent[-8:]}")

    def _knows(self, tier: Tier) -> bool:
        """Whether there is no doubt what a tier has."""
        if isinstance(tier, RemoteTier):
            return self._server is not None
        return self._alone and not tier.statistics().evicted

    def _in_tier(self, tier: Tier, name: bytes) -> bool:
        if isinstance(tier, RemoteTier):
            return self._server is not None and name in self._server.values
        return tier.contains(name)

    def _misled_s(self, key: int) -> float:
        """When the cache last had a reason to believe of a server that it has what it has not."""
        server = self._server
        return (
            float("-inf") if server is None else max(server.lied_s, server.evicted_s.get(self.keys[key], server.lied_s))
        )

    def _is_there(self, key: int) -> bool:
        name = self.keys[key]
        if self.cache.cpu.contains(name):
            return True
        return any(
            source.breaker.state is BreakerState.CLOSED  # else one goes there at a time, however long ago the fault was
            and self._knows(source.tier)
            and (isinstance(source.tier, RemoteTier) or key not in self._deletions)
            and not source.tier.traffic.refuses(name)
            and self._in_tier(source.tier, name)
            for source in self.cache._reader.flights.sources
        )

    def _losses(self, keys: Sequence[int]) -> int:
        lost = 0 if self._server is None else sum(self._server.lost[self.keys[key]] for key in keys)
        counters = [tier.statistics() for tier in self.cache.tiers]
        return lost + sum(each.evicted + each.corrupt for each in counters)

    # At the end of a run

    async def works_again(self, within_s: float, first: int) -> None:
        """Nothing fails any more: every breaker closes, everything is written, and what is written is read. Keys from
        `first` on are put, which nobody else uses."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        cache = self.cache
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
        others = self._tasks - {asyncio.current_task()}
        if others:
            longest_s = 2.0 * self._config.blocking_timeout_secs + (5.0 if self._device is None else 90.0)
            _, unended = await asyncio.wait(others, timeout=longest_s)
            if unended:
                raise Violation(f"these do not end: {sorted(task.get_name() for task in unended)}")
        key = first
        while True:
            key = first + (key - first + 1) % (_NEVER_PUT - _AT_A_TIME)
            operation = Operation("put", 0, 0.0, (key,), values={"timeout_s": 1.0})
            several = replace(operation, kind="put_many", keys=tuple(range(key, key + _AT_A_TIME)))
            well = {
                writer: writer.counters.dropped
                for writer in cache._fan_out.writers
                if isinstance(writer.tier, RemoteTier) and writer.breaker.would_allow(loop.time())
                if not (writer.stuck or len(writer._removals))
            }
            await self._put_many(several)
            if self._device is not None:
                await self._device.works(cache, self.keys, key)
            complete = await self._flush(operation)
            for writer, dropped in well.items():
                if writer.counters.dropped > dropped:
                    raise Violation(
                        f"{writer.tier.name}: nothing fails, and {writer.counters.dropped - dropped} of {_AT_A_TIME} chunks "
                        f"are dropped: {writer.breaker.state}"
                    )
            cache.clear_hot()
            await self._get(operation)
            await self._get(replace(operation, keys=(key + _NEVER_PUT,)))
            await self._lookup(replace(operation, keys=(key + _NEVER_PUT,)))
            left = self._not_yet_well()
            if complete == "complete" and not left:
                break
            if loop.time() > until_s:
                raise Violation(f"{within_s:.0f} s after the last fault: flush {complete}, {left}")
            await asyncio.sleep(1.0)
        await self._takes_everything(first)
        while True:
            await asyncio.sleep(1.0)
            try:
                self.check_idle()
                break
            except Violation:
                if loop.time() > until_s + within_s:
                    raise
        check_memory(cache)
        self._check_reads()

    def _not_yet_well(self) -> dict[str, str]:
        """What of the cache does not work yet, while nobody but this asks it anything."""
        cache = self.cache
        now_s = asyncio.get_running_loop().time()
        # A breaker that nobody has asked since its pause is over is as good as closed.
        left = {
            name: breaker.state.value
            for name, breaker in breakers_of(cache).items()
            if breaker.state.value != "closed" and not breaker.would_allow(now_s)
        }
        if stuck := cache.statistics().stuck:
            left["stuck"] = str(stuck)
        reader = cache._reader
        for source in reader._sources:
            asked = reader.flights._flights or reader._questions or source.tier.traffic.questions
            if source.breaker.probing(now_s) and not (asked or stuck):
                raise Violation(f"{source.tier.name}: the breaker waits for a read or a question, and there is none")
        for writer in cache._fan_out.writers:
            if writer.breaker.probing(now_s) and not (writer.pending or stuck):
                raise Violation(f"{writer.tier.name}: the breaker waits for a write, and there is none")
            if len(writer._removals):
                left[f"removals from {writer.tier.name}"] = str(len(writer._removals))
        return left

    async def _takes_everything(self, first: int) -> None:
        """A server that is well takes what it is offered, also what it had torn before, and gives it back."""
        writers = [writer for writer in self.cache._fan_out.writers if isinstance(writer.tier, RemoteTier)]
        if not writers or not self._alone:
            return
        await asyncio.sleep(_REMEMBERED_S)
        several = Operation("put_many", 0, 0.0, tuple(range(first + 50, first + 54)), values={"timeout_s": 5.0})
        every = [Operation("put", 0, 0.0, (key,), values={"timeout_s": 5.0}) for key in range(min(first, 12))]
        for operation in (several, *every):
            before = [writer.statistics() for writer in writers]
            await getattr(self, f"_{operation.kind}")(operation)
            await self._flush(operation)
            for writer, then in zip(writers, before, strict=True):
                now = writer.statistics()
                if now.dropped != then.dropped or now.declined != then.declined or now.queued:
                    raise Violation(
                        f"{writer.tier.name}: all is well, and {operation} was not written: {then}, then {now}"
                    )
            for key in operation.keys:
                name = self.keys[key]
                self.cache.clear_hot()
                if self._server is not None and name in self._server.values:
                    found = await self._get(replace(operation, kind="get", keys=(key,), values={}))
                    if found != "hit":
                        raise Violation(f"key {key}: all is well, and what was written a moment ago is not found")


def _counted_as_lost(writer: TierWriter) -> int:
    """What it has not written, and said so; of a tier on files, also what it wrote and found unreadable later."""
    counters = writer.counters
    unreadable = 0 if isinstance(writer.tier, RemoteTier) else writer.tier.statistics().corrupt
    return counters.dropped + counters.skipped + counters.replaced + counters.declined + unreadable
