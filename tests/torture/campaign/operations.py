"""What a worker does with its cache: operations by seed, each verified and each by a deadline."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from tests.torture.campaign.messages import (
    Broken,
    Counted,
    Forgetting,
    Forgotten,
    Missed,
    Mouth,
    Promised,
    Putting,
    Wrong,
    now_s,
)
from tests.torture.campaign.payloads import (
    KEYS_A_LANE,
    LANES,
    PROMPT,
    SLOTS,
    difference,
    key_of,
    number_of,
    payload_of,
)
from tiercache.cache import TierCache
from tiercache.errors import TierCacheError

GET_S = 5.0
FLUSH_S = 10.0
OPERATION_S = 40.0
"""No operation has a longer deadline, or several that add up to more; what takes longer hangs."""
_LONGEST_HOLD_S = 0.03


class Tally:
    """What was done since the last report."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self._evicted = self._corrupt = 0
        """Of the present cache, as reported already."""

    def reported(self, cache: TierCache) -> Counted:
        """And begin anew."""
        tiers = [tier for name, tier in cache.statistics().tiers.items() if name != cache.cpu.name]
        evicted, corrupt = sum(tier.evicted for tier in tiers), sum(tier.corrupt for tier in tiers)
        done = Counted(
            dict(self.operations), self.longest_s, max(0, evicted - self._evicted), max(0, corrupt - self._corrupt)
        )
        self.operations, self.longest_s = Counter(), {}
        self._evicted, self._corrupt = evicted, corrupt
        return done

    def another_cache(self) -> None:
        self._evicted = self._corrupt = 0

    def took(self, name: str, seconds: float) -> None:
        self.operations[name] += 1
        self.longest_s[name] = max(seconds, self.longest_s.get(name, 0.0))


@dataclass(frozen=True)
class _Start:
    """Of an operation."""

    at_s: float
    closed: bool
    """All breakers were closed."""


