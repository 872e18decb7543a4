"""One process of a simulation: a cache, and the callers who use it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.torture.simulation.calls import Calls
from tests.torture.simulation.device_calls import DeviceCalls
from tests.torture.simulation.expected import Expected
from tests.torture.simulation.fitting_checks import check_fittings, watch_errors
from tests.torture.simulation.oracle import Violation, check_idle, check_memory
from tests.torture.simulation.plan import CHUNK_BYTES, Operation
from tests.torture.simulation.process import Process
from tests.torture.simulation.watch import Watch
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.errors import CacheClosed, ConfigError, DeviceError, TierCacheError, TierUnavailable
from tiercache.lifecycle import DEVICE_S, FILE_SYSTEMS_S

if TYPE_CHECKING:
    from tests.torture.simulation.stage import Stage
    from tiercache.scheduler.writer import FlushReport

_SLACK_S = 0.005
"""What a wait may take beyond its deadline: the pauses of copying threads."""
_CANCELLED_S = 0.05
"""How soon a cancelled call ends, when nothing hangs."""
_START_S = 5.0
"""What a start may take besides the times of its tiers."""
_CLEANUP_S = 0.2
"""How long a put waits that is made in the clean-up of a cancelled caller."""
_UNMAPPED_S = 0.1
"""When a thread has unmapped what was leased until now."""
_CLOSE_S = 1.2
"""What a close may take beyond its time-out: half a second for what hangs, and the same for what it leaves behind."""
_MOST_ALIKE = 4
"""Tasks of one kind that an idle cache has: one for each directory, at most."""
_LENT_S = 60.0
"""How long a 3FS daemon may hold memory of a detached tier after the last fault, which cannot be attached meanwhile. A late
answer takes up to 15 s."""

_REMEMBER = frozenset({"put", "put_many", "put_prefix", "get", "get_into", "warm", "lookup", "flush", "statistics"})
"""Operations that leave what was used just before them where it is."""


class Node:
    """Lives as long as its process; made anew after it."""

    def __init__(self, stage: Stage, number: int, process: Process, config: Config) -> None:
        self.stage = stage
        self.number = number
        self.process = process
        self.config = config
        self.truth = stage.truth
        self.keys = stage.keys
        self.state = "starting"
        self.cache = TierCache(config, stage.layout)
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.expected = Expected(self)
        self.calls = Calls(self)
        self._stop = asyncio.Event()
        self._close_s: float | None = None
        self._cancel_close_s: float | None = None
        self._ended = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self._coming = 0
        """Callers on the way: a loop may run what was handed over later first."""
        self._cancelled: set[asyncio.Task[None]] = set()

    # From its own loop

    async def main(self) -> None:
        """Open, serve until `stop`, close."""
        loop = asyncio.get_running_loop()
        limit_s = FILE_SYSTEMS_S + DEVICE_S + 30.0 * len(self.stage.setting.tiers) + _START_S
        late = loop.call_later(limit_s, lambda: self.fail(Violation(f"start takes more than {limit_s:.0f} s")))
        may_fail = self.stage.start_may_fail()  # another process may set its directories up meanwhile
        try:
            await self.cache.start()
        except ConfigError as error:
            self.stage.heard(self.number, f"start failed: {error}")
            self.state = "failed"
            if not (may_fail or self.stage.start_may_fail()):
                raise Violation(f"the cache does not start, though nothing fails: {error}") from error
            return
        finally:
            late.cancel()
        watch_errors(self.cache.tiers, self.fail)
        self.expected.watch_reads()
        if (twin := self.stage.machine.twins.get(self.process)) is not None:
            self.calls.device = DeviceCalls(twin, self.truth, CHUNK_BYTES)
            self.expected.on_device = True
        self.state = "open"
        assert self.process.loop is not None
        self.process.loop.after_each = Watch(self.cache, self.fail).after_each
        await self._stop.wait()
        self.state = "closing"
        await self._close()
        if self.tasks:
            await asyncio.wait(self.tasks)
        for lease in list(self.calls.leases):
            lease.release()
        self.calls.leases.clear()
        self.calls.handles.clear()
        if self.calls.device is not None:
            self.calls.device.close()
        if self.cache.parts.reader.mapped:
            await asyncio.sleep(_UNMAPPED_S)
        self.state = "closed"

    @property
    def is_open(self) -> bool:
        return self.state == "open"

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
                self.fail(error)
            else:
                here.call_soon_threadsafe(outcome.set_result, None)

        def begin() -> None:
            task = loop.create_task(do())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        loop.call_soon_threadsafe(begin)
        await outcome

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        limit_s = self.config.close_timeout_s if self._close_s is None else self._close_s
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
        self.stage.heard(self.number, "closed" if was_cancelled else f"closed: {closing.result()}")

    def stop(self, timeout_s: float | None, cancel_s: float | None = None) -> None:
        self._close_s = timeout_s
        self._cancel_close_s = cancel_s
        self._stop.set()

    def others_deleted(self, keys: Iterable[int]) -> None:
        """Files of these keys, in each directory that tiers have, beside this process."""
        self.expected.deletions.happened(keys, self.process.world.now_s)

    def ask(self, operation: Operation) -> None:
        """Called by another process: a caller is on the way."""
        assert self.process.loop is not None
        self._coming += 1
        self.process.loop.call_soon_threadsafe(self._begin, operation)

    def _begin(self, operation: Operation) -> None:
        """A caller comes."""
        self._coming -= 1
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(operation), name=operation.kind)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
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
            said: str = await getattr(self.calls, operation.kind)(operation)
        except asyncio.CancelledError:
            self.expected.recent.clear()
            late_s = loop.time() - began_s - (operation.cancel_s or 0.0)
            hangs = operation.values.get("memory", "host") != "host" and self.stage.faults()  # its device uses the memory
            if task not in self._cancelled or (late_s > _CANCELLED_S and not hangs):
                raise Violation(f"cancelled, and ended {late_s:.3f} s after that") from None
            if "cleanup" in operation.values:
                values = {"deadline_s": _CLEANUP_S}
                put = replace(operation, kind="put", keys=(operation.values["cleanup"],), values=values)
                return f"cancelled, and its clean-up put: {await self.calls.put(put)}"
            return "cancelled"
        if task in self._cancelled:
            raise Violation(f"was cancelled, and ended as if it were not: {said}")
        return said

    async def _serve(self, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.expected.running += 1
        self.expected.begun += 1
        self.stage.begun.append(operation)
        changes = self.expected.changes
        said = "nothing"
        try:
            said = await self._said(operation)
        except CacheClosed:
            said = "closed"
            if self.state == "open":
                self.fail(Violation(f"{operation}: CacheClosed from an open cache"))
        except Violation as error:
            error.add_note(str(operation))
            self.fail(error)
        except (TierCacheError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            no_thread = isinstance(error, TierUnavailable) and "no thread" in str(error)
            detached = any(tier.traffic.detached for tier in self.cache.tiers)
            in_vain = operation.kind == "forget" and (detached or changes != self.expected.changes)
            in_vain |= operation.kind == "forget" and loop.time() - began_s >= self.calls.limit_s(operation) - 1e-6
            of_device = isinstance(error, DeviceError) and operation.values.get("memory", "host") != "host"
            lost = isinstance(error, DeviceError) and error.lost  # for good
            expected = operation.kind == "forget" or no_thread or of_device
            if not (in_vain or (expected and (lost or self.stage.faults()))):
                error.add_note(str(operation))
                self.fail(error)
        except BaseException as error:
            error.add_note(str(operation))
            self.fail(error)
        finally:
            self.expected.running -= 1
            took_s = loop.time() - began_s
            limit_s = self.calls.limit_s(operation)
            was_cancelled = asyncio.current_task() in self._cancelled  # its clean-up may end with the cache
            if took_s > limit_s + (_CLEANUP_S if was_cancelled else 0.0) + _SLACK_S:
                self.fail(Violation(f"{operation}: expected an end within {limit_s:.3f} s, took {took_s:.3f} s"))
            if operation.kind not in _REMEMBER:
                self.expected.recent.clear()
            self.counts[f"{operation.kind} {said.split(':')[0]}"] += 1
            self.stage.heard(self.number, f"{operation.kind} {operation.keys} -> {said}")
        self.check()

    def check(self) -> None:
        """What holds after each step."""
        if self.state == "open":
            try:
                check_memory(self.cache)
            except Violation as error:
                self.fail(error)

    async def settle(self, share: float) -> None:
        """Nothing fails: all tiers are attached, with caps of that share, and the hot cache has the size of the start."""
        while self._coming:
            await asyncio.sleep(0)
        while others := self.tasks - {asyncio.current_task()}:
            await asyncio.wait(others)
        until_s = asyncio.get_running_loop().time() + _LENT_S
        await self.calls.attach(Operation("attach", 0, 0.0))
        while any(tier.traffic.detached for tier in self.cache.tiers):
            if asyncio.get_running_loop().time() > until_s:
                raise Violation(f"nothing fails, and tiers cannot be attached for {_LENT_S:.0f} s")
            await asyncio.sleep(1.0)
            await self.calls.attach(Operation("attach", 0, 0.0))
        await self.calls.resize_files(share)
        whole = Operation("resize_hot", 0, 0.0, values={"slots": self.cache.cpu.slot_pool.reserved})
        await self.calls.resize_hot(whole)
        await self.calls.limit_tenants(whole)

    def check_idle(self) -> None:
        check_idle(self.cache, self.calls.leases)
        check_fittings(self.cache)
        kinds = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
        if many := {kind: count for kind, count in kinds.items() if count > _MOST_ALIKE}:
            raise Violation(f"nothing is under way, and so many tasks of a kind go on: {many}")

    def check_reads(self) -> None:
        """Check that each chunk that a tier has read is a hit or kept, unless it was forgotten meanwhile."""
        reader = self.cache.parts.reader
        if self.calls.device is not None or reader.mapped:  # a lease on what is mapped counts as a read
            return
        counters = reader.counters
        read = sum(tier.statistics().reads for tier in self.cache.tiers)
        of_use = sum(counters.hits.values()) - counters.hits[self.cache.cpu.name] + counters.kept
        if read > of_use + self.calls.overtaken:
            raise Violation(
                f"{read} chunks were read from tiers, {of_use} were given to callers or kept, and "
                f"{self.calls.overtaken} may have been forgotten meanwhile"
            )

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.process.world.stop()
