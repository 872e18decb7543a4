"""What a tier takes of its device: its cap when nobody gives one, and what is deleted but still open."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.hf3fs.tier.conftest import PATIENCE_S, RINGS, Memory, Opened, all_places_are_free, get, put
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.tiers.opened import open_tier
from tiercache import Config, Layout
from tiercache.assembly import make_tiers
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, file_bytes
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.hf3fs import Hf3fsTier
from tiercache.tiers.hf3fs.engine import load_library

LAYOUT = Layout("model", chunk_tokens=256, bytes_per_token=256)


@asynccontextmanager
async def from_configuration(tmp_path: Path, text: str) -> AsyncIterator[Tier]:
    path = tmp_path / "tiercache.yaml"
    path.write_text(text)
    (tier,) = make_tiers(Config.load(path, environ={}), LAYOUT)
    async with open_tier(tier):
        yield tier


async def stores_within_nine_tenths(tier: Tier, directory: Path) -> None:
    key, payload = chunk(1)
    assert await tier.write(key, payload, CHUNK_BYTES)
    into = page_aligned(CHUNK_BYTES)
    assert await tier.read(key, into) == CHUNK_BYTES
    assert np.array_equal(into, payload)
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    assert isinstance(tier, FileTier)
    assert 0.85 * free_bytes < tier.settings.cap_bytes < 0.95 * free_bytes


async def test_readmes_configuration_stores_chunks(emulator: Hf3fsEmulator, place: Path, tmp_path: Path) -> None:
    """No max_hf3fs_size; two base paths on one mount, whose free space is there once."""
    text = f"""
remote_storage_plugins: ["hf3fs.primary"]
extra_config:
  remote_storage_plugin.hf3fs.primary.base_path: "{place}/a,{place}/b"
"""
    async with from_configuration(tmp_path, text) as tier:
        await stores_within_nine_tenths(tier, place)


@pytest.mark.parametrize("kind", ["fs", "gds", "weka"])
async def test_other_file_tiers_do_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.assembly.file_system_of", lambda directory: "wekafs" if kind == "weka" else "ext4")
    places = f"{tmp_path}/a,{tmp_path}/b"
    text = {
        "fs": f'remote_storage_plugins: [fs]\nremote_storage_plugin.fs.base_path: "{places}"',
        "gds": f'gds_path: "{tmp_path}/a"\ngds_buffer_size: 16\nuse_gds: false',
        "weka": f'weka_path: "{places}"\ngds_buffer_size: 16\nuse_gds: false',
    }[kind]
    async with from_configuration(tmp_path, text) as tier:
        await stores_within_nine_tenths(tier, tmp_path)


def deleted_bytes(emulator: Hf3fsEmulator) -> int:
    """Of files without a name that this process or the daemon holds open."""
    found = {}
    for pid in ("self", str(emulator.pid)):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(entry.path)
                if not status.st_nlink and status.st_size == file_bytes(CHUNK_BYTES):
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


async def until_none_is_open(emulator: Hf3fsEmulator) -> None:
    """No deleted file takes space for good."""
    async with asyncio.timeout(PATIENCE_S):
        while deleted_bytes(emulator):
            await asyncio.sleep(0.02)


async def test_chunks_that_another_instance_deletes_do_not_stay_allocated(
    opened: Opened, mortal: Hf3fsEmulator, memory: Memory
) -> None:
    """Though this one has read them, and nobody asks it for anything."""
    place = mortal.mount / "chunks"
    async with opened(place, cap_bytes=4 << 20) as idle, opened(place, cap_bytes=4 << 20) as busy:
        await idle.scanned()
        await put(idle, memory, *range(1, 41))
        for number in range(1, 41):
            await get(idle, memory, number)
        await busy.scanned()
        for number in range(1, 41):
            await busy.probe([chunk(number)[0]])
        await put(busy, memory, *range(100, 160))
        assert busy.statistics().evicted >= 38
        await until_none_is_open(mortal)


async def test_file_has_nothing_of_what_lay_in_the_memory_before(tier: Hf3fsTier, memory: Memory) -> None:
    """Neither behind the header nor behind the payload."""
    tier.io.engine.buffers.registered.memory[:] = 0xAB
    key, source = chunk(1)[0], memory.make(np.full(100, 7, dtype=np.uint8))
    assert await tier.write(key, source[:4096], 100)
    content = Path(tier.path(key)).read_bytes()
    assert content[PACKED_BYTES:HEADER_BYTES] == bytes(HEADER_BYTES - PACKED_BYTES)
    assert content[HEADER_BYTES:] == bytes([7]) * 100 + bytes(4096 - 100)


async def test_short_ring_write_is_an_error_and_no_chunk(
    tier: Hf3fsTier, place: Path, memory: Memory, emulator: Hf3fsEmulator
) -> None:
    emulator.control.shorten(100, count=1, direction="write")
    with pytest.raises(OSError, match="short write"):
        await put(tier, memory, 1)
    assert await tier.probe([chunk(1)[0]]) == 0
    assert not list(place.rglob("*.[0-9]*"))
    assert await all_places_are_free(tier)
    await put(tier, memory, 1)
    await get(tier, memory, 1)


async def test_rings_and_memory_are_made_on_the_node_that_was_asked_for(
    opened: Opened, place: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library()
    nodes: dict[str, list[int]] = {"make_ioring": [], "make_iovec": []}

    def watch(name: str) -> Callable[..., object]:
        make = getattr(library, name)

        def watched(*arguments: object) -> object:
            nodes[name].append(arguments[-1])  # type: ignore[arg-type]
            return make(*arguments)

        return watched

    for name in nodes:
        monkeypatch.setattr(library, name, watch(name))
    rings = type(RINGS)(entries=16, rings=2, numa=0)
    async with opened(place, rings=rings):
        assert nodes == {"make_ioring": [0] * 4, "make_iovec": [0] * (1 if memory.arena is None else 2)}