class Lane:
    """One task of a worker. It puts and forgets keys of its own only, and reads the keys of all."""

    def __init__(
        self, place: str, slot: int, lane: int, cache: TierCache, random: Random, mouth: Mouth, tally: Tally
    ) -> None:
        self._place = place
        self._slot = slot
        self._lane = lane
        self._cache = cache
        self._random = random
        self._mouth = mouth
        self._tally = tally
        self._operations: dict[Callable[[], Awaitable[None]], int] = {
            self.put_one: 15,
            self.put_prefix: 20,
            self.get_one: 25,
            self.get_prefix: 15,
            self.look_up: 10,
            self.prefetch: 5,
            self.forget: 6,
            self.give_up: 4,
            self.clear_hot: 1,
        }

    async def step(self) -> None:
        (operation,) = self._random.choices(list(self._operations), list(self._operations.values()))
        name = operation.__name__.replace("_", " ")
        began_s = now_s()
        try:
            async with asyncio.timeout(OPERATION_S):
                await operation()
        except TimeoutError:
            self._mouth.say(Broken(f"{name} did not end within {OPERATION_S:.0f} s"))
        self._tally.took(name, now_s() - began_s)

    async def put_one(self) -> None:
        await self.store([self._own()])

    async def put_prefix(self) -> None:
        await self.store(self._prompt(self._slot, self._lane))

    async def store(self, numbers: list[int], *, flush: bool | None = None) -> bool:
        """Store chunks, and return True if every process must find them from now on."""
        lost, since_s = self._given_up(), now_s()
        self._mouth.say(Putting(numbers))
        keys = self._keys(numbers)
        if len(keys) == 1:
            stored = int(await self._cache.put(keys[0], payload_of(keys[0]), deadline_s=GET_S))
        else:
            payloads = [payload_of(key) for key in keys]
            stored = await self._cache.put_many(keys, payloads, deadline_s=GET_S, prefix=True)
        if flush is None:
            flush = self._random.random() < 0.4
        if not flush or stored < len(keys):
            return False
        report = await self._cache.flush(FLUSH_S)
        if not report.complete or self._given_up() != lost:
            return False
        self._mouth.say(Promised(numbers, since_s, now_s()))
        return True

    async def get_one(self) -> None:
        number, since = self._anybodys(), self._now()
        if not await self.find(number, self._random.random() * _LONGEST_HOLD_S if self._random.random() < 0.2 else 0.0):
            self._missed(number, since, "get")

    async def find(self, number: int, hold_s: float = 0.0) -> bool:
        """Get a chunk and verify it, again after it was held for a while; whether it was there."""
        key = key_of(self._place, number)
        async with self._cache.get(key, deadline_s=GET_S) as lease:
            if lease is None:
                return False
            self._verify(number, lease.view)
            if hold_s:
                await asyncio.sleep(hold_s)
                self._verify(number, lease.view)
        return True

    async def get_prefix(self) -> None:
        numbers = self._prompt(*self._anywhere())
        keys, since = self._keys(numbers), self._now()
        buffers = [np.zeros(len(payload_of(key)), np.uint8) for key in keys]
        delivered = await self._cache.get_into(keys, buffers, deadline_s=GET_S)
        for number, buffer in zip(numbers[:delivered], buffers, strict=False):
            self._verify(number, buffer)
        if delivered < len(numbers):
            self._missed(numbers[delivered], since, "get")

    async def look_up(self) -> None:
        numbers, since = self._prompt(*self._anywhere()), self._now()
        hit = await self._cache.lookup_keys(self._keys(numbers))
        if hit.chunks < len(numbers):
            self._missed(numbers[hit.chunks], since, "lookup")

    async def prefetch(self) -> None:
        keys = self._keys(self._prompt(*self._anywhere()))
        handle = self._cache.prefetch(keys, deadline=self._random.random() * 0.1, ttl=1.0)
        try:
            async with asyncio.timeout(self._random.random()):
                await handle
        except TimeoutError:
            handle.cancel()

    async def forget(self) -> None:
        await self.remove(self._prompt(self._slot, self._lane)[: self._random.randint(1, PROMPT)])

    async def remove(self, numbers: list[int]) -> bool:
        self._mouth.say(Forgetting(numbers))
        try:
            await self._cache.forget(self._keys(numbers), deadline_s=GET_S)
        except (TierCacheError, OSError):
            self._tally.operations["forgets refused"] += 1
            return False
        self._mouth.say(Forgotten(numbers))
        return True

    async def give_up(self) -> None:
        """An operation whose caller is cancelled at some instant."""
        operation = self.get_prefix if self._random.random() < 0.5 else self.put_prefix
        task = asyncio.ensure_future(operation())
        await asyncio.wait([task], timeout=self._random.random() * 0.004)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def clear_hot(self) -> None:
        self._cache.clear_hot()

    def _verify(self, number: int, found: np.ndarray) -> None:
        what = difference(payload_of(key_of(self._place, number)), found)
        if what is not None:
            self._mouth.say(Wrong(number, what))

    def _missed(self, number: int, since: _Start, by: str) -> None:
        after_s = now_s() - since.at_s
        if after_s >= GET_S / 2:
            return  # what was given up at a deadline says nothing about what is there
        said = self._cache.statistics()
        # Before, too: while one read probes a tier that is well again, others miss, and then its breaker is closed.
        if not since.closed or set(said.breakers.values()) != {"closed"}:
            self._tally.operations["misses beside a breaker"] += 1  # that it closes again is what `Prove` asks for
            return
        found = f"after {after_s:.3f} s, {said.slots_free} slots free, {said.reader}"
        self._mouth.say(Missed(number, since.at_s, by, found))

    def _now(self) -> _Start:
        return _Start(now_s(), set(self._cache.parts.reader.breakers().values()) == {"closed"})

    def _given_up(self) -> int:
        """Chunks that were put and will not be in the tier, for whatever reason it counts."""
        statistics = self._cache.statistics()
        writers = statistics.writers.values()
        return statistics.puts_skipped + sum(w.skipped + w.replaced + w.dropped + w.declined for w in writers)

    def _keys(self, numbers: Sequence[int]) -> list[bytes]:
        return [key_of(self._place, number) for number in numbers]

    def _own(self) -> int:
        return number_of(self._slot, self._lane, self._random.randrange(KEYS_A_LANE))

    def _anywhere(self) -> tuple[int, int]:
        return self._random.randrange(SLOTS), self._random.randrange(LANES)

    def _anybodys(self) -> int:
        return number_of(*self._anywhere(), self._random.randrange(KEYS_A_LANE))

    def _prompt(self, slot: int, lane: int) -> list[int]:
        """Of the first chunks of a prefix at least two."""
        first = self._random.randrange(KEYS_A_LANE // PROMPT) * PROMPT
        return [number_of(slot, lane, first + index) for index in range(self._random.randint(2, PROMPT))]
