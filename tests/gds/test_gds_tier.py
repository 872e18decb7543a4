"""The GDS tier: device memory to files and back, verified, under the rules of the disk tier."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gds.conftest import FINGERPRINT, Slots
from tests.tiers.opened import open_tier
from tests.tiers.test_contract import limits
from tiercache.core.header import HEADER_BYTES, aligned, file_bytes
from tiercache.device.device import Device
from tiercache.errors import ConfigError, CorruptChunk, TierFull
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
        flip(tier.path(key), HEADER_BYTES + 17)
        return True


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


async def store(tier: GdsTier, slots: Slots, number: int, length: int = CHUNK_BYTES) -> bytes:
    key, payload = chunk(number, length)
    assert await tier.write_device(key, slots.filled(payload[:length]), length)
    return key


@pytest.mark.parametrize("length", [1, 4095, 4097, CHUNK_BYTES])
async def test_what_was_written_from_the_device_comes_back_to_it(
    opened: Opened, slots: Slots, tmp_path: Path, length: int
) -> None:
    async with opened(tmp_path) as tier:
        key = await store(tier, slots, 7, length)
        into = slots.empty()
        assert await tier.read_device(key, into) == length
        assert np.array_equal(slots.content(into, length), chunk(7, length)[1][:length])
        assert os.path.getsize(tier.path(key)) == file_bytes(length)


async def test_nothing_of_the_slots_last_chunk_lies_behind_a_shorter_one(
    opened: Opened, slots: Slots, tmp_path: Path
) -> None:
    length = 30_001
    async with opened(tmp_path) as tier:
        key = await store(tier, slots, 1, length)
        into = slots.empty()
        assert await tier.read_device(key, into) == length
        assert not slots.content(into, aligned(length))[length:].any()


async def test_device_and_host_read_each_others_files(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        key = await store(tier, slots, 1)
        host = page_aligned(CHUNK_BYTES)
        assert await tier.read(key, host) == CHUNK_BYTES
        assert np.array_equal(host, chunk(1)[1])
        other, payload = chunk(2)
        assert await tier.write(other, payload, CHUNK_BYTES)
        into = slots.empty()
        assert await tier.read_device(other, into) == CHUNK_BYTES
        assert np.array_equal(slots.content(into, CHUNK_BYTES), payload)


async def test_chunks_survive_a_restart(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        keys = [await store(tier, slots, number) for number in range(1, 9)]
    async with opened(tmp_path) as tier:
        await tier.scanned()
        assert tier.prefix(keys) == 8
        into = slots.empty()
        for number, key in enumerate(keys, start=1):
            assert await tier.read_device(key, into) == CHUNK_BYTES
            assert np.array_equal(slots.content(into, CHUNK_BYTES), chunk(number)[1])


async def test_many_at_once_do_not_mix(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        keys = await asyncio.gather(*(store(tier, slots, number) for number in range(20)))
        places = [slots.empty() for _ in keys]
        for _ in range(3):
            lengths = await asyncio.gather(
                *(tier.read_device(key, into) for key, into in zip(keys, places, strict=True))
            )
            assert lengths == [CHUNK_BYTES] * 20
            for number, into in enumerate(places):
                assert np.array_equal(slots.content(into, CHUNK_BYTES), chunk(number)[1])


class TestBadFiles:
    """Nothing wrong is ever served: each of these is CorruptChunk, the file is in quarantine, and can be stored anew."""

    def change_payload(self, path: str) -> None:
        flip(path, HEADER_BYTES + CHUNK_BYTES // 2)

    def change_last_byte(self, path: str) -> None:
        flip(path, HEADER_BYTES + CHUNK_BYTES - 1)

    def change_header(self, path: str) -> None:
        flip(path, 70)

    def cut(self, path: str) -> None:
        os.truncate(path, os.path.getsize(path) - 4096)

    def cut_to_an_odd_length(self, path: str) -> None:
        os.truncate(path, 10_001)

    def cut_to_less_than_a_header(self, path: str) -> None:
        os.truncate(path, 50)

    def empty(self, path: str) -> None:
        os.truncate(path, 0)

    def lengthen(self, path: str) -> None:
        os.truncate(path, os.path.getsize(path) + 4096)

    def another_chunk(self, path: str) -> None:
        other = Path(path).parent.parent / "00" / chunk(99)[0].hex()
        Path(path).write_bytes(other.read_bytes())

    @pytest.mark.parametrize(
        "harm",
        [
            "change_payload",
            "change_last_byte",
            "change_header",
            "cut",
            "cut_to_an_odd_length",
            "cut_to_less_than_a_header",
            "empty",
            "lengthen",
            "another_chunk",
        ],
    )
    async def test_bad_file(self, opened: Opened, slots: Slots, tmp_path: Path, harm: str) -> None:
        async with opened(tmp_path) as tier:
            await tier.scanned()  # a scan that comes by removes what is cut
            key = await store(tier, slots, 1)
            await store(tier, slots, 99)
            getattr(self, harm)(tier.path(key))
            with pytest.raises(CorruptChunk):
                await tier.read_device(key, slots.empty())
            assert not tier.contains(key)
            assert len(list((tmp_path / "quarantine").iterdir())) == 1
            assert await tier.read_device(key, slots.empty()) is None
            await store(tier, slots, 1)
            into = slots.empty()
            assert await tier.read_device(key, into) == CHUNK_BYTES
            assert np.array_equal(slots.content(into, CHUNK_BYTES), chunk(1)[1])

    @pytest.mark.parametrize("harm", ["cut_to_an_odd_length", "cut_to_less_than_a_header", "empty"])
    @pytest.mark.parametrize("first", [True, False], ids=["first scan", "later scan"])
    async def test_bad_file_that_a_scan_meets_before_a_read(
        self, opened: Opened, slots: Slots, tmp_path: Path, harm: str, first: bool
    ) -> None:
        """It can never be a hit, and is removed: a miss, and nothing in quarantine. See `Scanner.scan`."""
        async with opened(tmp_path) as tier:
            await tier.scanned()
            key = await store(tier, slots, 1)
            getattr(self, harm)(tier.path(key))
            tier.directories.begin_scan(tier.directories.all[0], first=first)
            await tier.scanned()
            assert not os.path.exists(tier.path(key))
            assert await tier.read_device(key, slots.empty()) is None
            assert not (tmp_path / "quarantine").exists()
            await store(tier, slots, 1)
            into = slots.empty()
            assert await tier.read_device(key, into) == CHUNK_BYTES
            assert np.array_equal(slots.content(into, CHUNK_BYTES), chunk(1)[1])

    async def test_file_changed_after_it_was_read_once(self, opened: Opened, slots: Slots, tmp_path: Path) -> None:
        async with opened(tmp_path) as tier:
            key = await store(tier, slots, 1)
            assert await tier.read_device(key, slots.empty()) == CHUNK_BYTES
            flip(tier.path(key), HEADER_BYTES + 100)
            with pytest.raises(CorruptChunk, match="payload checksum"):
                await tier.read_device(key, slots.empty())

    async def test_chunk_of_another_layout(self, opened: Opened, slots: Slots, tmp_path: Path) -> None:
        async with opened(tmp_path) as tier:
            key = await store(tier, slots, 1)
        async with opened(tmp_path, fingerprint=b"h" * 16) as tier:
            with pytest.raises(CorruptChunk, match="layout: expected 6868"):
                await tier.read_device(key, slots.empty())


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


async def test_file_that_another_process_deleted_is_a_miss(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        key = await store(tier, slots, 1)
        assert await tier.read_device(key, slots.empty()) == CHUNK_BYTES
        os.unlink(tier.path(key))
        assert await tier.read_device(key, slots.empty()) is None
        assert not tier.contains(key)


async def test_nothing_fits_under_the_cap(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    async with opened(tmp_path, cap_bytes=CHUNK_BYTES) as tier:
        key, payload = chunk(1)
        assert await tier.write_device(key, slots.filled(payload), CHUNK_BYTES) is False


async def test_directory_without_write_access_after_opening(opened: Opened, slots: Slots, tmp_path: Path) -> None:
    """A write that fails leaves no file, no charge, and the slot to its owner."""
    async with opened(tmp_path) as tier:
        await store(tier, slots, 1)
        await tier.scanned()  # it may correct the count
        used = tier.statistics().occupied_bytes
        place = Path(tier.path(chunk(2)[0])).parent
        moved = place.rename(tmp_path / "elsewhere")
        place.write_text("in the way")
        key, payload = chunk(2)
        with suppress(OSError, TierFull):
            assert not await tier.write_device(key, slots.filled(payload), CHUNK_BYTES)
        assert not tier.contains(key)
        assert tier.statistics().occupied_bytes == used
        place.unlink()
        moved.rename(place)
        assert await tier.write_device(key, slots.filled(payload), CHUNK_BYTES)


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

    async def test_where_it_is_demanded_its_absence_is_an_error(self, device: Device, tmp_path: Path) -> None:
        settings = GdsSettings((tmp_path,), cap_bytes=64 << 20, chunk_bytes=CHUNK_BYTES, way="cufile")
        tier = GdsTier(settings, FINGERPRINT, device)
        with pytest.raises(ConfigError, match="GPUDirect Storage does not work with .* Set use_gds: false"):
            await tier.open()

    async def test_what_is_there_already_counts_as_room_after_a_restart(self, tmp_path: Path) -> None:
        first = GdsTier(GdsSettings((tmp_path,), cap_bytes=0), FINGERPRINT)
        await first.open()
        capacity = first.directories.all[0].files.capacity
        capacity.resize(1 << 40)
        capacity.commit(1 << 40)
        await first.close()
        async with open_tier(GdsTier(GdsSettings((tmp_path,), cap_bytes=0), FINGERPRINT)) as second:
            assert second.settings.cap_bytes - first.settings.cap_bytes == pytest.approx(0.9 * (1 << 40), rel=0.02)
