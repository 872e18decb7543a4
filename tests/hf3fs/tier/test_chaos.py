"""Everything goes wrong at random, over and over: what is served is right, what was stored is there, and nothing is left."""

import asyncio
import errno
import random
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import HASTY, Memory, Opened
from tests.hf3fs_emulator import Hf3fsEmulator
from tiercache.errors import TierFull, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.hf3fs import Hf3fsTier

T = TypeVar("T")

ROUNDS = 14
AT_ONCE = 8
PATIENCE_S = 30.0


class Chaos:
    def __init__(self, tier: Hf3fsTier, memory: Memory, emulator: Hf3fsEmulator, seed: int) -> None:
        self.tier = tier
        self.memory = memory
        self.emulator = emulator
        self.random = random.Random(seed)
        self.stored: set[int] = set()
        self.failures = 0
        self.failed_last = False
        self.left: set[asyncio.Task[None]] = set()

    async def put(self, number: int) -> None:
        key, payload = chunk(number)
        source = self.memory.make(payload)
        if await self.attempt(self.tier.write(key, source, CHUNK_BYTES)):
            self.stored.add(number)
        self.memory.give_back(source)

    async def get(self, number: int) -> bool:
        key, payload = chunk(number)
        into = self.memory.make()
        length = await self.attempt(self.tier.read(key, into))
        if length is not None:
            assert length == CHUNK_BYTES
            assert np.array_equal(into, payload), "wrong bytes"
        self.memory.give_back(into)
        return length is not None

    async def attempt(self, work: Awaitable[T]) -> T | None:
        """None when it failed in a way that may be. CorruptChunk may not be."""
        self.failed_last = False
        try:
            return await work
        except (OSError, TierUnavailable, TierFull):
            self.failures += 1
            self.failed_last = True
            return None

    async def go_wrong(self, numbers: range) -> None:
        """One kind of bad luck, and work meanwhile."""
        control = self.emulator.control
        direction = self.random.choice(["read", "write", None])
        count = self.random.randint(1, 4)
        kind = self.random.choice(["fail", "short", "delay", "lose", "hang", "pause", "kill", "none"])
        if kind == "fail":
            control.fail(self.random.choice([errno.EIO, errno.EREMOTEIO, errno.ENOSPC, errno.EBADF]), count, direction)
        elif kind == "short":
            control.shorten(self.random.choice([0, 17, 4096, 20000]), count, direction)
        elif kind == "delay":
            control.delay(0.02, count, direction)
        elif kind == "lose":
            control.lose(count, direction)
        elif kind == "hang":
            control.hang()
        elif kind == "pause" and self.emulator.fuse:
            self.emulator.pause()
        tasks = [asyncio.create_task(self.put(self.random.choice(numbers))) for _ in range(AT_ONCE // 2)]
        known = sorted(self.stored) or list(numbers)
        tasks += [asyncio.create_task(self.get(self.random.choice(known))) for _ in range(AT_ONCE // 2)]
        if kind == "kill" and self.emulator.fuse:  # clients of a plain directory cannot deregister in between
            await asyncio.sleep(0)
            self.emulator.kill()
            await asyncio.to_thread(self.emulator.restart)
        await asyncio.wait(tasks, timeout=self.random.choice([0.05, 0.4]))
        self.emulator.resume()
        self.emulator.control.clear()
        done, left = await asyncio.wait(tasks, timeout=1.0)
        for task in done:
            task.result()
        self.left |= left  # reads whose answer was lost: their slots are theirs until the end

    async def until_all_is_well(self) -> None:
        """What was stored is there, but for what the tier evicted when it was told that the device is full."""
        self.emulator.resume()
        self.emulator.control.clear()
        lost = 0
        async with asyncio.timeout(PATIENCE_S):
            for number in [*self.stored, 999]:
                if number == 999:
                    while 999 not in self.stored:
                        await self.put(999)
                lost += not await self.get_in_the_end(number)
        assert lost <= self.tier.statistics().evicted

    async def get_in_the_end(self, number: int) -> bool:
        """As `get`, once nothing fails any more."""
        while not await self.get(number):
            if not self.failed_last:
                return False
            await self.tier.io.engine.until(lambda: self.tier.io.engine.serves)
        return True


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_faults(mortal: Hf3fsEmulator, opened: Opened, memory: Memory, seed: int) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier:
        chaos = Chaos(tier, memory, mortal, seed)
        await chaos.put(0)
        for round in range(ROUNDS):
            await chaos.go_wrong(range(round * 3, round * 3 + 12))
        await chaos.until_all_is_well()
        assert chaos.failures, "nothing went wrong: the test tests nothing"
        assert tier.statistics().corrupt == 0
        assert not list((mortal.mount / "chunks" / "quarantine").glob("*"))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*chaos.left)
