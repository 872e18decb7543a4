"""Daemons that die or stop at inconvenient times: while nothing is asked, twice, with abandoned transfers, at both ends."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hf3fs.tier.conftest import FINGERPRINT, HASTY, Memory, Opened, until
from tests.hf3fs.tier.test_faults import PATIENCE_S, get, put, works_again
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.hf3fs_emulator.client import descriptors
from tests.needs import needs_fuse
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import directories
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier, engine
from tiercache.tiers.hf3fs import tier as tier_module
from tiercache.tiers.hf3fs.files import RegisteredFiles

LONGEST_LAG_S = 1.0
"""Of the loop, on a busy machine; a mount that hangs stops it until somebody wakes the daemon."""


async def written(tier: Hf3fsTier, memory: Memory, number: int) -> None:
    """Sooner or later, with no read in between."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await put(tier, memory, number)
            except (OSError, TierUnavailable):
                await tier.io.engine.until(lambda: tier.io.engine.serves)


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


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((engine, "_CLOSE_S"), (tier_module, "_CLOSE_S"), (directories, "_CLOSE_S")):
        monkeypatch.setattr(module, name, 0.1)


async def test_daemon_that_died_while_nobody_asked_is_noticed_by_writes(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier3:
        await put(tier3, memory, 1)
        await tier3.scanned()
        await asyncio.to_thread(mortal.restart)
        await written(tier3, memory, 2)
        assert tier3.io.engine.restarts == 1
        for number in (1, 2):
            await get(tier3, memory, number)


@needs_fuse
@pytest.mark.parametrize("mortal", ["fuse"], indirect=True)
async def test_death_is_noticed_by_a_full_tier(mortal: Hf3fsEmulator, opened: Opened, memory: Memory) -> None:
    """Where the count is what nobody can read any more, before a write begins."""
    async with opened(mortal.mount / "chunks", rings=HASTY, cap_bytes=1 << 20) as tier3:
        await put(tier3, memory, *range(1, 30))
        for number in range(1, 30):
            tier3.directories.all[0].index.remove(chunk(number)[0])  # as if others had written them
        await asyncio.to_thread(mortal.restart)
        with pytest.raises(OSError, match="Errno 107"):
            await put(tier3, memory, 50)
        await until(tier3.io.engine, lambda: tier3.io.engine.restarts == 1)
        await tier3.scanned()
        await written(tier3, memory, 50)


async def test_daemon_that_dies_before_its_predecessors_mount_was_taken_back(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    """What was registered with the second is not taken for known by the third."""
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier3:
        await put(tier3, memory, 1)
        await get(tier3, memory, 1)
        await tier3.scanned()
        manifest = mortal.backing / "chunks" / "tiercache.json"
        good = manifest.read_text()
        manifest.write_text('{"format": 99}')
        failed = asyncio.Event()
        revive = tier3.io.engine._revive

        async def watched() -> None:
            try:
                await revive()
            except BaseException:
                failed.set()
                raise

        tier3.io.engine._revive = watched
        await asyncio.to_thread(mortal.restart)
        with contextlib.suppress(OSError, TierUnavailable):
            await put(tier3, memory, 2)
        await asyncio.wait_for(failed.wait(), PATIENCE_S)
        mortal.kill()
        manifest.write_text(good)
        await asyncio.to_thread(mortal.restart)
        await until(tier3.io.engine, lambda: tier3.io.engine.serves)
        await works_again(tier3, memory, 3)
        await get(tier3, memory, 1)


async def test_daemon_that_dies_while_it_has_abandoned_transfers(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    """Its rings were dropped before: its death is seen by the files that were opened on its mount."""
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier3:
        await put(tier3, memory, 1, 2)
        await get(tier3, memory, 1)
        await tier3.scanned()
        mortal.control.hang()
        read = asyncio.create_task(tier3.read(chunk(1)[0], memory.make()))
        writes = [asyncio.create_task(put(tier3, memory, number)) for number in range(10, 26)]
        await until(tier3.io.engine, lambda: tier3.io.engine.in_flight == 17)
        await until(tier3.io.engine, lambda: not tier3.io.engine.serves)
        assert tier3.io.engine.in_flight == 17, "the daemon may still touch their memory"
        mortal.kill()
        await asyncio.to_thread(mortal.restart)
        outcomes = await asyncio.wait_for(asyncio.gather(read, *writes, return_exceptions=True), PATIENCE_S)
        assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
        await written(tier3, memory, 50)
        for number in (50, 1, 2):
            await get(tier3, memory, number)
        assert tier3.io.engine.in_flight == 0
        assert tier3.io.engine.buffers._free.qsize() == tier3.io.engine.buffers.count


@needs_fuse
@pytest.mark.parametrize("mortal", ["fuse"], indirect=True)
async def test_daemon_that_stops_while_a_tier_opens_is_one_sentence(
    mortal: Hf3fsEmulator, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_OPEN_S", 1.0)
    settings = Hf3fsSettings(
        (mortal.mount / "chunks",), 64 << 20, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=4 << 20, rings=HASTY
    )
    tier3 = Hf3fsTier(settings, FINGERPRINT)
    open_engine = tier3.io.prepare

    async def then_it_stops() -> None:
        await open_engine()
        mortal.pause()

    monkeypatch.setattr(tier3.io, "prepare", then_it_stops)
    async with responsive():
        with pytest.raises(ConfigError, match="did not answer for 1 s"):
            await asyncio.wait_for(tier3.open(), PATIENCE_S)
    mortal.resume()
    monkeypatch.setattr(tier_module, "_OPEN_S", PATIENCE_S)  # of a busy machine
    again = Hf3fsTier(settings, FINGERPRINT)
    await again.open()
    await again.close()


@needs_fuse
@pytest.mark.parametrize("mortal", ["fuse"], indirect=True)
async def test_opening_that_is_cancelled_does_not_wait_for_a_stopped_daemon(
    mortal: Hf3fsEmulator, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Hf3fsSettings(
        (mortal.mount / "chunks",), 64 << 20, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=4 << 20, rings=HASTY
    )
    tier3 = Hf3fsTier(settings, FINGERPRINT)
    open_files = tier3.directories._open_files

    async def stopped(files: Any) -> None:
        mortal.pause()
        await open_files(files)

    monkeypatch.setattr(tier3.directories, "_open_files", stopped)
    try:
        async with responsive():
            opening = asyncio.create_task(tier3.open())
            async with asyncio.timeout(PATIENCE_S):
                while not (mortal_stopped(mortal) and tier3.directories.metadata.unfinished):
                    await asyncio.sleep(0)  # a turn of the loop
            opening.cancel()
            await asyncio.wait([opening], timeout=PATIENCE_S)
            assert opening.cancelled()
    finally:
        mortal.resume()  # a stopped one hangs every other 3FS tier of this machine


@needs_fuse
@pytest.mark.parametrize("mortal", ["fuse"], indirect=True)
async def test_closing_does_not_wait_for_a_daemon_that_stops_while_it_is_taken_up(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory, short_waits: None
) -> None:
    # So small a tier asks the counter, and with it the mount, at each write.
    async with opened(mortal.mount / "chunks", rings=HASTY, cap_bytes=1 << 20) as tier3:
        await put(tier3, memory, 1)
        await tier3.scanned()
        reviving = asyncio.Event()
        revive = tier3.io.engine._revive

        async def stopped() -> None:
            mortal.pause()
            reviving.set()
            await revive()

        tier3.io.engine._revive = stopped
        await asyncio.to_thread(mortal.restart)
        with contextlib.suppress(OSError, TierUnavailable):
            await put(tier3, memory, 2)
        await asyncio.wait_for(reviving.wait(), PATIENCE_S)
        async with responsive():
            await asyncio.wait_for(tier3.close(), PATIENCE_S)
        left = [task.get_name() for task in asyncio.all_tasks() if "examine" in task.get_name()]
        mortal.resume()
        assert not left


def mortal_stopped(emulator: Hf3fsEmulator) -> bool:
    return Path(f"/proc/{emulator.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@needs_fuse
def test_numbers_that_an_earlier_tier_left_registered_are_no_obstacle(mortal: Hf3fsEmulator) -> None:
    """As when it was closed while the mount was dead. The library's own duplicate gets such a number, too."""
    left = [os.open(mortal.mount / name, os.O_RDWR | os.O_CREAT) for name in "abc"]
    for descriptor in left:
        descriptors.register_fd(descriptor)
    for descriptor in left:
        os.close(descriptor)
    files = RegisteredFiles(descriptors)
    file = files.create(str(mortal.mount / "d"))
    assert file.descriptor == left[0]
    assert descriptors.registered(file.descriptor)
    files.release(file)
    assert not any(descriptors.registered(descriptor) for descriptor in left[:2])
    rest = os.open(mortal.mount / "d", os.O_RDWR)
    os.dup2(rest, left[2])
    descriptors.deregister_fd(left[2])
    os.close(left[2])
    os.close(rest)
