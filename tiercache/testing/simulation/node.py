"""One process of a simulation: a cache, and the callers who use it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.breaker import BreakerState
from tiercache.core.layout import Layout
from tiercache.device.driver import DeviceError
from tiercache.errors import CacheClosed, ConfigError, TierCacheError, TierUnavailable
from tiercache.testing.simulation.device_calls import DeviceCalls
from tiercache.testing.simulation.fitting_checks import check_fittings, watch_errors
from tiercache.testing.simulation.machine import Machine
from tiercache.testing.simulation.oracle import Truth, Violation, check_idle, check_memory
from tiercache.testing.simulation.plan import CHUNK_BYTES, Operation
from tiercache.testing.simulation.process import Process

if TYPE_CHECKING:
    from tiercache.tiers.cpu import Lease

_SLACK_S = 0.005
"""What a wait may take beyond its deadline: the pauses of copying threads."""
_CANCELLED_S = 0.05
"""How soon a cancelled call ends, when nothing hangs."""
_REMOVED_S = 0.1
"""What a removal may take, when nothing hangs."""
_NEVER_PUT = 100
"""So far from the keys that are put at the end are some that never are."""
_CLOSE_S = 1.2
"""What a close may take beyond its time-out: half a second for what hangs, and the same for what it leaves behind."""

Note = Callable[[str], None]


class Source(Exception):
    """Raised by a source of a put on purpose."""


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
        self._note = note
        self._faults = faults
        """Whether something has gone wrong outside of late, so that an error is no surprise."""
        self._start_may_fail = start_may_fail
        self._opened: dict[str, tuple[int, float]] = {}
        """How often breakers of writes were seen to open, and when that was last seen to be less."""
        self._machine = machine
        self._device: DeviceCalls | None = None
        self._stop = asyncio.Event()
        self._close_s: float | None = None
        self._ended = asyncio.Event()
        self._leases: set[Lease] = set()
        self._handles: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # From its own loop

    async def main(self) -> None:
        """Open, serve until `stop`, close."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self.cache.start()
        except ConfigError as error:
            self._note(f"start failed: {error}")
            self.state = "failed"
            if not self._start_may_fail():
                raise Violation(f"the cache does not start, though nothing fails: {error}") from error
            return
        finally:
            if loop.time() - began_s > 200:
                raise Violation(f"start took {loop.time() - began_s:.1f} s")
        watch_errors(self.cache.tiers, self._fail)
        if (twin := self._machine.twins.get(self.process)) is not None:
            self._device = DeviceCalls(twin, self.truth, CHUNK_BYTES)
        self.state = "open"
        await self._stop.wait()
        self.state = "closing"
        began_s = loop.time()
        report = await self.cache.close(self._close_s)
        took_s = loop.time() - began_s
        limit_s = (self._config.close_timeout_s if self._close_s is None else self._close_s) + _CLOSE_S
        if took_s > limit_s:
            raise Violation(f"close: expected {limit_s:.3f} s at most, took {took_s:.3f} s")
        self._note(f"closed: {report}")
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
        """Have it done in the process's own loop, from another's. Raises what it raises."""
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
                here.call_soon_threadsafe(outcome.set_exception, error)
            else:
                here.call_soon_threadsafe(outcome.set_result, None)

        loop.call_soon_threadsafe(lambda: self._tasks.add(loop.create_task(do())))
        await outcome

    def stop(self, timeout_s: float | None) -> None:
        self._close_s = timeout_s
        self._stop.set()

    def begin(self, operation: Operation) -> None:
        """A caller comes."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(operation), name=operation.kind)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if operation.cancel_s is not None:
            loop.call_later(operation.cancel_s, task.cancel)

    async def _serve(self, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.running += 1
        said = "nothing"
        try:
            said = await getattr(self, f"_{operation.kind}")(operation)
        except asyncio.CancelledError:
            said = "cancelled"
            late_s = loop.time() - began_s - (operation.cancel_s or 0.0)
            if operation.cancel_s is None or (late_s > _CANCELLED_S and not self._faults()):
                self._fail(Violation(f"{operation}: cancelled, and ended {late_s:.3f} s after that"))
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
            late = operation.kind == "forget" and operation.values.get("deadline_s", 1.0) < _REMOVED_S
            of_device = isinstance(error, DeviceError) and operation.values.get("memory", "host") != "host"
            lost = isinstance(error, DeviceError) and error.lost  # for good
            expected = operation.kind == "forget" or no_thread or of_device
            if not expected or not (late or lost or self._faults()):
                error.add_note(str(operation))
                self._fail(error)
        except BaseException as error:
            error.add_note(str(operation))
            self._fail(error)
        finally:
            self.running -= 1
            took_s = loop.time() - began_s
            limit_s = self._limit_s(operation)
            if took_s > limit_s + _SLACK_S and said != "cancelled":
                self._fail(Violation(f"{operation}: expected an end within {limit_s:.3f} s, took {took_s:.3f} s"))
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
        check_fittings(self.cache)

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
        stored = await self.cache.put(self.keys[key], self.truth.payload(key), deadline_s=self._deadline_s(operation))
        return str(stored)

    async def _put_many(self, operation: Operation, *, prefix: bool = False) -> str:
        where = operation.values.get("memory", "host")
        if self._device is not None and where != "host":
            return str(
                await self._device.put(
                    self.cache, self._names(operation), operation.keys, where, self._deadline_s(operation), prefix
                )
            )
        payloads = [self.truth.payload(key) for key in operation.keys]
        stored = await self.cache.put_many(
            self._names(operation), payloads, deadline_s=self._deadline_s(operation), prefix=prefix
        )
        if stored > len(payloads):
            raise Violation(f"{stored} of {len(payloads)} chunks are said to be stored")
        return str(stored)

    async def _put_prefix(self, operation: Operation) -> str:
        return await self._put_many(operation, prefix=True)

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
        async with self.cache.get(self.keys[key], deadline_s=self._deadline_s(operation)) as lease:
            if lease is None:
                return "miss"
            self.truth.check(key, lease.view, floor)
            return "hit"

    async def _hold(self, operation: Operation) -> str:
        (key,) = operation.keys
        floor = self.truth.floor[key]
        async with self.cache.get(self.keys[key], deadline_s=self._deadline_s(operation)) as lease:
            if lease is None:
                return "miss"
            self._leases.add(lease)
            try:
                self.truth.check(key, lease.view, floor)
                await asyncio.sleep(operation.values["for_s"])
                if self.state == "open":  # a lease ends with its cache
                    self.truth.check(key, lease.view, floor)
            finally:
                self._leases.discard(lease)
            return "hit"

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
        delivered = await self.cache.get_into(self._names(operation), buffers, deadline_s=self._deadline_s(operation))
        for key, buffer, floor in list(zip(operation.keys, buffers, floors, strict=True))[:delivered]:
            self.truth.check(key, buffer, floor)
        return str(delivered)

    async def _lookup(self, operation: Operation) -> str:
        hit = await self.cache.lookup_keys(self._names(operation))
        if hit.chunks != sum(hit.by_tier.values()) or hit.chunks > len(operation.keys):
            raise Violation(f"lookup of {len(operation.keys)} keys: {hit}")
        return str(hit.chunks)

    async def _warm(self, operation: Operation) -> str:
        return str(await self.cache.warm(self._names(operation), deadline_s=self._deadline_s(operation)))

    async def _prefetch(self, operation: Operation) -> str:
        if not self.cache.cpu.keep:
            return "no"
        self._handles.append(self.cache.prefetch(self._names(operation), **operation.values))
        return "begun"

    async def _cancel_prefetch(self, operation: Operation) -> str:
        if not self._handles:
            return "none"
        self._handles.pop(0).cancel()
        return "cancelled prefetch"

    async def _forget(self, operation: Operation) -> str:
        for key in operation.keys:
            self.truth.forget_begins(key)
        generations = [self.truth.newest[key] for key in operation.keys]
        await self.cache.forget(self._names(operation), deadline_s=self._deadline_s(operation))
        for key, generation in zip(operation.keys, generations, strict=True):
            if self.reaches_all:
                self.truth.forget_ended(key, generation)
        return "done"

    async def _flush(self, operation: Operation) -> str:
        report = await self.cache.flush(operation.values["timeout_s"])
        return "complete" if report.complete else "pending"

    async def _clear_hot(self, operation: Operation) -> str:
        return str(self.cache.clear_hot())

    async def _statistics(self, operation: Operation) -> str:
        self.cache.statistics()
        self.cache.describe()
        return "said"

    def _deadline_s(self, operation: Operation) -> float | None:
        return operation.values.get("deadline_s")

    # At the end of a run

    async def works_again(self, within_s: float, first: int) -> None:
        """Nothing fails any more: every breaker closes, everything is written, and what is written is read. Keys from
        `first` on are put, which nobody else uses."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        cache = self.cache
        operation = Operation("put", 0, 0.0, (first,))
        while True:
            (key,) = operation.keys
            key = first + (key - first + 1) % _NEVER_PUT
            operation = Operation("put", 0, 0.0, (key,))
            await self._put(operation)
            if self._device is not None:
                await self._device.works(cache, self.keys, key)
            report = await cache.flush(1.0)
            cache.clear_hot()
            await self._get(operation)
            await self._get(replace(operation, keys=(key + _NEVER_PUT,)))
            await self._lookup(replace(operation, keys=(key + _NEVER_PUT,)))
            statistics = cache.statistics()
            breakers = {source.tier.name: source.breaker for source in cache._reader._sources}
            breakers |= {f"writes of {writer.tier.name}": writer.breaker for writer in cache._fan_out.writers}
            # One that nobody has asked since its pause is over is as good as closed.
            opened = {
                name: breaker.state.value
                for name, breaker in breakers.items()
                if breaker.state.value != "closed" and not breaker.would_allow(loop.time())
            }
            if report.complete and not opened and not statistics.stuck:
                break
            if loop.time() > until_s:
                raise Violation(f"{within_s:.0f} s after the last fault: {opened} {report} {statistics.stuck} stuck")
            await asyncio.sleep(1.0)
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
        others = self._tasks - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5.0)
        while True:
            await asyncio.sleep(1.0)
            try:
                self.check_idle()
                break
            except Violation:
                if loop.time() > until_s + within_s:
                    raise
        check_memory(cache)
