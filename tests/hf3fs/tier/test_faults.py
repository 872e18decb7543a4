"""Daemons that hang, lose answers, die and come back: nothing wrong is served, no good file is blamed, all is well again."""

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.hf3fs.tier.conftest import (
    HASTY,
    PATIENCE_S,
    Memory,
    Opened,
    all_places_are_free,
    get,
    gets,
    put,
    responsive,
    start_reading,
    works_again,
)
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.opened import until
from tiercache.errors import CorruptChunk, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.hf3fs import Hf3fsTier


async def test_hanging_daemon_keeps_what_it_may_still_write_to(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    async with opened(place, rings=replace(HASTY, timeout_s=2.0)) as tier:
        await put(tier, memory, 1, 2, 3)
        emulator.control.hang()
        reads = start_reading(tier, memory, 1, 2)
        write = asyncio.create_task(tier.write(chunk(4)[0], memory.make(chunk(4)[1]), CHUNK_BYTES))
        with pytest.raises(TierUnavailable):
            await write
        if memory.arena is None:
            for outcome in await asyncio.gather(*reads, return_exceptions=True):
                assert isinstance(outcome, TierUnavailable)
        else:
            # A read may begin after the write.
            await until(lambda: [each.ended.done() for each in tier.io.engine._unfinished()] == [True] * 3)
            assert not any(read.done() for read in reads), "the slots are the daemon's"
        assert tier.io.engine.in_flight == 3
        assert await all_places_are_free(tier, but=3)
        emulator.control.resume()
        await until(lambda: tier.io.engine.in_flight == 0)
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, TierUnavailable)
        assert await all_places_are_free(tier)
        assert tier.io.engine.restarts == 0
        await gets(tier, memory, 1, 2, 3)
        assert tier.statistics().corrupt == 0


