"""What callers of a simulated process do, and what must come of each call by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.torture.simulation.device_calls import DeviceCalls
from tests.torture.simulation.fitting_checks import watch_errors
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.plan import CHUNK_BYTES, Operation
from tiercache.errors import ConfigError, DeviceError
from tiercache.lifecycle import FILE_SYSTEMS_S
from tiercache.memory.slots import Lease

if TYPE_CHECKING:
    from tests.torture.simulation.node import Node

CHANGE_S = 4 * FILE_SYSTEMS_S
"""What a change may take, with all that waits for it: several at a time, each with tiers that hang."""


class Source(Exception):
    """Raised by a source of a put on purpose."""


class Calls:
    """One method for each kind of operation. Each says what became of it."""

    def __init__(self, node: Node) -> None:
        self.cache = node.cache
        self.truth = node.stage.truth
        self.keys = node.stage.keys
        self.expected = node.expected
        self.device: DeviceCalls | None = None
        self.leases: set[Lease] = set()
        self.handles: list[Any] = []
        """Prefetches that were begun."""
        self.reaches_all = True
        """Whether its tiers are all there are; else what it forgets may lie in another one."""
        self.overtaken = 0
        """Reads that a forget may have met."""
        self._node = node

    def limit_s(self, operation: Operation) -> float:
        values = operation.values
        if operation.kind == "lookup":
            return self._node.config.lookup_timeout_ms / 1000
        if operation.kind in ("statistics", "clear_hot", "prefetch", "cancel_prefetch"):
            return 0.0
        if operation.kind in ("resize_hot", "limit_tenants", "detach"):
            return CHANGE_S
        if operation.kind == "attach":  # one change for each tier
            return CHANGE_S * len(self.cache.tiers)
        if operation.kind == "flush":
            return float(values["timeout_s"])
        deadline_s = values.get("deadline_s", self._node.config.blocking_timeout_secs)
        limit_s = float(deadline_s) + float(values.get("for_s", 0.0))
        if values.get("memory", "host") != "host" and self._node.stage.faults():
            limit_s += DeviceCalls.longest_s
        return limit_s

    def _names(self, operation: Operation) -> list[bytes]:
        return [self.keys[key] for key in operation.keys]

    def _payload(self, key: int) -> Any:
        """Of some keys the loop may copy it itself; that of the others only a thread may touch."""
        payload = self.truth.payload(key)
        return payload if key % 2 else payload.data

    async def put(self, operation: Operation) -> str:
        (key,) = operation.keys
        began = self.expected.put_begins(operation, self.limit_s(operation))
        stored = await self.cache.put(self.keys[key], self._payload(key), deadline_s=self._deadline_s(operation))
        self.expected.check_stored(began, int(stored))
        self.expected.used(began, [(key,)] if stored else None)
        return str(stored)

    async def put_many(self, operation: Operation) -> str:
        prefix = operation.kind == "put_prefix"
        where = operation.values.get("memory", "host")
        if self.device is not None and where != "host":
            return str(
                await self.device.put(
                    self.cache, self._names(operation), operation.keys, where, self._deadline_s(operation), prefix
                )
            )
        payloads = [self._payload(key) for key in operation.keys]
        began = self.expected.put_begins(operation, self.limit_s(operation))
        stored = await self.cache.put_many(
            self._names(operation), payloads, deadline_s=self._deadline_s(operation), prefix=prefix
        )
        if stored > len(payloads):
            raise Violation(f"{stored} of {len(payloads)} chunks are said to be stored")
        self.expected.check_stored(began, stored)
        if prefix and stored:
            self.expected.check_head(began)
        whole = stored == len(payloads)
        self.expected.used(
            began, ([operation.keys] if prefix else [(key,) for key in operation.keys]) if whole else None
        )
        return str(stored)

    async def put_prefix(self, operation: Operation) -> str:
        return await self.put_many(operation)

    async def put_raising(self, operation: Operation) -> str:
        def fails(slot: np.ndarray) -> None:
            slot[:] = 255
            raise Source

        items: list[Any] = [(self.keys[key], self.truth.length(key), fails) for key in operation.keys]
        try:
            stored = await self.cache.put_from(items)
        except Source:
            return "raised"
        return str(stored)

    async def get(self, operation: Operation) -> str:
        (key,) = operation.keys
        floor = self.truth.floor[key]
        began = self.expected.began(operation, self.limit_s(operation))
        async with self.cache.get(self.keys[key], deadline_s=self._deadline_s(operation)) as lease:
            if lease is None:
                self.expected.check_found(began, 0)
                self.expected.used(began, None)
                return "miss"
            self.truth.check(key, lease.view, floor)
            self.expected.used(began, [(key,)])
            return "hit"

    async def hold(self, operation: Operation) -> str:
        floors = [self.truth.floor[key] for key in operation.keys]
        until_s = asyncio.get_running_loop().time() + self.limit_s(operation) - operation.values["for_s"]
        held: list[tuple[int, int, Lease]] = []
        try:
            for key, floor in zip(operation.keys, floors, strict=True):
                deadline_s = max(0.0, until_s - asyncio.get_running_loop().time())
                lease = await self.cache.get(self.keys[key], deadline_s=deadline_s).__aenter__()
                if lease is not None:
                    held.append((key, floor, lease))
                    self.leases.add(lease)
                    self.truth.check(key, lease.view, floor)
            await asyncio.sleep(operation.values["for_s"] if held else 0.0)
            if self._node.is_open:  # a lease ends with its cache
                for key, floor, lease in held:
                    self.truth.check(key, lease.view, floor)
        finally:
            for _, _, lease in held:
                self.leases.discard(lease)
                lease.release()
        return f"{len(held)}"

    async def get_into(self, operation: Operation) -> str:
        where = operation.values.get("memory", "host")
        if self.device is not None and where != "host":
            return str(
                await self.device.get(
                    self.cache, self._names(operation), operation.keys, where, self._deadline_s(operation)
                )
            )
        floors = [self.truth.floor[key] for key in operation.keys]
        buffers = [np.full(self.truth.length(key), 170, np.uint8) for key in operation.keys]
        began = self.expected.began(operation, self.limit_s(operation))
        delivered = await self.cache.get_into(self._names(operation), buffers, deadline_s=self._deadline_s(operation))
        for key, buffer, floor in list(zip(operation.keys, buffers, floors, strict=True))[:delivered]:
            self.truth.check(key, buffer, floor)
        self.expected.check_found(began, delivered)
        self.expected.used(began, [operation.keys] if delivered == len(operation.keys) else None)
        return str(delivered)

    async def lookup(self, operation: Operation) -> str:
        known = self.expected.known(operation.keys)
        hit = await self.cache.lookup_keys(self._names(operation))
        if hit.chunks != sum(hit.by_tier.values()) or not known <= hit.chunks <= len(operation.keys):
            raise Violation(f"lookup of {len(operation.keys)} keys, the first {known} of them known: {hit}")
        return str(hit.chunks)

    async def warm(self, operation: Operation) -> str:
        began = self.expected.began(operation, self.limit_s(operation))
        warm = await self.cache.warm(self._names(operation), deadline_s=self._deadline_s(operation))
        self.expected.check_found(began, warm)
        self.expected.used(began, [operation.keys] if warm == len(operation.keys) else None)
        return str(warm)

    async def prefetch(self, operation: Operation) -> str:
        if not self.cache.cpu.keep:
            return "no"
        values = {name: operation.values[name] for name in ("deadline", "ttl")}
        self.handles.append(self.cache.prefetch(self._names(operation), **values))
        return "begun"

    async def cancel_prefetch(self, operation: Operation) -> str:
        if not self.handles:
            return "none"
        self.handles.pop(0).cancel()
        return "cancelled prefetch"

    async def forget(self, operation: Operation) -> str:
        for key in operation.keys:
            self.truth.forget_begins(key)
            self.expected.forgets[key] += 1
            self.expected.stored.pop(key, None)
            reader, name = self.cache.parts.reader, self.keys[key]
            self.overtaken += (name in reader.in_flight) + sum(name in tier._transfers for tier in reader.tiers)
        generations = [self.truth.newest[key] for key in operation.keys]
        await self.cache.forget(self._names(operation), deadline_s=self._deadline_s(operation))
        for key, generation in zip(operation.keys, generations, strict=True):
            if self.reaches_all:
                self.truth.forget_ended(key, generation)
        return "done"

    async def flush(self, operation: Operation) -> str:
        writers = self.cache.parts.fan_out.writers
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
                self.expected.check_written(writer)
        return "complete" if report.complete else "pending"

    async def clear_hot(self, operation: Operation) -> str:
        return str(self.cache.clear_hot())

    async def statistics(self, operation: Operation) -> str:
        self.cache.statistics()
        self.cache.describe()
        return "said"

    async def resize_hot(self, operation: Operation) -> str:
        size_gb = operation.values["slots"] * CHUNK_BYTES / 2**30
        return await self._change(self.cache.reconfigure({"max_local_cpu_size": size_gb}))

    async def limit_tenants(self, operation: Operation) -> str:
        if not self.cache.config.tenant_max_local_cpu_size:
            return "none"
        size_gb = operation.values["slots"] * CHUNK_BYTES / 2**30
        return await self._change(self.cache.reconfigure({"tenant_max_local_cpu_size": size_gb}))

    async def detach(self, operation: Operation) -> str:
        tiers = self.cache.tiers
        if not tiers:
            return "none"
        name = tiers[operation.values["tier"] % len(tiers)].name
        return await self._change(self.cache.detach(name, timeout_s=operation.values["timeout_s"]))

    async def attach(self, operation: Operation) -> str:
        for tier in list(self.cache.tiers):  # one may be about to be detached: then this waits for it
            await self._change(self.cache.attach(tier.name))
            watch_errors(
                [each for each in self.cache.tiers if each.name == tier.name and each is not tier], self._node.fail
            )
        return "done"

    async def resize_files(self, share: float) -> None:
        """Change the caps of its tiers to a share of what they were at the start."""
        config = self._node.config
        changes: dict[str, Any] = {
            name: value * share
            for name in ("max_local_disk_size", "max_gds_size", "max_hf3fs_size", "max_shared_memory_size")
            if (value := getattr(config, name))
        }
        if size := config.remote_storage_plugin_settings.get("fs.max_size"):
            changes["remote_storage_plugin.fs.max_size"] = float(size) * share
        await self._change(self.cache.reconfigure(changes))

    async def _change(self, work: Awaitable[object]) -> str:
        """What was there before may be gone after it."""
        arena = self.cache.parts.arena
        is_lent = arena.lent  # of a 3FS tier that was detached a moment ago
        with self.expected.change():
            try:
                await work
            except ConfigError as error:
                if is_lent or arena.lent:
                    return "refused"
                lost = isinstance(error.__cause__, DeviceError) and error.__cause__.lost  # for good
                if not (lost or self._node.stage.faults() or self._node.stage.start_may_fail()):
                    raise Violation(f"nothing fails, and a change does: {error}") from error
                return "refused"
        return "changed"

    def _deadline_s(self, operation: Operation) -> float | None:
        return operation.values.get("deadline_s")
