"""Examine the storage of a directory: find the tier that suits it, and what makes it slow or unsafe to share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiercache.commands.findings import NOTE, OK, PROBLEM, Finding
from tiercache.tiers.files.access import NFS, Mount, local_locks

CUFILE_KINDS = frozenset({"ext4", "xfs", "wekafs", "lustre", "nfs", "nfs4", "beegfs", "gpfs"})
"""File systems that GPUDirect Storage supports, https://docs.nvidia.com/gpudirect-storage/nvidia_fs/index.html."""
SHARED_KINDS = frozenset(
    {"wekafs", "lustre", "nfs", "nfs4", "beegfs", "gpfs", "ceph", "cifs", "smb3", "fuse.hf3fs", "fuse.juicefs"}
    | {"fuse.ceph-fuse", "fuse.glusterfs"}
)
_MEMORY_KINDS = ("tmpfs", "ramfs", "devtmpfs")
_FS_TIER = 'remote_storage_plugins: ["fs"], and its base_path'


@dataclass(frozen=True)
class Place:
    """Properties of a directory's storage."""

    mount: Mount
    direct: bool
    """True if O_DIRECT works there."""
    gpu: bool
    nvidia_fs: bool


def explain(place: Place) -> list[Finding]:
    """Return all findings about `place`. Pure."""
    return [_mount(place.mount), _tier(place.mount.kind), _direct(place), _gds(place), *_sharing(place.mount)]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def has_nvidia_fs() -> bool:
    return os.path.exists("/proc/driver/nvidia-fs/stats") or os.path.exists("/dev/nvidia-fs0")


def _mount(mount: Mount) -> Finding:
    return Finding("mount", OK, f"{mount.kind} {mount.source} at {mount.point} ({', '.join(mount.options)})")


def _tier(kind: str) -> Finding:
    if kind == "wekafs":
        advice = (
            "use weka_path. Mount with noatime, dentry_max_age_positive=1000 or less (chunks of other hosts are seen "
            "that soon), writecache, and num_cores of 2 or more"
        )
        return Finding("tier", OK, "WekaFS, shared by many hosts", advice)
    if kind == "fuse.hf3fs":
        advice = f"name it in base_path of a hf3fs tier (needs hf3fs_py_usrbio); an fs tier works there, too ({_FS_TIER})"
        return Finding("tier", NOTE, "3FS, shared by many hosts", advice)
    if kind in SHARED_KINDS:
        advice = f"the fs tier is made for directories that several hosts share: {_FS_TIER}; local_disk works as well"
        return Finding("tier", OK, "shared by many hosts", advice)
    if kind in _MEMORY_KINDS:
        advice = (
            "use it as shared_memory_path if several engines of this host share chunks; a single engine gains more from "
            "max_local_cpu_size. For a disk tier name a directory on ext4 or XFS"
        )
        return Finding("tier", NOTE, f"{kind}: chunks would take RAM and be gone after a reboot", advice)
    if kind == "overlay":
        advice = "mount a volume (ext4 or XFS) into the container and use it"
        return Finding("tier", NOTE, "the file system of a container: slow, and deleted with the container", advice)
    return Finding("tier", OK, "local", "use local_disk, or gds_path where a GPU is to read it directly")


def _direct(place: Place) -> Finding:
    if place.direct:
        return Finding("O_DIRECT", OK, "works there")
    advice = "the page cache is used instead (slower, stalls of 20 ms); a local ext4 or XFS has it"
    return Finding("O_DIRECT", NOTE, f"does not work on {place.mount.kind}", advice)


def _gds(place: Place) -> Finding:
    mount, topic = place.mount, "GPUDirect Storage"
    advice = "gds_path falls back to pinned host memory there, as weka_path does with use_gds: false"
    if not place.gpu:
        return Finding(topic, NOTE, "no GPU", "gds_path and weka_path serve host memory on this machine")
    if mount.kind not in CUFILE_KINDS:
        where = "use ext4, XFS, WekaFS, Lustre, NFS over RDMA, BeeGFS or GPFS"
        return Finding(topic, NOTE, f"cuFile does not support {mount.kind}", f"{advice}; {where}")
    if not place.nvidia_fs:
        return Finding(topic, NOTE, "nvidia-fs is not loaded", f"{advice}; modprobe nvidia_fs, and see gdscheck -p")
    if mount.kind == "ext4" and mount.option("data") not in (None, "ordered"):
        return Finding(topic, NOTE, f"ext4 with data={mount.option('data')}", f"{advice}; mount it with data=ordered")
    if mount.kind in NFS and mount.option("proto") not in ("rdma", "rdma6"):
        return Finding(topic, NOTE, "NFS without RDMA", f"{advice}; mount it with proto=rdma,port=20049")
    more = ""
    if mount.kind == "wekafs":
        more = "name this host's RDMA addresses in /etc/cufile.json (rdma_dev_addr_list), and see gdscheck -p"
    return Finding(topic, OK, f"nvidia-fs is loaded, and cuFile supports {mount.kind}", more)


def _sharing(mount: Mount) -> Iterator[Finding]:
    """Check that locks reach all hosts: instances share the cap of a directory through them."""
    if mount.kind not in SHARED_KINDS:
        return
    option, remedy = local_locks(mount)
    if option:
        advice = f"instances on several hosts must not share it: they would exceed the cap. {remedy}"
        yield Finding("locks between hosts", PROBLEM, f"flock stays on this host ({option})", advice)
    elif remedy := _what_to_look_at(mount.kind):
        yield Finding("locks between hosts", NOTE, "not shown in the mount table", remedy)
    else:
        yield Finding("locks between hosts", OK, "flock is seen by other hosts")


def _what_to_look_at(kind: str) -> str:
    """Return advice for a mount whose table entry does not show if flock reaches other hosts."""
    if kind == "beegfs":
        return "set tuneUseGlobalFileLocks = true in beegfs-client.conf"
    return "make sure that its flock is seen by other hosts" if kind.startswith("fuse.") else ""