async def test_write_that_was_given_up_never_shows(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    async with opened(place, rings=replace(HASTY, timeout_s=2.0)) as tier:
        emulator.control.hang()
        with pytest.raises(TierUnavailable):
            await put(tier, memory, 1)
        assert await tier.read(chunk(1)[0], memory.make()) is None
        emulator.control.resume()
        await until(lambda: tier.io.engine.in_flight == 0)
        assert await tier.read(chunk(1)[0], memory.make()) is None
        await put(tier, memory, 1)
        await gets(tier, memory, 1)
        await tier.directories.metadata.submit(lambda: None)  # it removes things in their turn
        assert not list(place.rglob("*.[0-9]*"))


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_lost_answers_cost_neither_memory_nor_entries_for_good(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator, direction: str
) -> None:
    async with opened(place, rings=HASTY) as tier:
        await put(tier, memory, *range(1, 17))
        for incident in (1, 2):
            emulator.control.lose(16 * (1 if memory.arena is None else 2), direction=direction)
            writes = [put(tier, memory, number) for number in range(20, 36)] if direction == "write" else []
            reads = [] if writes else start_reading(tier, memory, *range(1, 17))
            outcomes = await asyncio.wait_for(asyncio.gather(*writes, *reads, return_exceptions=True), PATIENCE_S)
            assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
            await until(lambda incident=incident: tier.io.engine.restarts >= incident and tier.io.engine.serves)
        await works_again(tier, memory, 40)
        await gets(tier, memory, *range(1, 17))
        assert await all_places_are_free(tier)
        assert tier.io.engine.in_flight == 0
        assert tier.statistics().corrupt == 0


async def test_lost_read_is_an_error_and_its_memory_is_not_used_again(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    async with opened(place, rings=replace(HASTY, timeout_s=2.0)) as tier:
        await put(tier, memory, 1)
        struck_before = emulator.control.statistics().faults_struck
        emulator.control.lose(1, direction="read")
        (lost,) = start_reading(tier, memory, 1)
        await asyncio.to_thread(emulator.control.until_struck, struck_before + 1)
        for _ in range(3):
            await gets(tier, memory, 1)
        await asyncio.wait([lost], timeout=PATIENCE_S if memory.arena is None else 0.1)
        assert lost.done() is (memory.arena is None), "an arena's slot stays with the read"
        assert await all_places_are_free(tier, but=1)
    with pytest.raises(TierUnavailable):
        await lost


async def test_dead_daemon_fails_what_is_in_flight_and_its_successor_serves(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    async with opened(mortal.mount / "chunks", rings=replace(HASTY, timeout_s=1.0)) as tier:
        await put(tier, memory, *range(1, 9))
        await gets(tier, memory, *range(1, 9))
        mortal.control.hang()
        reads = start_reading(tier, memory, 1, 2, 3)
        operations = 1 if memory.arena is None else 2
        await asyncio.to_thread(mortal.control.until_hanging, 3 * operations)
        mortal.kill()
        await asyncio.to_thread(mortal.restart)
        outcomes = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), PATIENCE_S)
        assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
        await until(lambda: tier.io.engine.restarts == 1)
        assert tier.io.engine.in_flight == 0
        await gets(tier, memory, *range(1, 9))
        await works_again(tier, memory, 9)
        assert tier.statistics().corrupt == 0
        await tier.scanned()
        occupied = sum(os.stat(tier.path(chunk(number)[0])).st_blocks * 512 for number in range(1, 10))
        directories = [entry for entry in os.scandir(chunks_of(mortal.mount / "chunks")) if len(entry.name) == 2]
        occupied += sum(entry.stat().st_blocks * 512 for entry in directories)
        assert tier.statistics().occupied_bytes == occupied, "what died half-written is not counted"


async def test_dead_mount_is_an_error_at_once_and_closes(mortal: Hf3fsEmulator, opened: Opened, memory: Memory) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier:
        await put(tier, memory, 1)
        await gets(tier, memory, 1)
        mortal.kill()
        with pytest.raises((OSError, TierUnavailable)):
            await put(tier, memory, 2)
    mortal.restart()
    # It gets the numbers of what could not be deregistered.
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier:
        await tier.scanned()
        await gets(tier, memory, 1)


async def test_paused_daemon_hangs_threads_and_not_the_loop(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier:
        await put(tier, memory, 1, 2)
        await gets(tier, memory, 1)
        mortal.pause()
        try:
            async with responsive():
                tasks = [asyncio.create_task(get(tier, memory, number)) for number in (1, 2)]
                tasks.append(asyncio.create_task(put(tier, memory, 3)))
                await asyncio.wait(tasks, timeout=1.0)
        finally:
            mortal.resume()
        await asyncio.gather(*tasks, return_exceptions=True)
        await works_again(tier, memory, 4)
        await gets(tier, memory, 1, 2)
        assert tier.io.engine.in_flight == 0
        assert tier.statistics().corrupt == 0


async def test_close_does_not_wait_for_a_paused_daemon(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory, short_waits: None
) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier:
        await put(tier, memory, 1)
        mortal.pause()
        try:
            tasks = [asyncio.create_task(get(tier, memory, 1)), asyncio.create_task(put(tier, memory, 3))]
            async with asyncio.timeout(PATIENCE_S):
                while not tier.io.file_threads.unfinished:
                    await asyncio.sleep(0)  # a turn of the loop
            async with responsive():
                await asyncio.wait_for(tier.close(), 60)
        finally:
            mortal.resume()
        for outcome in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S):
            assert isinstance(outcome, (OSError, TierUnavailable, RuntimeError)), outcome


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        *[("shorten", 0), ("shorten", 100), ("shorten", 30000)],
        *[("fail", errno.EBADF), ("fail", errno.EIO), ("fail", errno.EREMOTEIO)],
    ],
)
async def test_a_short_or_failed_read_of_a_ring_is_no_fault_of_the_file(
    tier: Hf3fsTier, memory: Memory, emulator: Hf3fsEmulator, fault: str, number: int
) -> None:
    """The mount is asked then, unless the transport has failed."""
    await put(tier, memory, 1)
    getattr(emulator.control, fault)(number, count=1, direction="read")
    if number == errno.EREMOTEIO:
        with pytest.raises(OSError, match=rf"\[Errno {number}\]"):
            await tier.read(chunk(1)[0], memory.make())
    await get(tier, memory, 1)
    assert emulator.control.statistics().faults_struck
    assert tier.statistics().corrupt == 0


