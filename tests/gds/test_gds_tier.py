"""The GDS tier: device memory to files and back, verified, under the rules of the disk tier."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gds.conftest import FINGERPRINT, Slots
from tests.tiers.opened import open_tier
from tests.tiers.test_contract import limits
from tests.tiers.test_disk import DAMAGES, flip
from tiercache.core.header import HEADER_BYTES, aligned, file_bytes
from tiercache.device.device import Device
from tiercache.errors import CorruptChunk
from tiercache.testing import TierContract, chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.gds import DeviceFiles, GdsSettings, GdsTier

Opened = Callable[..., Any]


class TestWithoutADevice(TierContract):
    async def make_tier(self, place: Path) -> Tier:
        return GdsTier(GdsSettings((place / "gds",), cap_bytes=64 << 20), FINGERPRINT)

    async def make_capped(self, place: Path, chunks: int, tenant_chunks: int = 0) -> Tier | None:
        return GdsTier(GdsSettings((place / "gds",), **limits(chunks, tenant_chunks)), FINGERPRINT)

    async def damage(self, tier: Tier, key: bytes) -> bool:
        assert isinstance(tier, GdsTier)
        flip(Path(tier.path(key)), HEADER_BYTES + 17)
        return True


async def store(tier: GdsTier, slots: Slots, number: int, length: int = CHUNK_BYTES) -> bytes:
    key, payload = chunk(number, length)
    assert await tier.write_device(key, slots.filled(payload[:length]), length)
    return key


async def is_hit(tier: GdsTier, slots: Slots, number: int) -> bool:
    (key, payload), into = chunk(number), slots.empty()
    length = await tier.read_device(key, into)
    return length == CHUNK_BYTES and np.array_equal(slots.content(into, CHUNK_BYTES), payload)


@pytest.fixture
async def tier(opened: Opened, tmp_path: Path) -> AsyncIterator[GdsTier]:
    async with opened(tmp_path) as tier:
        yield tier


@pytest.mark.parametrize("length", [1, 4095, 4097, CHUNK_BYTES])
async def test_what_was_written_from_the_device_comes_back_to_it(tier: GdsTier, slots: Slots, length: int) -> None:
    key = await store(tier, slots, 7, length)
    into = slots.empty()
    assert await tier.read_device(key, into) == length
    assert np.array_equal(slots.content(into, length), chunk(7, length)[1][:length])
    assert not slots.content(into, aligned(length))[length:].any(), "nothing of the slot's last chunk"
    assert os.path.getsize(tier.path(key)) == file_bytes(length)


async def test_device_and_host_read_each_others_files(tier: GdsTier, slots: Slots) -> None:
    key = await store(tier, slots, 1)
    host = page_aligned(CHUNK_BYTES)
    assert await tier.read(key, host) == CHUNK_BYTES
    assert np.array_equal(host, chunk(1)[1])
    assert await tier.write(*chunk(2), CHUNK_BYTES)
    assert await is_hit(tier, slots, 2)


async def test_many_at_once_do_not_mix(tier: GdsTier, slots: Slots) -> None:
    keys = await asyncio.gather(*(store(tier, slots, number) for number in range(20)))
    places = [slots.empty() for _ in keys]
    for _ in range(3):
        lengths = await asyncio.gather(*(tier.read_device(key, into) for key, into in zip(keys, places, strict=True)))
        assert lengths == [CHUNK_BYTES] * 20
        for number, into in enumerate(places):
            assert np.array_equal(slots.content(into, CHUNK_BYTES), chunk(number)[1])


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_file_is_refused_and_deleted_and_stored_anew(
    tier: GdsTier, slots: Slots, tmp_path: Path, damage: str
) -> None:
    await tier.scanned()  # a scan that comes by removes what is cut
    key = await store(tier, slots, 1)
    DAMAGES[damage](Path(tier.path(key)))
    with pytest.raises(CorruptChunk):
        await tier.read_device(key, slots.empty())
    assert not tier.contains(key)
    assert not Path(tier.path(key)).exists()
    assert await tier.read_device(key, slots.empty()) is None
    await store(tier, slots, 1)
    assert await is_hit(tier, slots, 1)


async def test_all_files_are_closed_by_a_thread(
    opened: Opened, slots: Slots, files: DeviceFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount may hang."""
    threads, close = [], type(files).close

    def watched(files: DeviceFiles) -> None:
        threads.append(threading.current_thread())
        close(files)

    monkeypatch.setattr(type(files), "close", watched)
    async with opened(tmp_path) as tier:
        key = await store(tier, slots, 1)
        assert await tier.read_device(key, slots.empty()) == CHUNK_BYTES
    assert threads and threading.main_thread() not in threads


class TestFindingTheWay:
    async def test_without_a_gpu_one_sentence_says_so(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tier = GdsTier(GdsSettings((tmp_path,), cap_bytes=64 << 20), FINGERPRINT)
        with caplog.at_level(logging.WARNING):
            await tier.open()
        assert not tier.serves_device
        assert [record.message for record in caplog.records] == [
            "gds_path: no GPU is in use here: chunks go through host memory, like the disk tier's"
        ]
        assert tier.describe().endswith("host memory only)")
        await tier.close()

    async def test_where_gds_does_not_work_it_falls_back_and_says_so_once(
        self, device: Device, slots: Slots, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = GdsSettings((tmp_path,), cap_bytes=64 << 20, chunk_bytes=CHUNK_BYTES)
        tier = GdsTier(settings, FINGERPRINT, device)
        with caplog.at_level(logging.WARNING):
            await tier.open()
            for number in range(5):
                await store(tier, slots, number)
        assert [record.message for record in caplog.records] == [
            "gds_path: no GPUDirect Storage (twin is not a GPU): going through pinned host memory"
        ]
        assert tier.describe().endswith("posix)")
        await tier.close()

    async def test_what_is_there_already_counts_as_room_after_a_restart(self, tmp_path: Path) -> None:
        first = GdsTier(GdsSettings((tmp_path,), cap_bytes=0), FINGERPRINT)
        await first.open()
        capacity = first.directories.all[0].files.capacity
        capacity.resize(1 << 40)
        capacity.commit(1 << 40)
        await first.close()
        async with open_tier(GdsTier(GdsSettings((tmp_path,), cap_bytes=0), FINGERPRINT)) as second:
            assert second.settings.cap_bytes - first.settings.cap_bytes == pytest.approx(0.9 * (1 << 40), rel=0.02)
