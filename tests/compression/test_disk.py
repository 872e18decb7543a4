"""Compressed chunks on disk: how they are counted, listed and checked."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.cli.conftest import tiercache
from tests.compression.contract import CompressionContract
from tests.compression.payloads import kv
from tests.tiers.opened import open_tier
from tests.tiers.test_disk import flip
from tiercache import Config, Layout, TierCache
from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, Header, aligned, file_bytes, payload_checksum
from tiercache.testing import page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.format import write_chunk_file

FINGERPRINT = b"f" * 16
FILE_BYTES = file_bytes(CHUNK_BYTES)
KEY = kv(1, CHUNK_BYTES)[0]


def disk(place: Path, compression: str, cap_bytes: int = 1 << 26) -> DiskTier:
    return DiskTier(FileSettings((place / "kv",), cap_bytes, compression=compression, item_bytes=2), FINGERPRINT)


class TestDisk(CompressionContract):
    async def make_tier(self, place: Path, compression: str) -> Tier:
        return disk(place, compression)

    async def damage(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, DiskTier)
        flip(Path(tier.path(key)), HEADER_BYTES + 20_000)


async def test_the_cap_counts_what_is_really_occupied(tmp_path: Path) -> None:
    cap_bytes = 16 * (FILE_BYTES + 8192)
    async with open_tier(disk(tmp_path, "zstd", cap_bytes)) as tier:
        for number in range(100):
            assert await tier.write(*kv(number, CHUNK_BYTES), CHUNK_BYTES)
        counted = tier.statistics()
        files = [path.stat().st_blocks * 512 for path in chunks_of(tmp_path / "kv").glob("??/*")]
        assert 20 <= len(files) == counted.resident
        assert sum(files) <= counted.occupied_bytes <= cap_bytes


@pytest.mark.parametrize("are_read_first", [False, True])
async def test_after_a_restart_chunks_are_counted_as_they_lie_there(tmp_path: Path, are_read_first: bool) -> None:
    """By the scan, or by reads before it has come to them."""
    async with open_tier(disk(tmp_path, "zstd")) as first:
        for number in range(64):
            assert await first.write(*kv(number, CHUNK_BYTES), CHUNK_BYTES)
        in_index, occupied_bytes = first.directories.all[0].index.used_bytes, first.statistics().occupied_bytes
    async with open_tier(disk(tmp_path, "none")) as second:
        if are_read_first:
            for number in range(64):
                assert await second.read(kv(number, CHUNK_BYTES)[0], page_aligned(CHUNK_BYTES)) == CHUNK_BYTES
        await second.scanned()
        assert second.directories.all[0].index.used_bytes == in_index
        assert second.statistics().occupied_bytes == occupied_bytes


async def test_the_commands_know_compressed_chunks(tmp_path: Path) -> None:
    async with open_tier(disk(tmp_path, "zstd")) as tier:
        for number in range(5):
            assert await tier.write(*kv(number, CHUNK_BYTES), CHUNK_BYTES)
        path = Path(tier.path(KEY))
    found = json.loads(tiercache("verify", tmp_path / "kv", "--json").stdout)
    assert (found["checked"], found["checked_bytes"], found["bad"]) == (5, 5 * CHUNK_BYTES, [])
    (layout,) = json.loads(tiercache("stat", tmp_path / "kv", "--json").stdout)["layouts"].values()
    assert layout["chunks"] == 5 and layout["payload_bytes"] < 0.8 * 5 * CHUNK_BYTES
    # The stored bytes are what they were when they were stored, and still not what the chunk was.
    raw = np.fromfile(path, dtype=np.uint8)
    header = Header.unpack(raw)
    payload = raw[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    payload[1] ^= 1  # of the plain checksum
    os.unlink(path)
    page_wise = page_aligned(aligned(header.payload_bytes))
    page_wise[: payload.nbytes] = payload
    lying = Header(KEY, FINGERPRINT, payload.nbytes, payload_checksum(payload), Codec.ZSTD)
    write_chunk_file(path, lying, page_wise, direct=False, durable=False)
    bad = tiercache("verify", tmp_path / "kv", "--json")
    assert bad.returncode == 1 and "plain checksum" in json.loads(bad.stdout)["bad"][0]


async def test_a_cache_stores_by_its_configuration_and_gives_back_the_same(tmp_path: Path) -> None:
    layout = Layout("m", chunk_tokens=64, bytes_per_token=1024)
    values = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1, "max_local_cpu_size": 0.01}
    config = Config.load(environ={}, overrides={**values, "disk_compression": "zstd"})
    tokens = list(range(64 * 20))
    payloads = [kv(number, layout.chunk_bytes)[1][: layout.chunk_bytes] for number in range(20)]
    async with TierCache.open(config, layout) as cache:
        assert await cache.store(tokens, payloads) == 20
        assert (await cache.flush()).complete
        counted = cache.statistics().tiers["disk"]
        assert counted.stored_bytes < 0.8 * counted.written_bytes
    async with TierCache.open(config, layout) as cache:
        buffers = [np.empty(layout.chunk_bytes, np.uint8) for _ in payloads]
        assert await cache.load(tokens, buffers) == len(tokens)
        assert all(np.array_equal(buffer, payload) for buffer, payload in zip(buffers, payloads, strict=True))