async def test_a_file_that_cannot_be_read_in_any_way_costs_itself(
    tier: Hf3fsTier, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    """It lay there for good, each read of it counted against the tier, and three of them kept it from being asked."""
    await put(tier, memory, 1, 2)
    await get(tier, memory, 1)
    await tier.scanned()  # it opens files, too, and would meet the one fault instead of the read
    emulator.control.fail(errno.EIO, count=1, direction="read")
    emulator.control.fail_call("open", errno.EIO)
    with pytest.raises(CorruptChunk, match="cannot be read"):
        await tier.read(chunk(1)[0], memory.make())
    assert not tier.contains(chunk(1)[0]) and not os.path.exists(tier.path(chunk(1)[0]))
    await put(tier, memory, 1)
    await get(tier, memory, 1)
    await get(tier, memory, 2)


async def test_stale_descriptor_is_no_fault_of_the_file(tier: Hf3fsTier, memory: Memory) -> None:
    """A file that we keep open is not the one of this name any more, and went bad."""
    await put(tier, memory, 1)
    await get(tier, memory, 1)
    path = tier.path(chunk(1)[0])
    with open(path, "r+b") as old:
        Path(f"{path}.good").write_bytes(old.read())
        os.rename(f"{path}.good", path)
        old.seek(5000)
        old.write(b"damage")
    await get(tier, memory, 1)
    assert tier.statistics().corrupt == 0


async def test_close_in_the_middle_blames_nobody(
    opened: Opened, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    async with opened(place) as tier:
        await put(tier, memory, 1, 2)
        emulator.control.hang()
        reads = start_reading(tier, memory, 1, 2)
        write = asyncio.create_task(put(tier, memory, 3))
        await until(lambda: tier.io.engine.in_flight == 3)
        await tier.close()
        for outcome in await asyncio.gather(*reads, write, return_exceptions=True):
            assert isinstance(outcome, TierUnavailable)
    emulator.control.resume()
    async with opened(place) as tier:
        await get(tier, memory, 1)
        assert tier.statistics().corrupt == 0


@pytest.mark.parametrize("memory", ["arena"], indirect=True)
async def test_slot_that_the_daemon_still_has_is_not_given_back(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    """The answers are late, not lost: what the daemon writes at last lands in memory that is still reserved for it."""
    numbers = range(1, 17)
    async with opened(mortal.mount / "chunks", rings=replace(HASTY, entries=64)) as tier:
        await put(tier, memory, 99, *numbers)
        struck = mortal.control.statistics().faults_struck
        mortal.control.hold(2 * len(numbers), direction="read")  # a header and a payload each
        slots = [memory.make() for _ in numbers]
        reads = [asyncio.create_task(tier.read(chunk(n)[0], slot)) for n, slot in zip(numbers, slots, strict=True)]
        await asyncio.to_thread(mortal.control.until_struck, struck + 2 * len(numbers))
        await until(lambda: not tier.io.engine.serves)
        with pytest.raises(TierUnavailable):
            await get(tier, memory, 99)
        assert not any(read.done() for read in reads), "the daemon may still write there"
        assert all((slot == 0xEE).all() for slot in slots)
        mortal.control.resume()
        await asyncio.wait(reads, timeout=PATIENCE_S)
        assert all(isinstance(read.exception(), TierUnavailable) for read in reads)
        assert not any((slot == 0xEE).all() for slot in slots), "given back before it was written to"
        await until(lambda: tier.io.engine.serves)
        await gets(tier, memory, 99)
        assert tier.io.engine.in_flight == 0
