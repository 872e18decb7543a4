"""Make the parts of a cache from a configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiercache.config import Config
from tiercache.config.machine import available_memory_bytes
from tiercache.config.plan import ON, PlannedTier, plan_of
from tiercache.config.remotes import PLUGIN_PREFIX
from tiercache.config.schema import in_bytes
from tiercache.core.eviction import MEAN_LRU
from tiercache.core.header import file_bytes
from tiercache.core.keys import KEY_BYTES
from tiercache.core.layout import Layout
from tiercache.device.device import Device
from tiercache.device.driver import CudaDriver, Driver
from tiercache.errors import ConfigError, DeviceError
from tiercache.memory.arena import ArenaSettings, numa_node_for
from tiercache.memory.slots import SlotBudget, SlotPool
from tiercache.memory.workers import Workers
from tiercache.scheduler.reads import ReaderSettings
from tiercache.scheduler.writer import FanOut, TierWriter, WriterSettings
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.access import file_system_of
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.gds import GdsSettings, GdsTier
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier
from tiercache.tiers.hf3fs.ring import RingSettings
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote
from tiercache.tiers.shared_memory import SharedMemorySettings, SharedMemoryTier
from tiercache.tiers.weka import WekaSettings, WekaTier

logger = logging.getLogger("tiercache")

MIB = 1 << 20
WEKAFS = "wekafs"
_WEKA_THREADS = 16
_HF3FS_THREADS = 8


def arena_settings(config: Config, layout: Layout) -> ArenaSettings:
    """Return the settings of this rank's arena. Ranks share a configuration."""
    shm_name = config.shm_name
    if shm_name and layout.world_size > 1:
        shm_name = f"{shm_name}.{layout.rank}"
    return ArenaSettings(
        size_bytes=config.arena_bytes,
        hugepages=config.local_cpu_use_hugepages,
        shm_name=shm_name,
        numa_node=numa_node_for(config.numa_mode),
    )


def make_device(config: Config, layout: Layout, driver: Driver | None, in_use: int | None = None) -> Device | None:
    """Return the accelerator and its pool. Blocks.

    The accelerator is `driver`, else host memory for `device: cpu`, else the GPU `in_use`, else the first GPU if a tier
    needs it. Raises ConfigError if `driver` or the device of `device: cpu` is unusable, or if a tier needs the pool of
    a GPU and the pool cannot be made. Otherwise returns None without a usable device, and the GPU's tensors are copied
    through host memory.
    """
    if config.device == "none":
        return None
    wanted = bool(config.gds_path or config.weka_path)
    asked_for = driver is not None or config.device == "cpu"
    pool_bytes = config.gds_buffer_size * MIB if wanted and config.gds_buffer_size else None
    try:
        if driver is None:
            if config.device == "cpu":
                driver = make_cpu_driver()
            elif in_use is None and not wanted:
                return None
            else:
                driver = CudaDriver(in_use or 0)
        return Device(driver, layout.chunk_bytes, pool_bytes)
    except ConfigError as error:
        if asked_for or wanted:
            raise
        logger.info("no GPU: %s", error)
    except DeviceError as error:
        if asked_for:
            raise ConfigError(f"device: {error}") from error
        logger.info("no GPU: %s", error)
    return None


def make_cpu_driver() -> Driver:
    """Return a driver with host memory in place of a device's, as much as the machine can spare."""
    return Driver(available_memory_bytes() or 1 << 30)


def make_cpu(config: Config, pool: SlotPool, copiers: Workers) -> CpuTier:
    """Return the hot cache. Raises ConfigError for a quota smaller than a chunk."""
    if config.cache_policy.upper() in MEAN_LRU:
        logger.warning("cache_policy: %s is not built any more and means LRU", config.cache_policy)
    return CpuTier(
        pool,
        copiers,
        policy=config.cache_policy,
        keep=config.local_cpu,
        quota_bytes=hot_quota_bytes(config, pool.slot_bytes),
        prefetch_share=config.prefetch_share,
    )


