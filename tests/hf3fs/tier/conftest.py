"""3FS tiers on the emulator, over buffers of their own and over an arena in shared memory."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hf3fs_emulator import Hf3fsEmulator, install
from tests.hf3fs_emulator.client import descriptors
from tests.needs import needs_fuse
from tests.tiers.opened import open_tier, until
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import directories
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier, engine
from tiercache.tiers.hf3fs import tier as tier_module
from tiercache.tiers.hf3fs.ring import RingSettings

FINGERPRINT = b"3" * 16
RINGS = RingSettings(entries=16, rings=2, timeout_s=10.0)
HASTY = RingSettings(entries=16, rings=2, timeout_s=0.5)
"""For tests in which something hangs. A busy machine may be slower than that, so reads that must succeed use `gets`."""
PATIENCE_S = 20.0

install()


FUSE = [pytest.param("fuse", marks=needs_fuse)]


@pytest.fixture(scope="module", params=FUSE)
def emulator() -> Iterator[Hf3fsEmulator]:
    with Hf3fsEmulator() as emulator:
        yield emulator


@pytest.fixture
def place(emulator: Hf3fsEmulator, request: pytest.FixtureRequest) -> Path:
    """A directory on the mount, of this test's own."""
    emulator.control.clear()
    return emulator.mount / f"{abs(hash(request.node.nodeid)):x}"


@pytest.fixture(params=FUSE)
def mortal() -> Iterator[Hf3fsEmulator]:
    """An emulator of the test's own, to be killed or left in disorder."""
    with Hf3fsEmulator() as emulator:
        yield emulator
        emulator.resume()
    descriptors.let_go_of_dead_mounts()


LONGEST_LAG_S = 1.0
"""Longest lag of the loop on a busy machine. A mount that hangs would stop the loop until the daemon continues."""


@asynccontextmanager
async def responsive() -> AsyncIterator[None]:
    """The loop goes on all the time."""
    loop = asyncio.get_running_loop()
    lag_s = 0.0

    async def beat() -> None:
        nonlocal lag_s
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.01)
            lag_s = max(lag_s, loop.time() - before_s)

    heart = asyncio.create_task(beat())
    try:
        yield
        await asyncio.sleep(0)
    finally:
        heart.cancel()
        await asyncio.wait([heart])
    assert lag_s < LONGEST_LAG_S


class Memory:
    """Payload memory as tiers get it: of an arena in shared memory, or any."""

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self._next = 0
        self._free: list[np.ndarray] = []

    def make(self, content: np.ndarray | None = None) -> np.ndarray:
        if self.arena is None:
            memory = page_aligned(CHUNK_BYTES)
        elif self._free:
            memory = self._free.pop()
        else:
            memory = self.arena.memory[self._next : self._next + CHUNK_BYTES]
            self._next += CHUNK_BYTES
            assert len(memory) == CHUNK_BYTES, "the arena is used up"
        memory[:] = 0xEE
        if content is not None:
            memory[: content.nbytes] = content
            memory[content.nbytes :] = 0
        return memory

    def give_back(self, memory: np.ndarray) -> None:
        """Nobody uses it any more."""
        self._free.append(memory)

    def close(self) -> None:
        self._free.clear()
        gc.collect()  # errors keep frames, which keep views of the arena
        arena, self.arena = self.arena, None  # it goes with the last view, which a thread may still have
        if arena is not None:
            arena.close()


@pytest.fixture(params=["buffers", "arena"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    arena = None
    if request.param == "arena":
        arena = Arena(ArenaSettings(size_bytes=16 << 20, shm_name=f"test-{os.getpid()}"))
    memory = Memory(arena)
    yield memory
    memory.close()


Opened = Callable[..., Any]


def make_tier(*places: Path, cap_bytes: int = 64 << 20, rings: RingSettings = RINGS, **values: Any) -> Hf3fsTier:
    values = {"threads": 2, "chunk_bytes": CHUNK_BYTES, "iov_bytes": 4 << 20} | values
    return Hf3fsTier(Hf3fsSettings(places, cap_bytes, rings=rings, **values), FINGERPRINT)


@pytest.fixture
def opened(memory: Memory) -> Opened:
    def make(*places: Path, **values: Any) -> AbstractAsyncContextManager[Hf3fsTier]:
        tier = make_tier(*places, **values)
        if memory.arena is not None:
            tier.use_arena(memory.arena)
        return open_tier(tier)

    return make


@pytest.fixture
async def tier(opened: Opened, place: Path) -> AsyncIterator[Hf3fsTier]:
    async with opened(place) as tier:
        yield tier


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up what hangs after a tenth of a second."""
    for module in (engine, tier_module, directories):
        monkeypatch.setattr(module, "_CLOSE_S", 0.1)


async def put(tier: Hf3fsTier, memory: Memory, *numbers: int) -> None:
    for number in numbers:
        key, payload = chunk(number)
        source = memory.make(payload)
        assert await tier.write(key, source, CHUNK_BYTES)
        memory.give_back(source)


async def get(tier: Hf3fsTier, memory: Memory, number: int) -> None:
    """The chunk is there and is right."""
    key, payload = chunk(number)
    into = memory.make()
    assert await tier.read(key, into) == CHUNK_BYTES
    assert np.array_equal(into, payload)
    memory.give_back(into)


async def gets(tier: Hf3fsTier, memory: Memory, *numbers: int) -> None:
    """The chunks are there and are right, sooner or later: the emulator may be slower than `HASTY` allows."""
    async with asyncio.timeout(PATIENCE_S):
        for number in numbers:
            while True:
                with contextlib.suppress(TierUnavailable):
                    await get(tier, memory, number)
                    break
                await until(lambda: tier.io.engine.serves)


async def works_again(tier: Hf3fsTier, memory: Memory, number: int) -> None:
    """Sooner or later. What fails until then is what a breaker is for."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError, TierUnavailable):
                await put(tier, memory, number)
                await get(tier, memory, number)
                return
            await until(lambda: tier.io.engine.serves)


async def written(tier: Hf3fsTier, memory: Memory, number: int) -> None:
    """Sooner or later, with no read in between."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await put(tier, memory, number)
            except (OSError, TierUnavailable):
                await until(lambda: tier.io.engine.serves)


def start_reading(tier: Hf3fsTier, memory: Memory, *numbers: int) -> list[asyncio.Task[int | None]]:
    return [asyncio.create_task(tier.read(chunk(number)[0], memory.make())) for number in numbers]


async def all_places_are_free(tier: Hf3fsTier, but: int = 0) -> bool:
    """Every transfer buffer can be taken, but for so many."""
    buffers, places = tier.io.engine.buffers, []
    with contextlib.suppress(TierUnavailable):
        while True:
            places.append(await buffers.take(0.01))
    for place in places:
        buffers.give_back(place)
    return len(places) == buffers.count - but
