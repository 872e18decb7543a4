"""Open a cache of exactly the simulated size: as many slots and files as its setting has blocks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.config.machine import available_memory_bytes
from tiercache.config.schema import GB
from tiercache.core.header import file_bytes
from tiercache.core.layout import Layout
from tiercache.memory.arena import HUGE_PAGE_BYTES
from tiercache.memory.slots import FEWEST_SLOTS
from tiercache.replay.setting import Setting, SettingError
from tiercache.tiers.files.access import OWNER
from tiercache.tiers.files.directory import TOP_LEVELS, make_place
from tiercache.tiers.files.tier import FileTier

DISK = "disk"
_THREADS = 4
_FREE_SHARE = 0.9


def check_room(setting: Setting, chunk_bytes: int, unique_blocks: int, directory: Path) -> None:
    """Check the machine's memory and the free space of the directory. Raises SettingError."""
    if setting.ram_blocks < FEWEST_SLOTS:
        raise SettingError(f"--real: expected room for {FEWEST_SLOTS} blocks in RAM, found {setting.ram_blocks}")
    needed_bytes = min(setting.ram_blocks, unique_blocks + FEWEST_SLOTS) * chunk_bytes
    if needed_bytes < HUGE_PAGE_BYTES / 2:
        # The arena consists of whole pages. If most of it were set aside, its batches and floors would be too large.
        raise SettingError(
            f"--real: expected at least {HUGE_PAGE_BYTES / 2 / 1024:.0f} KiB in RAM, found {needed_bytes / 1024:.0f}; "
            "choose a larger --real-chunk-kib"
        )
    memory_bytes = available_memory_bytes()
    if memory_bytes is not None and needed_bytes > _FREE_SHARE * memory_bytes:
        raise SettingError(f"--real: needs {needed_bytes / GB:.1f} GiB of memory; choose a smaller --real-chunk-kib")
    if not directory.is_dir():
        raise SettingError(f"--real: {directory} is not a directory")
    flash_bytes = _flash_blocks(setting, unique_blocks) * file_bytes(chunk_bytes)
    free_bytes = shutil.disk_usage(directory).free
    if flash_bytes > _FREE_SHARE * free_bytes:
        raise SettingError(
            f"--real: needs {flash_bytes / GB:.1f} GiB in {directory}, which has {free_bytes / GB:.1f}; "
            "choose a smaller --real-chunk-kib"
        )


@asynccontextmanager
async def opened(
    setting: Setting, chunk_bytes: int, unique_blocks: int, directory: Path, *, one_at_a_time: bool
) -> AsyncIterator[TierCache]:
    """Open a cache for `setting` with its files below `directory`, which must be empty. Leaves the files there.

    With `one_at_a_time`, a single thread reads and writes, so that operations complete in the order of the calls.
    """
    slots = min(setting.ram_blocks, unique_blocks + FEWEST_SLOTS)
    values: dict[str, object] = {
        # Half a chunk more, since a size in GB loses some bytes in rounding.
        "max_local_cpu_size": (slots + 0.5) * chunk_bytes / GB,
        "cache_policy": setting.policy,
        "close_timeout_s": 0.0,
        "device": "none",
    }
    layout = Layout("replay", chunk_tokens=1, bytes_per_token=chunk_bytes)
    if setting.flash_blocks != 0:
        made_bytes = await asyncio.to_thread(_make_directories, directory)
        cap_bytes = made_bytes + (_flash_blocks(setting, unique_blocks) + 0.5) * file_bytes(chunk_bytes)
        values |= {
            "local_disk": str(directory),
            "max_local_disk_size": cap_bytes / GB,
            "disk_durability": "none",
            "disk_io_threads": 1 if one_at_a_time else _THREADS,
            "flash_admission": setting.admission,
        }
    async with TierCache.open(Config.load(environ={}, overrides=values), layout) as cache:
        disk = disk_of(cache)
        if disk is not None:
            await disk.scanned()
        # The arena consists of whole huge pages; take the slots beyond the setting's size.
        for _ in range(cache.cpu.pool.count - slots):
            cache.cpu.pool.take()
        yield cache


def disk_of(cache: TierCache) -> FileTier | None:
    """Return the tier with the files, if there is one."""
    return next((tier for tier in cache.tiers if isinstance(tier, FileTier)), None)


def _flash_blocks(setting: Setting, unique_blocks: int) -> int:
    return unique_blocks if setting.flash_blocks is None else min(setting.flash_blocks, unique_blocks)


def _make_directories(directory: Path) -> int:
    """Make all directories that the tier will need, so that they take no room from chunks later. Return their bytes."""
    made_bytes, place = 0, make_place(directory, OWNER)
    for top in TOP_LEVELS:
        (place / top).mkdir()
        made_bytes += (place / top).stat().st_blocks * 512
    return made_bytes