def hot_quota_bytes(config: Config, slot_bytes: int) -> int:
    """Return the quota of a tenant in the hot cache; 0 for none. Raises ConfigError if it is smaller than a chunk."""
    quota_bytes = in_bytes(config.tenant_max_local_cpu_size) if config.local_cpu else 0
    _check_holds_a_chunk("tenant_max_local_cpu_size", quota_bytes or None, slot_bytes, 1, _QUOTA_ADVICE)
    return quota_bytes


_CAP_ADVICE = "raise it, or lower chunk_size"
_QUOTA_ADVICE = "raise it, lower chunk_size, or set it to 0: no quota"


def _check_holds_a_chunk(key: str, size_bytes: int | None, needed_bytes: int, directories: int, advice: str) -> None:
    """Raise ConfigError if a limit, divided by the number of directories, is smaller than a chunk. None means no limit."""
    if size_bytes is None or size_bytes // directories >= needed_bytes:
        return
    each = f" in any of {directories} directories, which have equal shares" if directories > 1 else ""
    raise ConfigError(
        f"{key}: {size_bytes / 2**30:g} GB hold no chunk of {needed_bytes / 2**20:.2f} MiB{each}; {advice}"
    )


def make_tiers(config: Config, layout: Layout, device: Device | None = None) -> list[Tier]:
    """Return the tiers of the plan below the hot cache, in its order. Queries file systems, so it may block.

    Raises ConfigError for a cap or quota smaller than a chunk, a missing library, and invalid settings.
    """
    _, *below = plan_of(config)
    needed_bytes, tiers = file_bytes(layout.chunk_bytes), []
    for planned in below:
        if planned.state == ON:
            tier = make_tier(config, layout, device, planned)
            directories = max(1, len(_directories_of(tier)))
            for prefix, limit_bytes, advice in (
                ("", planned.cap_bytes, _CAP_ADVICE),
                ("tenant_", planned.tenant_bytes or None, _QUOTA_ADVICE),
            ):
                _check_holds_a_chunk(_limit_key(planned, prefix), limit_bytes, needed_bytes, directories, advice)
            tiers.append(tier)
    _check_no_directory_is_used_twice(tiers)
    return tiers


_LIMIT_KEYS = {
    "shared_memory": "max_shared_memory_size",
    "disk": "max_local_disk_size",
    "gds": "max_gds_size",
    "weka": "max_gds_size",
    "hf3fs": "max_hf3fs_size",
}
"""Keys of caps, by kind; an fs instance has its own. The key of a quota has the prefix `tenant_`."""


def _limit_key(planned: PlannedTier, prefix: str) -> str:
    if planned.kind in _LIMIT_KEYS:
        return prefix + _LIMIT_KEYS[planned.kind]
    return f"{PLUGIN_PREFIX}{planned.name}.{prefix}max_size"


def _directories_of(tier: Tier) -> tuple[Path, ...]:
    """Return the directories that this rank uses."""
    return tier.settings.directories if isinstance(tier, FileTier) else ()


