"""3FS tiers on the emulator, over buffers of their own and over an arena in shared memory."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hf3fs.emulator.conftest import needs_fuse
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing import page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.testing.hf3fs import Hf3fsEmulator, install
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier
from tiercache.tiers.hf3fs.ring import RingSettings

FINGERPRINT = b"3" * 16
RINGS = RingSettings(entries=16, rings=2, hang_s=0.5)

install()


@pytest.fixture(scope="module", params=[pytest.param("fuse", marks=needs_fuse), "directory"])
def emulator(request: pytest.FixtureRequest) -> Iterator[Hf3fsEmulator]:
    with pytest.MonkeyPatch.context() as patch, Hf3fsEmulator(fuse=request.param == "fuse") as emulator:
        if request.param == "directory":
            patch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")
        yield emulator


@pytest.fixture
def place(emulator: Hf3fsEmulator, request: pytest.FixtureRequest) -> Path:
    """A directory on the mount, of this test's own."""
    emulator.control.clear()
    return emulator.mount / f"{abs(hash(request.node.nodeid)):x}"


class Memory:
    """Payload memory as tiers get it: of an arena in shared memory, or any."""

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self._next = 0

    def make(self, content: np.ndarray | None = None) -> np.ndarray:
        if self.arena is None:
            memory = page_aligned(CHUNK_BYTES)
        else:
            memory = self.arena.memory[self._next : self._next + CHUNK_BYTES]
            self._next += CHUNK_BYTES
            memory[:] = 0xEE
        if content is not None:
            memory[: content.nbytes] = content
            memory[content.nbytes :] = 0
        return memory


@pytest.fixture(params=["buffers", "arena"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    if request.param == "buffers":
        yield Memory(None)
        return
    arena = Arena(ArenaSettings(size_bytes=16 << 20, shm_name=f"test-{request.node.name[:20].replace('/', '_')}"))
    yield Memory(arena)
    arena.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(memory: Memory) -> Opened:
    @asynccontextmanager
    async def make(
        *places: Path, cap_bytes: int = 64 << 20, rings: RingSettings = RINGS, **values: Any
    ) -> AsyncIterator[Hf3fsTier]:
        settings = Hf3fsSettings(
            places, cap_bytes, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=4 << 20, rings=rings, **values
        )
        tier = Hf3fsTier(settings, FINGERPRINT)
        if memory.arena is not None:
            tier.use_arena(memory.arena)
        await tier.open()
        try:
            yield tier
        finally:
            await tier.close()

    return make
