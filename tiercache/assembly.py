"""From a configuration to the parts that it describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.core.layout import Layout
from tiercache.memory.arena import ArenaSettings, numa_node_for
from tiercache.tiers.base import Tier
from tiercache.tiers.disk import DiskSettings, DiskTier

if TYPE_CHECKING:
    from tiercache.config import Config


def arena_settings(config: Config) -> ArenaSettings:
    return ArenaSettings(
        size_bytes=config.arena_bytes,
        hugepages=config.local_cpu_use_hugepages,
        shm_name=config.shm_name,
        numa_node=numa_node_for(config.numa_mode),
    )


def make_tiers(config: Config, layout: Layout) -> list[Tier]:
    """The tiers below the hot cache, in the order of the cascade."""
    tiers: list[Tier] = []
    if config.local_disk and config.disk_bytes:
        tiers.append(DiskTier(disk_settings(config, layout), layout.fingerprint))
    return tiers


def disk_settings(config: Config, layout: Layout) -> DiskSettings:
    """With `by_gpu` each rank has one of the directories, with `by_chunk` every rank uses them all."""
    directories = tuple(Path(directory) for directory in config.local_disk)
    if config.local_disk_path_sharding == "by_gpu":
        directories = (directories[layout.rank % len(directories)],)
    return DiskSettings(
        directories=directories,
        cap_bytes=config.disk_bytes,
        threads=config.disk_io_threads,
        direct=config.use_odirect,
        durable=config.disk_durability == "fdatasync",
        policy=config.cache_policy,
    )