def make_tier(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    """Return the tier of one entry of the plan. An instance's own class (`module_path`) overrides its type."""
    remote = planned.remote
    own_class = remote is not None and remote.options.get("module_path")
    build = _from_options if own_class else _BUILDERS.get(planned.kind, _from_options)
    tier = build(config, layout, device, planned)
    if remote is not None:
        tier.reads, tier.writes = remote.reads, remote.writes
        tier.patience_s = remote.options.get("timeout_s", tier.patience_s)
    return tier


def _check_no_directory_is_used_twice(tiers: Sequence[Tier]) -> None:
    """Raise ConfigError for two tiers on one directory, since each chunk would be read and written twice.

    Compares only names, since the mount may hang.
    """
    owners: dict[str, str] = {}
    for tier in tiers:
        for directory in map(os.path.normpath, _directories_of(tier)):
            if (other := owners.setdefault(directory, tier.name)) != tier.name:
                raise ConfigError(f"{tier.name}: {directory} belongs to the tier {other} already; give one its own")


def _file_options(config: Config, planned: PlannedTier) -> dict[str, Any]:
    """Return the settings of all file tiers."""
    return {
        "directories": tuple(map(Path, planned.directories)),
        "cap_bytes": planned.cap_bytes or 0,
        "threads": config.disk_io_threads,
        "file_access": config.file_access,
        "tenant_bytes": planned.tenant_bytes,
    }


def _flash_options(config: Config) -> dict[str, Any]:
    """Return the settings of all flash of this machine."""
    return {
        "durable": config.disk_durability == "fdatasync",
        "admission": config.flash_admission,
        "bytes_per_day": config.flash_bytes_per_day,
    }


def _shared_memory(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    return SharedMemoryTier(SharedMemorySettings(**_file_options(config, planned)), layout.fingerprint)


def _disk(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    """Return the disk tier. With `by_gpu` each rank has one of the directories, with `by_chunk` every rank uses them all."""
    if config.local_disk_path_sharding == "by_gpu":
        planned = _of_rank(layout, planned)
    settings = FileSettings(
        **_file_options(config, planned),
        **_flash_options(config),
        direct=config.use_odirect,
        compression=config.disk_compression,
        item_bytes=layout.item_bytes,
    )
    return DiskTier(settings, layout.fingerprint)


def _gds(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    """Return the GDS tier. Each rank has one of the directories (`gds_path_sharding: by_gpu`)."""
    planned = _of_rank(layout, planned)
    directory = Path(planned.directories[0])
    if file_system_of(directory) == WEKAFS:
        if config.weka_path:
            raise ConfigError(
                f"gds_path: {directory} is a Weka mount, and weka_path makes the Weka tier already; name it in weka_path"
            )
        logger.info("gds_path: %s is a Weka mount: it gets the Weka tier", directory)
        return _weka(config, layout, device, planned)
    settings = GdsSettings(
        **_file_options(config, planned),
        **_flash_options(config),
        direct=True if config.use_direct_io else None,
        way="auto" if config.use_gds else "posix",
        chunk_bytes=layout.chunk_bytes,
    )
    return GdsTier(settings, layout.fingerprint, device)


def _weka(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    """Return the Weka tier. GPUDirect Storage is required unless the configuration says otherwise."""
    options = _file_options(config, planned)
    for directory in options["directories"]:
        if (kind := file_system_of(directory)) != WEKAFS:
            raise ConfigError(
                f"weka_path: {directory} lies on {kind}, not on a Weka file system ({WEKAFS}): is it mounted? gds_path "
                "takes any file system"
            )
    options["threads"] = max(_WEKA_THREADS, config.disk_io_threads)
    settings = WekaSettings(
        **options,
        durable=config.disk_durability == "fdatasync",
        way="cufile" if config.use_gds else "posix",
        chunk_bytes=layout.chunk_bytes,
    )
    return WekaTier(settings, layout.fingerprint, device)


def _of_rank(layout: Layout, planned: PlannedTier) -> PlannedTier:
    """Return `planned` with only the directory of this rank. Ranks that hold the same bytes share a directory."""
    return replace(planned, directories=(planned.directories[layout.shard % len(planned.directories)],))


def _hf3fs(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    return Hf3fsTier(hf3fs_settings(config, layout, planned), layout.fingerprint, name=planned.name)


def hf3fs_settings(config: Config, layout: Layout, planned: PlannedTier) -> Hf3fsSettings:
    """Return the settings of the 3FS tier. Chunks are spread over all base paths of the instance."""
    options = _file_options(config, planned) | {"threads": max(_HF3FS_THREADS, config.disk_io_threads)}
    return Hf3fsSettings(
        **options,
        direct=False,
        durable=config.disk_durability == "fdatasync",
        mount=Path(config.hf3fs_mount_point) if config.hf3fs_mount_point else None,
        iov_bytes=config.hf3fs_iov_size,
        chunk_bytes=layout.chunk_bytes,
        rings=RingSettings(
            entries=config.hf3fs_ior_entries,
            io_depth=config.hf3fs_io_depth,
            rings=config.hf3fs_io_thread_num,
            numa=config.hf3fs_numa_id,
        ),
    )


def _from_options(config: Config, layout: Layout, device: Device | None, planned: PlannedTier) -> Tier:
    """Return a tier made from RemoteSettings: a server's, an installed package's, or the class of `module_path`."""
    remote = planned.remote
    assert remote is not None
    options = {"file_access": config.file_access, **remote.options}
    module_path, class_name = options.pop("module_path") or "", options.pop("class_name") or ""
    settings = RemoteSettings(
        name=remote.name,
        type=remote.type,
        fingerprint=layout.fingerprint,
        chunk_bytes=layout.chunk_bytes,
        item_bytes=layout.item_bytes,
        url=remote.place,
        url_key=remote.key,
        options=options,
        timeout_s=options["timeout_s"],
        concurrency=options["concurrency"],
    )
    return make_remote(settings, module_path=module_path, class_name=class_name)


def try_remote(config: Config, planned: PlannedTier) -> tuple[Path, ...]:
    """Return the directories of a remote tier, none for a server, which is not contacted.

    Raises ConfigError if the cache would not start with it, for example for lack of a library. Imports the library.
    """
    tier = make_tier(config, Layout("", chunk_tokens=1, bytes_per_token=MIB), None, planned)
    tier.load_library()
    return _directories_of(tier)


async def ask_server(config: Config, planned: PlannedTier) -> None:
    """Log in to the server of a remote tier and look for a chunk that it does not have. Changes nothing there.

    Raises ConfigError if the cache would not start, or TierUnavailable.
    """
    tier = make_tier(config, Layout("", chunk_tokens=1, bytes_per_token=MIB), None, planned)
    try:
        await tier.open()
        await tier.probe([os.urandom(KEY_BYTES)])
    finally:
        await tier.close()


_BUILDERS: dict[str, Callable[[Config, Layout, Device | None, PlannedTier], Tier]] = {
    "shared_memory": _shared_memory, "disk": _disk, "gds": _gds, "weka": _weka, "hf3fs": _hf3fs
}  # fmt: skip
"""Builders of kinds that need more of the configuration than an instance's options."""


def make_fan_out(config: Config, layout: Layout, tiers: Sequence[Tier], slot_bytes: int, budget: SlotBudget) -> FanOut:
    """Return the writers, with a queue for each tier that is written to.

    Only one of the ranks that hold the same bytes writes a chunk.
    """
    settings = writer_settings(config, len(tiers), slot_bytes, budget)
    writers = [TierWriter(tier, settings) for tier in tiers if tier.writes]
    return FanOut(writers, layout.keeps) if layout.replicas > 1 else FanOut(writers)


def writer_settings(config: Config, tiers: int, slot_bytes: int, budget: SlotBudget) -> WriterSettings:
    queue_bytes = config.write_queue_bytes or budget.slots * slot_bytes // 2
    return WriterSettings(
        queue_bytes=max(queue_bytes, slot_bytes),
        on_full=config.on_queue_full,
        wait_s=config.queue_wait_s,
        most_at_once=budget.writes_at_once(tiers),
    )


def reader_settings(config: Config, layout: Layout) -> ReaderSettings:
    rate = config.prefill_tokens_per_s
    return ReaderSettings(
        deadline_s=config.blocking_timeout_secs,
        probe_deadline_s=config.lookup_timeout_ms / 1000,
        recompute_s=layout.chunk_tokens / rate if rate else None,
    )
