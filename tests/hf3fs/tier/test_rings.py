"""Rings and the engine over them: kept full, exact about what each transfer did, and clean when it ends."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import hf3fs_fuse.io
import hf3fs_py_usrbio
import numpy as np
import pytest

from tests.hf3fs.tier.conftest import until
from tests.hf3fs_emulator import Hf3fsEmulator
from tiercache.core.header import HEADER_BYTES
from tiercache.errors import TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.hf3fs.engine import PART_BYTES, RingEngine
from tiercache.tiers.hf3fs.files import RegisteredFile, RegisteredFiles
from tiercache.tiers.hf3fs.ring import Buffers, Piece, RingSettings, Transfer, registered_arena

PAGE = 4096


class Bench:
    """An engine, registered files, and memory of one page a place."""

    def __init__(self, engine: RingEngine, place: Path) -> None:
        self.engine = engine
        self.buffers = engine.buffers
        self.files = RegisteredFiles(hf3fs_fuse.io)
        self.place = place

    def file(self, name: str, content: bytes) -> RegisteredFile:
        (self.place / name).write_bytes(content)
        return self.files.open_to_read(str(self.place / name))

    def create(self, name: str) -> RegisteredFile:
        return self.files.create(str(self.place / name))

    def begin(self, file: RegisteredFile, number: int, *, read: bool = True, place: int | None = None) -> Transfer:
        """Page `number` of the file, to or from the place of this number."""
        piece = self.buffers.piece(number if place is None else place, 0, PAGE)
        return self.engine.transfer(file.descriptor, [(piece, number * PAGE)], read=read)

    def page(self, number: int) -> bytes:
        return self.buffers.view(number).tobytes()


OpenBench = Callable[..., Any]


@pytest.fixture
def bench(emulator: Hf3fsEmulator, place: Path) -> OpenBench:
    @asynccontextmanager
    async def make(place_bytes: int = PAGE, size_bytes: int = 2 << 20, **settings: Any) -> AsyncIterator[Bench]:
        place.mkdir()
        values = {"entries": 8, "rings": 1, "timeout_s": 20.0} | settings
        engine = RingEngine(
            hf3fs_fuse.io,
            emulator.mount,
            RingSettings(**values),
            lambda: Buffers(size_bytes, place_bytes, "pages"),
        )
        await engine.open()
        bench = Bench(engine, place)
        try:
            yield bench
        finally:
            await engine.close()
            await asyncio.to_thread(bench.files.close)

    return make


def pages(count: int) -> bytes:
    return np.random.default_rng(count).integers(0, 256, count * PAGE, dtype=np.uint8).tobytes()


async def moved(transfers: list[Transfer]) -> list[int]:
    async with asyncio.timeout(20):
        return list(await asyncio.gather(*(each.ended for each in transfers)))


async def test_ring_is_filled_to_its_last_entry_and_the_rest_waits(bench: OpenBench, emulator: Hf3fsEmulator) -> None:
    async with bench(entries=8) as opened:
        content = pages(40)
        file = opened.file("file", content)
        emulator.control.hang()
        transfers = [opened.begin(file, number) for number in range(40)]
        await asyncio.to_thread(emulator.control.until_hanging, 8)
        before = emulator.control.statistics().operations
        emulator.control.resume()
        assert await moved(transfers) == [PAGE] * 40
        assert emulator.control.statistics().operations - before == 40
        assert b"".join(map(opened.page, range(40))) == content
        assert opened.engine.in_flight == 0
        opened.files.release(file)


async def test_slow_operation_holds_back_room_and_loses_nothing(bench: OpenBench, emulator: Hf3fsEmulator) -> None:
    """EAGAIN although entries are free: submissions are given back in order only."""
    async with bench(entries=4, io_depth=1) as opened:
        content = pages(24)
        file = opened.file("file", content)
        emulator.control.delay(0.2)
        assert await moved([opened.begin(file, number) for number in range(24)]) == [PAGE] * 24
        assert b"".join(map(opened.page, range(24))) == content
        opened.files.release(file)


@pytest.mark.parametrize("memory", ["buffers", "arena"])
async def test_large_transfer_goes_in_parts_at_once(
    emulator: Hf3fsEmulator, place: Path, memory: str, request: pytest.FixtureRequest
) -> None:
    """Cut at multiples of a part's size in the memory, wherever the transfer begins."""
    place.mkdir()
    length = 2 * PART_BYTES + 3 * PAGE
    arena = (
        Arena(ArenaSettings(size_bytes=16 << 20, shm_name=f"test-parts-{os.getpid()}")) if memory == "arena" else None
    )
    registered = None if arena is None else registered_arena(arena)
    engine = RingEngine(
        hf3fs_fuse.io, emulator.mount, RingSettings(rings=1), lambda: Buffers(32 << 20, 14 << 20, "chunks"), registered
    )
    await engine.open()
    files = RegisteredFiles(hf3fs_fuse.io)
    content = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
    header: tuple[Piece, int] = (engine.buffers.piece(1, 0, HEADER_BYTES), 0)
    payload: Piece = engine.buffers.piece(0, 5 * PAGE, length) if registered is None else (registered, 5 * PAGE, length)
    inside = payload[0].memory[payload[1] : payload[1] + length]
    inside[:] = content
    target = files.create(str(place / "file"))
    before = emulator.control.statistics().operations
    wrote = engine.transfer(target.descriptor, [header, (payload, HEADER_BYTES)], read=False)
    assert await wrote.ended == HEADER_BYTES + length
    assert emulator.control.statistics().operations - before == 4
    inside[:] = 0
    assert await engine.transfer(target.descriptor, [(payload, HEADER_BYTES)], read=True).ended == length
    assert np.array_equal(inside, content)
    del inside
    files.release(target)
    await engine.close()
    if arena is not None:
        arena.close()


async def test_lost_operation_takes_an_entry_and_the_others_go_on(bench: OpenBench, emulator: Hf3fsEmulator) -> None:
    async with bench(entries=4) as opened:
        content = pages(30)
        file = opened.file("file", content)
        emulator.control.lose(2)
        lost = [opened.begin(file, number) for number in range(2)]
        rest = [opened.begin(file, number) for number in range(2, 30)]
        assert await moved(rest) == [PAGE] * 28
        assert not any(each.ended.done() or each.over.done() for each in lost)
        assert opened.engine.in_flight == 2
    assert all(isinstance(each.ended.exception(), TierUnavailable) and each.over.done() for each in lost)
    opened.files.release(file)


async def test_an_unexpected_exception_of_the_library_makes_new_rings(
    bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(timeout_s=0.2) as opened:
        file = opened.file("file", pages(1))
        assert await moved([opened.begin(file, 0)]) == [PAGE]
        with monkeypatch.context() as patch:
            patch.setattr(hf3fs_py_usrbio.ioring, "wait", MagicMock(side_effect=RuntimeError("a rule is broken")))
            dead = opened.begin(file, 0)
            with pytest.raises(TierUnavailable):
                await dead.ended
        await until(lambda: opened.engine.restarts == 1)
        opened.buffers = opened.engine.buffers
        assert await moved([opened.begin(file, 0)]) == [PAGE]
        opened.files.release(file)
