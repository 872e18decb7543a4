"""`role: read` of a file tier: whatever this process finds in the directory, it leaves it exactly as it is."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.remote.fs.test_fs import tier_on
from tests.test_cache import CHUNK_BYTES, key, opened, payload
from tests.tiers.opened import refreshed
from tests.tiers.test_disk import flip
from tiercache import TierCache
from tiercache.core.header import file_bytes
from tiercache.errors import TierUnavailable
from tiercache.testing import chunk, page_aligned
from tiercache.tiers.files.tier import FileTier

STORED = range(1, 31)
Configured = Callable[[Path, str, int], dict[str, Any]]


def fs(directory: Path, role: str, chunks: int) -> dict[str, Any]:
    prefix = "remote_storage_plugin.fs.a."
    size_gb = chunks * file_bytes(CHUNK_BYTES) / 2**30
    options = {f"{prefix}base_path": str(directory), f"{prefix}max_size": size_gb, f"{prefix}role": role}
    return {"remote_storage_plugins": ["fs.a"], "extra_config": options}


def contents(directory: Path) -> dict[str, tuple[object, ...]]:
    """Every file and directory, with its mode, when it was changed, and what is in it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (oct(status.st_mode), status.st_mtime_ns, status.st_ino, content)
    return found


def file_tier(cache: TierCache) -> FileTier:
    (tier,) = cache.tiers
    assert isinstance(tier, FileTier)
    return tier


async def write_chunks(kind: Configured, directory: Path) -> dict[int, Path]:
    """Where each of them lies."""
    async with opened(**kind(directory, "both", 100)) as cache:
        for number in STORED:
            assert await cache.put(key(number), payload(number))
        assert (await cache.flush()).complete
        return {number: Path(file_tier(cache).path(key(number))) for number in STORED}


def leave_things_behind(directory: Path, paths: dict[int, Path]) -> None:
    """What a process that writes clears away, or gives another mode."""
    flip(paths[1], 4096 + 17)
    paths[2].chmod(0o640)
    paths[3].parent.chmod(0o755)
    (paths[3].parent / key(99).hex()).write_bytes(b"torn")
    (paths[3].parent / f"{'ab' * 16}.7").write_bytes(b"half-written")
    (chunks_of(directory) / ".tiercache" / "tmp" / f"{'cd' * 16}.lock").write_bytes(b"")
    (chunks_of(directory) / ".tiercache" / "tmp" / f"{'cd' * 16}.1").write_bytes(b"half-written")


class ReaderContract:
    """What a tier that is only read does, whichever mount it is for."""

    configured: Configured

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "kv"

    async def test_a_reader_leaves_the_directory_as_it_is(self, directory: Path) -> None:
        leave_things_behind(directory, await write_chunks(self.configured, directory))
        before = contents(directory)
        async with opened(**self.configured(directory, "read", 5)) as cache:
            tier = file_tier(cache)
            await refreshed(tier)
            buffers = [np.empty(CHUNK_BYTES, np.uint8) for _ in STORED]
            assert await cache.lookup_each([key(number) for number in (*STORED, 31)]) == [True] * len(STORED) + [False]
            assert await cache.get_into([key(number) for number in STORED[1:]], buffers[1:]) == len(STORED) - 1
            assert all(np.array_equal(buffers[number - 1], payload(number)) for number in STORED[1:])
            assert await cache.get_into([key(1)], buffers[:1]) == 0
            assert await cache.lookup_each([key(1), key(2)]) == [False, True], "what is bad is not offered again"
            assert await cache.put(key(40), payload(40))
            assert await tier.remove(key(5)) is False
            await cache.forget([key(6)])
            assert (await cache.flush()).complete
            assert tier.statistics().evicted == 0
            assert tier.statistics().occupied_bytes >= (len(STORED) - 3) * file_bytes(CHUNK_BYTES)
            assert contents(directory) == before
        assert contents(directory) == before

    async def test_a_reader_sees_what_is_stored_while_it_reads(self, directory: Path) -> None:
        directory.mkdir()
        async with opened(**self.configured(directory, "read", 5)) as cache:
            assert contents(directory).keys() == {str(directory)}
            await write_chunks(self.configured, directory)
            await refreshed(file_tier(cache))
            buffer = np.empty(CHUNK_BYTES, np.uint8)
            for number in STORED:
                assert await cache.get_into([key(number)], [buffer]) == 1
                assert np.array_equal(buffer, payload(number))

    @pytest.mark.needs("root")
    async def test_a_reader_that_came_first_reads_the_chunks_of_another_user(self, directory: Path) -> None:
        directory.mkdir()
        async with opened(**self.configured(directory, "read", 5)) as cache:
            await write_chunks(self.configured, directory)
            for path in (directory, *directory.rglob("*")):
                os.chown(path, 65534, 65534)
            await refreshed(file_tier(cache))
            assert await cache.get_into([key(1)], [np.empty(CHUNK_BYTES, np.uint8)]) == 1

    async def test_a_reader_makes_no_directory(self, directory: Path) -> None:
        async with opened(**self.configured(directory, "read", 5)):
            assert not os.path.lexists(directory)
        assert not os.path.lexists(directory)


class TestFs(ReaderContract):
    configured = staticmethod(fs)


async def test_a_reader_that_comes_before_the_directory_serves_it_later(tmp_path: Path) -> None:
    tier = tier_on(tmp_path / "kv", timeout_s=1.0)
    tier.writes = False
    await tier.open()
    found = asyncio.Event()
    tier.tell(lambda _: found.set())
    stored, content = chunk(1)
    with pytest.raises(TierUnavailable, match="cannot be reached"):
        await tier.read(stored, page_aligned(content.nbytes))
    writer = tier_on(tmp_path / "kv")
    await writer.open()
    assert await writer.write(stored, content, content.nbytes)
    await asyncio.wait_for(found.wait(), 20)
    into = page_aligned(content.nbytes)
    assert await tier.read(stored, into) == content.nbytes
    assert np.array_equal(into, content)
    assert await writer.remove(stored)
    assert await tier.read(stored, into) is None
    for each in (tier, writer):
        await each.close()
