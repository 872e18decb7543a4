"""Puts, gets, forgets, prefetches and cancelled callers over tiers that are slow, fail and hang, in an arena of a few slots.

Bytes say of which key they are and how often it had been forgotten when they were put. So a get that begins when its key was
forgotten n times must not give bytes from before, whatever was under way. The interleaving is seeded, but for the copying
threads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from tests.scheduler.held import CHUNK_BYTES, HeldTier, is_whole, key, opened, tier
from tiercache import TierCache
from tiercache.errors import TierUnavailable
from tiercache.testing import JumpingClockLoop

KEYS = 10
CALLERS = 10
OPERATIONS = 40
"""Of each caller."""
SLACK_S = 3.0
"""This machine may be busy: what threads and the loop take in real time."""


def contents(number: int, generation: int) -> np.ndarray:
    return np.full(CHUNK_BYTES // 8, number * 1_000_000 + generation, dtype=np.int64)


def generation_of(number: int, view: np.ndarray) -> int:
    found = view.view(np.int64)
    assert (found == found[0]).all(), "torn"
    assert found[0] // 1_000_000 == number, "another chunk's bytes"
    return int(found[0] % 1_000_000)


class Stress:
    def __init__(self, cache: TierCache, names: tuple[str, ...], seed: int) -> None:
        self.cache = cache
        self.names = names
        self.random = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.generations = [0] * KEYS
        self.hung: set[asyncio.Event] = set()
        self.calm = False
        self.counts: dict[str, int] = {}

    async def fate(self) -> None:
        chance = self.random.random()
        if self.calm or chance < 0.4:
            return
        for _ in range(self.random.choice((1, 3, 10, 40))):
            await asyncio.sleep(0)
        if chance > 0.97:
            event = asyncio.Event()
            self.hung.add(event)
            self.loop.call_later(self.random.choice((0.5, 5.0, 60.0)), event.set)
            await event.wait()
            self.hung.discard(event)
        elif chance > 0.9:
            raise TierUnavailable("this one failed")

    async def put(self, deadline_s: float) -> None:
        numbers = self.random.sample(range(KEYS), self.random.choice((1, 1, 1, 3, 6)))
        payloads = [contents(number, self.generations[number]) for number in numbers]
        await self.cache.put_many([key(number) for number in numbers], payloads, deadline_s=deadline_s)

    async def get(self, deadline_s: float) -> None:
        number = self.random.randrange(KEYS)
        begun = self.generations[number]
        async with self.cache.get(key(number), deadline_s=deadline_s) as lease:
            if lease is not None:
                self.check(number, begun, lease.view)
                for _ in range(self.random.choice((0, 2, 20))):
                    await asyncio.sleep(0)
                self.check(number, begun, lease.view)

    async def get_into(self, deadline_s: float) -> None:
        start = self.random.randrange(KEYS)
        numbers = list(range(start, min(KEYS, start + 4)))
        begun = [self.generations[number] for number in numbers]
        buffers = [np.zeros(CHUNK_BYTES, np.uint8) for _ in numbers]
        delivered = await self.cache.get_into([key(number) for number in numbers], buffers, deadline_s=deadline_s)
        for number, generation, buffer in list(zip(numbers, begun, buffers, strict=True))[:delivered]:
            self.check(number, generation, buffer)

    def check(self, number: int, begun: int, view: np.ndarray) -> None:
        found = generation_of(number, view)
        assert begun <= found <= self.generations[number], f"forgotten {begun} times, found bytes from before: {found}"
        self.counts["hits"] = self.counts.get("hits", 0) + 1

    async def forget(self, deadline_s: float) -> None:
        number = self.random.randrange(KEYS)
        self.generations[number] += 1  # in one step with what follows
        await self.cache.forget([key(number)], deadline_s=deadline_s)

    async def prefetch(self, deadline_s: float) -> None:
        if not self.cache.config.local_cpu:
            return
        start = self.random.randrange(KEYS)
        handle = self.cache.prefetch(
            [key(number) for number in range(start, KEYS)], ttl=self.random.choice((0.5, 30.0))
        )
        for _ in range(20):
            await asyncio.sleep(0)
        handle.cancel()

    async def others(self, deadline_s: float) -> None:
        self.random.choice((self.cache.clear_hot, lambda: self.cache.ahead.pin([key(0)], 1.0)))()

    async def caller(self) -> None:
        works: dict[Callable[[float], Awaitable[None]], int] = {
            self.put: 8, self.get: 8, self.get_into: 4, self.forget: 4, self.prefetch: 1, self.others: 1,
        }  # fmt: skip
        for _ in range(OPERATIONS):
            (work,) = self.random.choices(list(works), list(works.values()))
            deadline_s = self.random.choice((0.05, 0.5, 5.0))
            task = asyncio.ensure_future(work(deadline_s))
            began_s = self.loop.time()
            if self.random.random() < 0.15:
                for _ in range(self.random.randrange(30)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                await task
                self.counts[work.__name__] = self.counts.get(work.__name__, 0) + 1
            except (TierUnavailable, asyncio.CancelledError):
                pass
            took_s = self.loop.time() - began_s
            limit_s = deadline_s + 2 * self.cache.config.queue_wait_s + SLACK_S
            assert took_s < limit_s, f"{work.__name__} with {deadline_s} s took {took_s:.1f} s"

    async def quiet(self) -> None:
        """Everything answers again; after the breakers' longest pause all is as if nothing had happened."""
        self.calm = True
        for event in list(self.hung):
            event.set()
        await asyncio.sleep(130.0)
        await self.cache.flush()

    async def nothing_is_wrong(self) -> None:
        for name in self.names:
            for number in range(KEYS):
                stored = tier(name).chunks.get(key(number))
                if stored is not None:
                    found = generation_of(number, np.frombuffer(stored, np.uint8))
                    assert found == self.generations[number], f"{name} has bytes from before the forget"
        assert self.cache.statistics().stuck == 0
        self.cache.ahead.release_all()
        self.cache.ahead.unpin([key(0)])
        assert await is_whole(self.cache)
        for number in range(KEYS):
            assert await self.cache.put(key(number), contents(number, self.generations[number])), (
                "cannot be stored again"
            )
            await self.cache.flush()
        for name in self.names:
            assert len(tier(name).chunks) == KEYS, f"flush was complete, and {name} lacks chunks"
        self.cache.clear_hot()
        for number in range(KEYS):
            async with self.cache.get(key(number)) as lease:
                assert lease is not None and generation_of(number, lease.view) == self.generations[number]
        assert await is_whole(self.cache)


@pytest.mark.parametrize("local_cpu", [True, False], ids=["hot cache", "no hot cache"])
@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_wrong_lost_or_late(seed: int, local_cpu: bool) -> None:
    names = ("a", "b")
    async with opened(
        *names,
        slots=(8, 16)[seed % 2],
        concurrency=(2, 4)[seed // 2 % 2],
        local_cpu=local_cpu,
        queue_wait_s=0.1,
        on_queue_full=("wait", "skip", "replace")[seed % 3],
        write_queue_bytes=(2, 6)[seed % 2] * CHUNK_BYTES,
    ) as cache:
        stress = Stress(cache, names, seed)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingClockLoop)
        loop.busy = lambda: cache.cpu.copiers.unfinished + cache.parts.ingest.copiers.unfinished > 0
        for name in names:
            HeldTier.made[name].fate = stress.fate
        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(stress.caller())
        await stress.quiet()
        await stress.nothing_is_wrong()
        assert stress.counts["hits"] > 20, stress.counts
