"""When all faults are over a cache works again, within a stated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.torture.simulation.expected import REMEMBERED_S
from tests.torture.simulation.node import Node
from tests.torture.simulation.oracle import Violation, check_memory
from tests.torture.simulation.plan import Operation
from tests.torture.simulation.watch import breakers_of
from tiercache.cache import TierCache
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.hf3fs.tier import RingIO
from tiercache.tiers.remote.base import RemoteTier

_NEVER_PUT = 100
"""So far from the keys that are put at the end are some that never are."""
_AT_A_TIME = 4
"""Keys that are put at once to see whether everything is written."""


async def works_again(node: Node, within_s: float, first: int) -> None:
    """Nothing fails any more: every breaker closes, everything is written, and what is written is read. Keys from
    `first` on are put, which nobody else uses."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    cache = node.cache
    for handle in node.calls.handles:
        handle.cancel()
    node.calls.handles.clear()
    while others := node.tasks - {asyncio.current_task()}:  # also those that begin while others are waited for
        longest_s = 2.0 * node.config.blocking_timeout_secs + (5.0 if node.calls.device is None else 90.0)
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
            for writer in cache.parts.fan_out.writers
            if isinstance(writer.tier, RemoteTier) and writer.breaker.would_allow(loop.time())
            # A write that was sent before the last fault ended may still time out.
            if not (writer.abandoned or len(writer.tier.traffic.removing) or writer.statistics().writing)
        }
        node.expected.begun += 1  # for a caller that begins only now
        await node.calls.put_many(several)
        device = node.calls.device
        device_works = device is None or await device.works(cache, node.keys, key)
        complete = await node.calls.flush(operation)
        for writer, dropped in well.items():
            if writer.counters.dropped > dropped:
                raise Violation(
                    f"{writer.tier.name}: nothing fails, and {writer.counters.dropped - dropped} of {_AT_A_TIME} chunks "
                    f"are dropped: {writer.breaker.state}"
                )
        cache.clear_hot()
        await node.calls.get(operation)
        await node.calls.get(replace(operation, keys=(key + _NEVER_PUT,)))
        await node.calls.lookup(replace(operation, keys=(key + _NEVER_PUT,)))
        left = _not_yet_well(cache)
        if complete == "complete" and not left and device_works:
            break
        if loop.time() > until_s:
            raise Violation(f"{within_s:.0f} s after the last fault: flush {complete}, device {device_works}, {left}")
        await asyncio.sleep(1.0)
    await _takes_everything(node, first)
    while True:
        await asyncio.sleep(1.0)
        try:
            node.check_idle()
            break
        except Violation:
            if loop.time() > until_s + within_s:
                raise
    check_memory(cache)
    node.check_reads()


def _not_yet_well(cache: TierCache) -> dict[str, str]:
    """What of the cache does not work yet, while nobody but this asks it anything."""
    now_s = asyncio.get_running_loop().time()
    # A breaker that nobody has asked since its pause is over is as good as closed.
    left = {
        f"breaker of {name}": breaker.state.value
        for name, breaker in breakers_of(cache).items()
        if breaker.state.value != "closed" and not breaker.would_allow(now_s)
    }
    if stuck := cache.statistics().stuck:
        left["stuck"] = str(stuck)
    for tier in cache.tiers:
        for directory in tier.directories.all if isinstance(tier, FileTier) else ():
            if (
                not directory.files.capacity.trusted
            ):  # a scan that failed is followed by another one after a second or more
                left[f"count of {directory.files.root}"] = "not known"
        io = tier.directories.io if isinstance(tier, FileTier) else None
        if isinstance(io, RingIO) and io.engine is not None and io.engine.in_flight:
            # Operations that were never answered keep their places in rings until these are made anew.
            left[f"transfers of {tier.name}"] = str(io.engine.in_flight)
    reader = cache.parts.reader
    for source in reader.tiers:
        asked = reader.in_flight or source.in_tier
        if source.breaker.probing(now_s) and not (asked or stuck):
            raise Violation(f"{source.tier.name}: the breaker waits for a read or a question, and there is none")
    for writer in cache.parts.fan_out.writers:
        if writer.breaker.probing(now_s) and not (writer.pending or stuck):
            raise Violation(f"{writer.tier.name}: the breaker waits for a write, and there is none")
        if len(writer.tier.traffic.removing):
            left[f"removals from {writer.tier.name}"] = str(len(writer.tier.traffic.removing))
    return left


async def _takes_everything(node: Node, first: int) -> None:
    """A server that is well takes what it is offered, also what it had torn before, and gives it back."""
    writers = [writer for writer in node.cache.parts.fan_out.writers if isinstance(writer.tier, RemoteTier)]
    if not writers or not node.expected.alone:
        return
    await asyncio.sleep(REMEMBERED_S)
    several = Operation("put_many", 0, 0.0, tuple(range(first + 50, first + 54)), values={"timeout_s": 5.0})
    every = [Operation("put", 0, 0.0, (key,), values={"timeout_s": 5.0}) for key in range(min(first, 12))]
    for operation in (several, *every):
        before = [writer.statistics() for writer in writers]
        await getattr(node.calls, operation.kind)(operation)
        await node.calls.flush(operation)
        for writer, then in zip(writers, before, strict=True):
            now = writer.statistics()
            if now.dropped != then.dropped or now.declined != then.declined or now.queued:
                raise Violation(f"{writer.tier.name}: all is well, and {operation} was not written: {then}, then {now}")
        for key in operation.keys:
            name = node.keys[key]
            node.cache.clear_hot()
            if node.expected.server is not None and name in node.expected.server.values:
                found = await node.calls.get(replace(operation, kind="get", keys=(key,), values={}))
                if found != "hit":
                    raise Violation(f"key {key}: all is well, and what was written a moment ago is not found")
