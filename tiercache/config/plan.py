"""Plan the tiers of a configuration. `config explain` prints the plan, and the cache is built from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tiercache.config.remotes import NOT_AVAILABLE, Remote, remotes_of, split_paths
from tiercache.config.schema import ConfigFields, in_bytes
from tiercache.config.secrets import hidden_url

ON, OFF, REFUSED = "on", "off", "refused"


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier that the configuration asks for."""

    name: str
    kind: str
    """The builder: cpu, shared_memory, disk, gds, weka, hf3fs, fs, redis, mooncake, infinistore, s3, or a plug-in's type."""
    place: str
    """Directories, a URL without credentials, or the kind of memory; safe to show."""
    cap_bytes: int | None
    """None means that tiercache sets no cap."""
    tenant_bytes: int = field(default=0, kw_only=True)
    """Quota of each tenant in bytes; 0 means none."""
    state: str = ON
    """on, off, not available in this version, or refused, in which case the cache does not start."""
    note: str = ""
    """The reason for the state."""
    directories: tuple[str, ...] = ()
    """Directories of a file tier, of all ranks."""
    remote: Remote | None = None
    """Settings of a remote tier; None for other tiers."""

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "kind", "place", "cap_bytes", "tenant_bytes", "state", "note")
        return {name: getattr(self, name) for name in names}


def plan_of(config: ConfigFields) -> tuple[PlannedTier, ...]:
    """Return the tiers that `config` makes, in the order in which a get reads them: the hot cache first."""
    return (_cpu(config), *_shared_memory(config), *_disk(config), *_gds(config), *_remotes(config))


def _cpu(config: ConfigFields) -> PlannedTier:
    place = f"POSIX shared memory {config.shm_name}" if config.shm_name else "memory"
    if config.local_cpu_use_hugepages:
        place = "2 MiB huge pages"
    note = "" if config.local_cpu else "local_cpu is false: the arena stages chunks for the other tiers and keeps none"
    state, quota_bytes = ON if config.local_cpu else OFF, in_bytes(config.tenant_max_local_cpu_size)
    return PlannedTier("cpu", "cpu", place, config.arena_bytes, state, note, tenant_bytes=quota_bytes)


def _shared_memory(config: ConfigFields) -> Iterator[PlannedTier]:
    if path := config.shared_memory_path:
        note = "one for all engines of this host, and read where it lies"
        kind, quota_bytes = "shared_memory", in_bytes(config.tenant_max_shared_memory_size)
        yield PlannedTier(
            kind, kind, path, config.shared_memory_bytes, note=note, directories=(path,), tenant_bytes=quota_bytes
        )


def _disk(config: ConfigFields) -> Iterator[PlannedTier]:
    if paths := config.local_disk:
        on = config.disk_bytes > 0
        note = "" if on else "max_local_disk_size is 0, which switches the disk tier off"
        state, quota_bytes = ON if on else OFF, in_bytes(config.tenant_max_local_disk_size)
        yield PlannedTier(
            "disk", "disk", ", ".join(paths), config.disk_bytes, state, note, paths, tenant_bytes=quota_bytes
        )


def _gds(config: ConfigFields) -> Iterator[PlannedTier]:
    for kind, paths in (("gds", config.gds_path), ("weka", config.weka_path)):
        if paths:
            cap_bytes, quota_bytes = in_bytes(config.max_gds_size) or None, in_bytes(config.tenant_max_gds_size)
            yield PlannedTier(kind, kind, ", ".join(paths), cap_bytes, directories=paths, tenant_bytes=quota_bytes)


def _remotes(config: ConfigFields) -> Iterator[PlannedTier]:
    for remote in remotes_of(config):
        state = ON if remote.available else NOT_AVAILABLE
        directories = tuple(split_paths(remote.place)) if remote.type == "hf3fs" else ()
        cap_bytes, quota_bytes = _limits(config, remote)
        yield PlannedTier(
            remote.name, remote.type, hidden_url(remote.place), cap_bytes or None, state, _role(remote), directories, remote,
            tenant_bytes=quota_bytes,
        )  # fmt: skip


def _limits(config: ConfigFields, remote: Remote) -> tuple[int, int]:
    """Return the cap and the quota of each tenant in bytes; 0 means none."""
    if remote.type == "hf3fs":
        return in_bytes(config.max_hf3fs_size), in_bytes(config.tenant_max_hf3fs_size)
    if remote.type == "fs":
        return in_bytes(remote.options.get("max_size", 0.0)), in_bytes(remote.options.get("tenant_max_size", 0.0))
    return 0, 0


def _role(remote: Remote) -> str:
    if remote.reads and remote.writes:
        return ""
    return "role is read: nothing is written to it" if remote.reads else "role is write: nothing is read from it"
