"""What must hold, after each step and at the end, whatever was asked and whatever failed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from tiercache.cache import TierCache
from tiercache.memory.slots import Purpose, purpose_of
from tiercache.tiers.cpu import CpuTier

_NAME = struct.Struct("<II")
_LENGTHS = (4096, 4096, 4088, 2504, 8)
_PATTERN = bytes(range(256)) * 17


class Violation(AssertionError):
    """Something is not as tiercache promises."""


class Truth:
    """Which bytes may be read of each key. A forget makes a new generation of it; what is put later has other bytes.

    Where several processes share a directory a forget of one says nothing to the others' memory, and all generations have
    equal bytes.
    """

    def __init__(self, keys: int, *, generations: bool) -> None:
        self.generations = generations
        self.newest = [0] * keys
        self.floor = [0] * keys
        """The oldest generation that what begins now may see."""
        self.removed = [0] * keys
        """The oldest generation that may be left on something durable."""
        self._payloads: dict[tuple[int, int], np.ndarray] = {}

    def payload(self, key: int) -> np.ndarray:
        """What a put that begins now stores."""
        return self._payload(key, self.newest[key])

    def length(self, key: int) -> int:
        return _LENGTHS[key % len(_LENGTHS)]

    def forget_begins(self, key: int) -> None:
        if self.generations:
            self.newest[key] += 1
            self.floor[key] = self.newest[key]

    def forget_ended(self, key: int, generation: int) -> None:
        """Without an error, having begun with that generation."""
        self.removed[key] = max(self.removed[key], generation)

    def memory_is_lost(self) -> None:
        """The process has ended: what was not removed from a durable tier may be seen again."""
        self.floor = list(self.removed)

    def power_was_cut(self) -> None:
        """Removals are not synced."""
        self.removed = [0] * len(self.removed)
        self.floor = list(self.removed)

    def is_newest(self, key: int, found: bytes) -> bool:
        """Whether these are the bytes of what is put now."""
        return found == self.payload(key).tobytes()

    def check(self, key: int, found: np.ndarray, floor: int) -> None:
        """`floor` is what it was when the read began."""
        if found.nbytes >= _NAME.size:
            named, generation = _NAME.unpack(found[: _NAME.size].tobytes())
            if named == key and floor <= generation <= self.newest[key]:
                if np.array_equal(found, self._payload(key, generation)):
                    return
                raise Violation(f"key {key}: the bytes of generation {generation} are torn")
            if named == key and generation < floor:
                raise Violation(
                    f"key {key}: expected generation {floor} or later, found {generation}: it was forgotten"
                )
        raise Violation(f"key {key}: wrong bytes: {found[:16].tobytes().hex()}, {found.nbytes} of {self.length(key)}")

    def _payload(self, key: int, generation: int) -> np.ndarray:
        payload = self._payloads.get((key, generation))
        if payload is None:
            length = self.length(key)
            named = _NAME.pack(key, generation)
            first = (key * 7 + generation * 13) & 255
            payload = np.frombuffer((named + _PATTERN[first : first + length])[:length], np.uint8)
            self._payloads[key, generation] = payload
        return payload


def check_memory(cache: TierCache) -> None:
    """Slots free, hot, held and being filled are all slots; budgets count just those."""
    parts = cache.parts
    for reader in [parts.reader] if parts.on_device is None else [parts.reader, parts.on_device.reader]:
        abandoned = sum(len(tier.abandoned) for tier in reader.tiers if tier.mapped is None)
        _check_slots(reader.cpu, abandoned)
        share = max(1, getattr(reader.cpu.pool, "reserved", reader.cpu.pool.count) // (2 * max(1, reader.cpu.budget.tiers)))
        for tier in reader.tiers:
            if tier.mapped is None and (reading := len(tier._transfers)) > share:
                raise Violation(f"{tier.name} may read into {share} slots of {reader.cpu.name}: {reading}")
    _check_queues(cache)


def _check_slots(cpu: CpuTier, abandoned: int) -> None:
    evictable = [purpose_of(entry.leases) for entry in cpu._entries.values()].count(None)
    held = len(cpu._entries) - evictable
    if evictable != cpu._order.evictable:
        raise Violation(f"{cpu.name}: slots: {evictable} can be evicted, the tier counts {cpu._order.evictable}")
    elsewhere = cpu.pool.count - cpu.pool.free - len(cpu._entries)
    if elsewhere < 0 or sum(cpu.budget.held) + abandoned != held + elsewhere:
        raise Violation(
            f"{cpu.name}: slots: {cpu.pool.count} in all, {cpu.pool.free} free, {len(cpu._entries)} hot, {held} of them "
            f"held; so {elsewhere} are being filled or leave, {abandoned} of them abandoned, and the budget counts "
            f"{cpu.budget.held}"
        )
    if min(cpu.budget.held) < 0:
        raise Violation(f"{cpu.name}: budget: counts below zero: {cpu.budget.held}")


def _check_queues(cache: TierCache) -> None:
    for writer in cache.parts.fan_out.writers:
        queued_bytes = sum(lease.payload_bytes for lease in writer._queue.values())
        if queued_bytes != writer._queued_bytes:
            raise Violation(
                f"{writer.tier.name}: {queued_bytes} bytes are queued, the queue counts {writer._queued_bytes}"
            )
        is_whole = cache.cpu.budget.slots == cache.cpu.slot_pool.reserved  # else the limit may just have been lowered
        if is_whole and len(writer._queue) > 1 and queued_bytes > writer.settings.queue_bytes:
            most = writer.settings.queue_bytes
            raise Violation(f"{writer.tier.name}: {queued_bytes} bytes are queued, {most} may be")


def check_idle(cache: TierCache, leased: Iterable[object]) -> None:
    """Nothing is under way: no table of what is keeps anything."""
    tables: dict[str, Any] = {
        "who waits for slots": [turn for turns in cache.cpu.wait_queue.waiting for turn in turns],
        "flights": cache.parts.reader.in_flight,
    }
    for writer in cache.parts.fan_out.writers:
        name = writer.tier.name
        tables |= {
            f"queue of {name}": writer._queue,
            f"writes of {name}": writer._writing,
        }
        tables[f"abandoned writes of {name}"] = writer._abandoned
    for tier in cache.tiers:
        tables |= {
            f"traffic of {tier.name}": tier.traffic.in_flight,
            f"removals of {tier.name}": tier.traffic.removing,
        }
    kept = {name: table for name, table in tables.items() if len(table)}
    if kept:
        raise Violation(f"nothing is under way, and these are not empty: {kept}")
    held = cache.cpu.budget.held
    if held[Purpose.WRITE] or (held[Purpose.READ] and not list(leased)):
        raise Violation(f"nothing is under way, and slots are held: {held}")
