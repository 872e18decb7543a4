"""Daemons that die or stop at inconvenient times: while nothing is asked, twice, with abandoned transfers, at both ends."""

import asyncio
import contextlib
import os

import pytest

from tests.chunks import chunks_of
from tests.hf3fs.tier.conftest import (
    HASTY,
    PATIENCE_S,
    Memory,
    Opened,
    gets,
    make_tier,
    put,
    responsive,
    works_again,
    written,
)
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.hf3fs_emulator.client import descriptors
from tests.tiers.opened import until
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import chunk
from tiercache.tiers.hf3fs import tier as tier_module
from tiercache.tiers.hf3fs.files import RegisteredFiles


async def test_daemon_that_died_while_nobody_asked_is_noticed_by_writes(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory
) -> None:
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier3:
        await put(tier3, memory, 1)
        await tier3.scanned()
        await asyncio.to_thread(mortal.restart)
        await written(tier3, memory, 2)
        assert tier3.io.engine.restarts == 1
        await gets(tier3, memory, 1, 2)


async def test_death_is_noticed_by_a_full_tier(mortal: Hf3fsEmulator, opened: Opened, memory: Memory) -> None:
    """Where the count is what nobody can read any more, before a write begins."""
    async with opened(mortal.mount / "chunks", rings=HASTY, cap_bytes=1 << 20) as tier3:
        await put(tier3, memory, *range(1, 30))
        for number in range(1, 30):
            tier3.directories.all[0].index.remove(chunk(number)[0])  # as if others had written them
        await asyncio.to_thread(mortal.restart)
        with pytest.raises(OSError, match="Errno 107"):
            await put(tier3, memory, 50)
        await until(lambda: tier3.io.engine.restarts == 1)
        await tier3.scanned()
        await written(tier3, memory, 50)


async def test_daemon_that_dies_before_its_predecessors_mount_was_taken_back(
    mortal: Hf3fsEmulator, opened: Opened, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    """What was registered with the second is not taken for known by the third."""
    async with opened(mortal.mount / "chunks", rings=HASTY) as tier3:
        await put(tier3, memory, 1)
        await gets(tier3, memory, 1)
        await tier3.scanned()
        manifest = chunks_of(mortal.backing / "chunks") / "tiercache.json"
        good = manifest.read_text()
        manifest.write_text('{"format": 99}')
        await asyncio.to_thread(mortal.restart)
        with contextlib.suppress(OSError, TierUnavailable):
            await put(tier3, memory, 2)
        async with asyncio.timeout(PATIENCE_S):
            while "cannot be used yet" not in caplog.text:
                await asyncio.sleep(0.01)
        mortal.kill()
        manifest.write_text(good)
        await asyncio.to_thread(mortal.restart)
        await until(lambda: tier3.io.engine.serves)
        await works_again(tier3, memory, 3)
        await gets(tier3, memory, 1)


@pytest.mark.parametrize("cancelled", [False, True], ids=["is one sentence", "does not hold up a cancelled opening"])
async def test_daemon_that_stops_while_a_tier_opens(
    mortal: Hf3fsEmulator, short_waits: None, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr(tier_module, "_OPEN_S", PATIENCE_S if cancelled else 1.0)
    tier3 = make_tier(mortal.mount / "chunks", rings=HASTY)
    prepare = tier3.io.prepare

    async def then_it_stops() -> None:
        await prepare()
        mortal.pause()

    monkeypatch.setattr(tier3.io, "prepare", then_it_stops)
    try:
        async with responsive():
            opening = asyncio.create_task(tier3.open())
            if cancelled:
                async with asyncio.timeout(PATIENCE_S):
                    while not tier3.directories.metadata.unfinished:
                        await asyncio.sleep(0)  # a turn of the loop
                opening.cancel()
            await asyncio.wait([opening], timeout=PATIENCE_S)
            assert opening.done()
    finally:
        mortal.resume()  # a stopped one hangs every other 3FS tier of this machine
    if cancelled:
        assert opening.cancelled()
    else:
        with pytest.raises(ConfigError, match="did not answer for 1 s"):
            opening.result()
    monkeypatch.setattr(tier_module, "_OPEN_S", PATIENCE_S)  # of a busy machine
    again = make_tier(mortal.mount / "chunks", rings=HASTY)
    await again.open()
    await again.close()


def test_numbers_that_an_earlier_tier_left_registered_are_no_obstacle(mortal: Hf3fsEmulator) -> None:
    """As when it was closed while the mount was dead. The library's own duplicate gets such a number, too."""
    left = [os.open(mortal.mount / name, os.O_RDWR | os.O_CREAT) for name in "abc"]
    for descriptor in left:
        descriptors.register_fd(descriptor)
    for descriptor in left:
        os.close(descriptor)
    files = RegisteredFiles(descriptors)
    file = files.create(str(mortal.mount / "d"))
    assert file == left[0]
    assert descriptors.registered(file)
    files.close(file)
    assert not any(descriptors.registered(descriptor) for descriptor in left[:2])
    rest = os.open(mortal.mount / "d", os.O_RDWR)
    os.dup2(rest, left[2])
    descriptors.deregister_fd(left[2])
    os.close(left[2])
    os.close(rest)
