"""What must come of calls that are under way together: what was stored is found or counted, what was used last stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.torture.simulation.deletions import Deletions
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.plan import Operation
from tiercache.core.breaker import BreakerState
from tiercache.tiers.cpu import StagingTier
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.remote.base import RemoteTier

if TYPE_CHECKING:
    from tests.torture.simulation.node import Node
    from tiercache.memory.slots import Lease
    from tiercache.scheduler.writer import TierWriter
    from tiercache.tiers.base import Tier

REMEMBERED_S = 11.0
"""For so long a cache may believe that a server has what it has evicted."""
_PATIENCE_S = 1.0
"""How long a get waits for a remote tier, its `timeout_s`, before it goes on."""
_SPARED = 0.8
"""The part of the arena that holds what was used last."""


@dataclass(frozen=True)
class Began:
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
    losses: tuple[int, ...]
    """How often tiers had lost them."""
    callers: int
    """Who had begun by then; 0 where others were under way, so that what comes of it is not its doing alone."""
    lost: tuple[int, ...]
    """What each writer had not written by then, or its tier could not read any more, and counted."""
    orphans: bool
    """True if one of its keys was hot behind one that was not. Such a chunk may be evicted for the one before it."""


class Expected:
    """Of one cache. `begun` and `running` count its callers."""

    def __init__(self, node: Node) -> None:
        stage = node.stage
        self.cache = node.cache
        self.keys = stage.keys
        self.server = stage.server
        self.alone = stage.setting.processes == 1
        """Whether no other process uses the same files."""
        self.on_device = False
        """Whether callers use device memory."""
        self.deletions = Deletions(node.cache, stage.keys)
        self.running = 0
        self.begun = 0
        self.changes = 0
        """How often a change of limits or tiers has begun or ended."""
        self.changing = 0
        """Changes that are under way."""
        self.forgets: Counter[int] = Counter()
        self.stored: dict[int, Began] = {}
        """The latest put of each key that stored it, and that no forget has followed."""
        self.recent: list[tuple[int, ...]] = []
        """Prefixes that were stored or read last, the latest last, with nobody else about."""
        self._prefix = stage.setting.prefix
        self._node = node
        self._promoted = 0
        """Chunks that prefetches began to promote since prefixes were last added to `recent`."""
        self._flown: dict[bytes, float] = {}
        """Time at which the last search for a chunk in tiers began."""

    def put_begins(self, operation: Operation, limit_s: float) -> Began:
        self.deletions.put_begins(operation.keys, asyncio.get_running_loop().time())
        return self.began(operation, limit_s)

    def began(self, operation: Operation, limit_s: float) -> Began:
        loop = asyncio.get_running_loop()
        cache = self.cache
        keys = operation.keys
        names = [self.keys[key] for key in keys]
        there = 0
        while there < len(keys) and self._is_there(keys[there]):
            there += 1
        reader = cache.parts.reader
        quiet = self.running == 1 and not (any(cache.cpu.budget.held) or reader.in_flight or reader.abandoned)
        if not quiet:
            self.recent.clear()
        return Began(
            at_s=loop.time(),
            waited_from_s=min(
                (self._flown[self.keys[key]] for key in keys if self.keys[key] in reader.in_flight), default=loop.time()
            ),
            until_s=loop.time() + limit_s,
            keys=keys,
            forgets=sum(self.forgets[key] for key in keys),
            there=there,
            losses=self._losses(keys),
            callers=self.begun if quiet else 0,
            lost=tuple(_counted_as_lost(writer) for writer in cache.parts.fan_out.writers),
            orphans=cache.cpu.prefix(names) < sum(map(cache.cpu.contains, names)),
        )

    @contextmanager
    def change(self) -> Iterator[None]:
        """While limits or tiers change, what was there may go."""
        self.changing += 1
        self._changed()
        try:
            yield
        finally:
            self.changing -= 1
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self.begun += 1
        self.recent.clear()

    def watch_reads(self) -> None:
        reader, loop = self.cache.parts.reader, asyncio.get_running_loop()
        fetch, promote, pin = reader.fetch_cold, reader.promote, reader.pin

        def watched(key: bytes, *arguments: Any, **named: Any) -> Any:
            if key not in reader.in_flight:
                self._flown[key] = loop.time()
            return fetch(key, *arguments, **named)

        def promoted(key: bytes, *arguments: Any) -> Coroutine[Any, Any, Lease | None]:
            self._promoted += 1
            return promote(key, *arguments)

        def pinned(key: bytes) -> Lease | None:
            self._promoted += 1  # its time may be over when this is looked at
            return pin(key)

        reader.fetch_cold = watched  # type: ignore[method-assign]
        reader.pin = pinned  # type: ignore[method-assign]
        reader.promote = promoted  # type: ignore[assignment, method-assign]

    def known(self, keys: Sequence[int]) -> int:
        """Return how many of the first of these keys a lookup finds without asking a server."""
        well = [source.tier for source in self.cache.parts.reader.tiers if source.breaker.state is BreakerState.CLOSED]
        names = [self.keys[key] for key in keys]
        there = [self.cache.cpu.contains(name) or any(tier.offers(name) for tier in well) for name in names]
        return [*there, False].index(False)

    def check_stored(self, began: Began, stored: int) -> None:
        """A put stores everything, or finds no room until its deadline, or is overtaken by a forget."""
        if not self._node.is_open or sum(self.forgets[key] for key in began.keys) != began.forgets:
            return
        if stored >= len(set(began.keys)):
            if stored == len(began.keys):  # else one that is named twice may be counted for another
                for key in began.keys:
                    self.stored[key] = began
                    self.deletions.stored(key, began.at_s)
            return
        now_s = asyncio.get_running_loop().time()
        if now_s < began.until_s - 1e-6:
            raise Violation(
                f"{stored} of {len(began.keys)} chunks are stored after {now_s - began.at_s:.6f} s, though there was more "
                "time"
            )

    def check_found(self, began: Began, found: int) -> None:
        """What is in memory, or in a tier that knows it, is found while there is time."""
        now_s = asyncio.get_running_loop().time()
        # Where others wait for memory, a tier is not waited for.
        until_s = min(began.until_s, began.waited_from_s + _PATIENCE_S)
        is_certain = self._node.is_open and not self._node.stage.faults() and not self.changing
        if found >= began.there or now_s >= until_s - 1e-6 or not is_certain:
            return
        if sum(self.forgets[key] for key in began.keys) != began.forgets or self._losses(began.keys) != began.losses:
            return
        # Lookups with little time give up a slow server, which is no fault.
        servers = [source for source in self.cache.parts.reader.tiers if isinstance(source.tier, RemoteTier)]
        if any(source.breaker._opened_s >= began.at_s for source in servers):
            return
        raise Violation(
            f"{found} of {began.there} chunks that were there are found after {now_s - began.at_s:.6f} s, though there was "
            "more time"
        )

    def check_written(self, writer: TierWriter) -> None:
        """Nothing is queued: what was stored is in the tier, or was counted since."""
        if not self.alone or not self._knows(writer.tier):
            return
        is_remote = isinstance(writer.tier, RemoteTier)
        if self._node.stage.faults() and not is_remote:
            return
        place = self.cache.parts.fan_out.writers.index(writer)
        missing = []
        for key, began in self.stored.items():
            if is_remote:
                misled = self._misled_s(key) + REMEMBERED_S >= began.at_s
            else:
                misled = self.deletions.mislead(key, began.at_s)
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

    def check_head(self, began: Began) -> None:
        """Of a prefix that was just stored what is hot is its head: a tail alone is of no use."""
        cpu = self.cache.cpu
        if self.cache.tiers or cpu._order.policy != "LRU" or self.cache.ahead.held > 0 or self._promoted > 0:
            # While chunks are being written, any leaf may go; other policies keep a chunk that was hot before its head.
            # A prefetch that ran meanwhile took slots.
            return
        hot = [cpu.contains(self.keys[key]) for key in began.keys]
        whole = began.keys[0] % self._prefix == 0
        if whole and began.callers == self.begun and cpu.keep and self._node.is_open and any(hot) and not hot[0]:
            raise Violation(f"the head of a prefix that was just stored is not hot: {hot}")

    def used(self, began: Began, groups: list[tuple[int, ...]] | None) -> None:
        """With LRU, the prefixes that were used last are hot, as far as they fit into four fifths of the arena."""
        cpu, ahead = self.cache.cpu, self.cache.ahead
        disturbed = began.callers != self.begun or began.orphans or self.on_device or cpu._order.policy != "LRU"
        # What a prefetch keeps, or has brought since, takes the place of what was used.
        disturbed = disturbed or ahead.held > 0 or self._promoted > 0
        disturbed = disturbed or bool(self.cache.parts.reader.mapped)  # what is mapped is not promoted
        self._promoted = 0
        if groups is None or disturbed or not cpu.keep or not self._node.is_open:
            self.recent.clear()
            return
        self.recent += groups
        left = int(_SPARED * cpu.most_slots)
        held = sum(map(len, groups)) if self.cache.tiers else 0
        for group in reversed(self.recent):
            left -= max(group) % self._prefix + 1  # what it follows stays with it
            held = max(0, held - len(group))  # those before it in this put may be being written: they stay
            if left < held:
                return
            gone = [key for key in group if not cpu.contains(self.keys[key])]
            if gone:
                raise Violation(f"keys {gone} were just used and are not hot; used last: {self.recent[-8:]}")

    def _knows(self, tier: Tier) -> bool:
        """Whether there is no doubt what a tier has."""
        if isinstance(tier, RemoteTier):
            return self.server is not None
        if tier.traffic.detached:
            return False  # its close may have ended its first scan
        if isinstance(tier, FileTier) and not all(directory.scanned for directory in tier.directories.all):
            return False  # it has just been attached
        return self.alone and not _evicted(tier)

    def _in_tier(self, tier: Tier, name: bytes) -> bool:
        if isinstance(tier, RemoteTier):
            return self.server is not None and name in self.server.values
        return tier.contains(name)

    def _misled_s(self, key: int) -> float:
        """When the cache last had a reason to believe of a server that it has what it has not."""
        server = self.server
        return (
            float("-inf") if server is None else max(server.lied_s, server.evicted_s.get(self.keys[key], server.lied_s))
        )

    def _is_there(self, key: int) -> bool:
        name = self.keys[key]
        if self.cache.cpu.contains(name):
            return True
        in_flight = self.cache.parts.reader.in_flight
        return any(
            not isinstance(source.tier, StagingTier)  # a chunk leaves it when its write has ended, or was declined
            and source.breaker.state is BreakerState.CLOSED  # else one goes there at a time
            and self._knows(source.tier)
            and (isinstance(source.tier, RemoteTier) or key not in self.deletions)
            and not source.tier.traffic.refuses(name)
            and self._in_tier(source.tier, name)
            # Shared tiers are asked for chunks that they may not have: a read that is joined may have looked before this
            # chunk was stored there.
            and not (source.tier.traits.shared and (name in in_flight or name in source._transfers))
            for source in self.cache.parts.reader.tiers
        )

    def _losses(self, keys: Sequence[int]) -> tuple[int, ...]:
        """By the server and by each tier: an eviction that is given up must not make up for one elsewhere."""
        lost = 0 if self.server is None else sum(self.server.lost[self.keys[key]] for key in keys)
        return (lost, self.changes, *(_evicted(tier) + _corrupt(tier) for tier in self.cache.tiers))


def _evicted(tier: Tier) -> int:
    """Chunks that were evicted, and those that are being evicted."""
    if isinstance(tier, FileTier):  # no copy of all its statistics: this is asked at each operation
        return tier.directories.counters.evicted + sum(len(directory._leaving) for directory in tier.directories.all)
    return 0 if isinstance(tier, RemoteTier) else tier.statistics().evicted


def _corrupt(tier: Tier) -> int:
    if isinstance(tier, FileTier):
        return tier.directories.counters.corrupt
    return tier.counters.corrupt if isinstance(tier, RemoteTier) else tier.statistics().corrupt


def _counted_as_lost(writer: TierWriter) -> int:
    """What it has not written, and said so; of a tier on files, also what it wrote and found unreadable later."""
    counters = writer.counters
    unreadable = 0 if isinstance(writer.tier, RemoteTier) else _corrupt(writer.tier)
    return counters.dropped + counters.skipped + counters.replaced + counters.declined + unreadable
