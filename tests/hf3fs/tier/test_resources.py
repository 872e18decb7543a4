"""What a tier takes: shared memory as configured, and nothing of it after the end, whichever way that came."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hf3fs.tier.conftest import RINGS, Memory, Opened, make_tier
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.opened import open_tier
from tests.tiers.others import running
from tests.tiers.test_disk import is_hit
from tiercache.errors import ConfigError
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES

CLIENT = """
import asyncio, sys
from pathlib import Path
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.testing import chunk, page_aligned
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier

async def main():
    settings = Hf3fsSettings((Path(sys.argv[1]),), 64 << 20, threads=2, chunk_bytes=65536, iov_bytes=4 << 20)
    tier = Hf3fsTier(settings, b"3" * 16)
    if sys.argv[2] == "arena":
        arena = Arena(ArenaSettings(size_bytes=4 << 20, shm_name=f"test-client-{sys.argv[3]}"))
        tier.use_arena(arena)
    await tier.open()
    for number in range(100, 110):
        key, payload = chunk(number)
        if sys.argv[2] == "arena":
            arena.memory[:65536] = payload
            payload = arena.memory[:65536]
        await tier.write(key, payload, 65536)
    print("ready", flush=True)
    found = int(sys.stdin.readline())
    key, payload = chunk(found)
    into = arena.memory[:65536] if sys.argv[2] == "arena" else page_aligned(65536)
    assert await tier.probe([key]) == 1 and await tier.read(key, into) == 65536 and (into == payload).all()
    print("read", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


def ours(*others: int) -> set[str]:
    """What this process made, and those of these numbers: not all that run such tests at the same time."""
    made = re.compile(rf"tiercache\..*-({'|'.join(map(str, (os.getpid(), *others)))})(-|$)")
    return {name for name in os.listdir("/dev/shm") if made.match(name)}


def used_bytes(names: set[str]) -> int:
    return sum(os.stat(f"/dev/shm/{name}").st_size for name in names)


async def test_shared_memory_is_what_the_configuration_says(opened: Opened, place: Path, memory: Memory) -> None:
    before = ours()
    async with opened(place):
        expected_bytes = 4 << 20 if memory.arena is None else 2 << 20
        assert used_bytes(ours() - before) == expected_bytes
    assert ours() == before


async def test_what_cannot_work_is_refused_and_leaves_nothing(
    emulator: Hf3fsEmulator, place: Path, tmp_path: Path
) -> None:
    """Buffers too small for two chunks, a directory outside of 3FS, a mount that is not the directory's, and a file."""
    before = ours()
    (place.with_name(f"{place.name}-file")).touch()
    for tier, said in (
        (make_tier(place, chunk_bytes=3 << 20), "hf3fs_iov_size"),
        (make_tier(tmp_path / "no"), "does not lie on a 3FS mount"),
        (make_tier(place, mount=tmp_path), str(tmp_path)),
        (make_tier(place, place.with_name(f"{place.name}-file")), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=said):
            await tier.open()
    assert ours() == before
    emulator.control.until_registered(buffers=0, rings=0)


async def test_refused_depth_is_named(mortal: Hf3fsEmulator) -> None:
    mortal.negative_io_depth = False
    mortal.restart()
    before = ours()
    with pytest.raises(ConfigError, match="negative hf3fs_io_depth"):
        await make_tier(mortal.mount / "chunks", rings=replace(RINGS, io_depth=-4)).open()
    assert ours() == before
    mortal.control.until_registered(buffers=0, rings=0)


async def test_dead_mount_is_refused_and_leaves_nothing(mortal: Hf3fsEmulator, opened: Opened) -> None:
    before = ours()
    mortal.kill()
    with pytest.raises(ConfigError):
        async with opened(mortal.mount / "chunks"):
            pass
    assert ours() == before


@pytest.mark.parametrize("kind", ["buffers", "arena"])
async def test_killed_process_leaves_nothing_once_another_has_begun(
    emulator: Hf3fsEmulator, place: Path, kind: str
) -> None:
    """And the two of them found each other's chunks before."""
    before = ours()
    async with running("-c", CLIENT, place, kind, os.getpid(), **emulator.environment) as client:
        pid = client.process.pid
        assert len(ours(pid) - before) == (1 if kind == "buffers" else 2)
        async with open_tier(make_tier(place)) as tier:
            assert await tier.probe([chunk(number)[0] for number in range(100, 110)]) == 10
            for number in range(100, 110):
                assert await is_hit(tier, number)
            key, payload = chunk(7)
            await tier.write(key, payload, CHUNK_BYTES)
            assert await client.do("7") == "read"
            await client.kill()
    async with open_tier(make_tier(place)):
        assert len(ours(pid) - before) == 1, "its own and nothing else"
    assert ours(pid) == before
    emulator.control.until_registered(buffers=0, rings=0)
