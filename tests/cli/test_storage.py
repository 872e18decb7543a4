"""What `tiercache doctor --path` says of file systems that this machine does not have, from lines of their mount tables."""

from pathlib import Path

import pytest

from tiercache.commands.findings import NOTE, OK, PROBLEM, Finding
from tiercache.commands.storage import Place, explain
from tiercache.tiers.files.access import mount_of, parse_mountinfo

TABLE = r"""
22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
31 28 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
40 28 259:3 / /journaled rw,relatime shared:30 - ext4 /dev/nvme1n1 rw,data=journal
41 28 259:5 / /nvme rw,noatime shared:31 - xfs /dev/md0 rw,attr2,inode64,logbufs=8,logbsize=32k,noquota
43 28 0:48 / /container rw,relatime - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/o/diff,workdir=/o/work
50 28 0:55 / /weka rw,relatime shared:40 - wekafs 10.0.0.7/kv rw,writecache,inode_bits=auto,readahead_kb=32768,dentry_max_age_positive=1000,dentry_max_age_negative=0,container_name=client
60 28 0:60 / /nfs4 rw,relatime shared:50 - nfs4 10.0.0.5:/kv rw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.0.0.9,local_lock=none,addr=10.0.0.5
61 28 0:61 / /nfs3 rw,relatime shared:51 - nfs 10.0.0.5:/kv rw,vers=3,rsize=1048576,wsize=1048576,namlen=255,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1,hard,nolock,proto=tcp,timeo=600,sec=sys,local_lock=all,addr=10.0.0.5
62 28 0:62 / /nfs-flock rw,relatime shared:52 - nfs 10.0.0.5:/kv rw,vers=3,hard,proto=tcp,sec=sys,mountproto=udp,local_lock=flock,addr=10.0.0.5
63 28 0:63 / /nfs-rdma rw,relatime shared:53 - nfs 10.0.0.5:/kv rw,vers=3,hard,noac,proto=rdma,port=20049,sec=sys,local_lock=none,addr=10.0.0.5
70 28 0:70 / /lustre rw,relatime shared:60 - lustre 10.0.0.2@o2ib:/kv rw,checksum,flock,nouser_xattr,lruresize,lazystatfs,nouser_fid2path,verbose,encrypt
71 28 0:71 / /lustre-local rw,relatime shared:61 - lustre 10.0.0.2@o2ib:/kv rw,checksum,localflock,lruresize,lazystatfs
72 28 0:72 / /lustre-none rw,relatime shared:62 - lustre 10.0.0.2@o2ib:/kv rw,checksum,lruresize,lazystatfs
73 28 0:73 / /beegfs rw,relatime shared:63 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf
74 28 0:74 / /3fs rw,nosuid,nodev,relatime shared:64 - fuse.hf3fs hf3fs.stage rw,user_id=0,group_id=0,allow_other
75 28 0:75 / /cifs rw,relatime shared:65 - cifs //10.0.0.3/kv rw,vers=3.1.1,cache=strict,nobrl
"""  # noqa: E501


def findings(point: str, **known: object) -> dict[str, Finding]:
    """What is said of a place below the mount at `point`, with a GPU and nvidia-fs unless told otherwise."""
    path = Path(point) / "kv"
    facts = {"direct": True, "gpu": True, "nvidia_fs": True} | known
    place = Place(mount_of(path, parse_mountinfo(TABLE)), **facts)  # type: ignore[arg-type]
    return {finding.topic: finding for finding in explain(place)}


def test_weka_has_a_tier_and_options_of_its_own() -> None:
    said = findings("/weka")
    assert "use weka_path" in said["tier"].advice
    assert "dentry_max_age_positive=1000" in said["tier"].advice
    assert said["mount"].found.startswith("wekafs 10.0.0.7/kv at /weka (rw, relatime, writecache, ")
    assert {finding.status for finding in said.values()} == {OK}
    assert "rdma_dev_addr_list" in said["GPUDirect Storage"].advice


@pytest.mark.parametrize("point", ["/", "/nvme"])
def test_local_disks_have_their_tiers(point: str) -> None:
    said = findings(point)
    assert {finding.status for finding in said.values()} == {OK}
    assert "local_disk" in said["tier"].advice
    assert "locks between hosts" not in said


@pytest.mark.parametrize(("point", "advice"), [("/dev/shm", "max_local_cpu_size"), ("/container", "mount a volume")])
def test_memory_and_container_layers_are_no_place_for_chunks_and_have_no_gds(point: str, advice: str) -> None:
    said = findings(point)
    assert said["tier"].status == NOTE and advice in said["tier"].advice
    assert said["GPUDirect Storage"].status == NOTE
    assert "does not support" in said["GPUDirect Storage"].found
    assert "falls back to pinned host memory" in said["GPUDirect Storage"].advice


@pytest.mark.parametrize("point", ["/nfs4", "/lustre", "/beegfs", "/cifs", "/3fs"])
def test_shared_mounts_that_are_not_weka_are_for_the_fs_tier(point: str) -> None:
    advice = findings(point)["tier"].advice
    assert 'remote_storage_plugins: ["fs"]' in advice and "weka_path" not in advice


@pytest.mark.parametrize(
    ("point", "status", "found", "advice"),
    [
        ("/nfs3", PROBLEM, "flock stays on this host (nolock)", "must not share"),
        ("/nfs-flock", PROBLEM, "flock stays on this host (local_lock=flock)", "must not share"),
        ("/lustre-local", PROBLEM, "flock stays on this host (localflock)", "must not share"),
        ("/lustre-none", PROBLEM, "flock stays on this host (noflock)", "must not share"),
        ("/cifs", PROBLEM, "flock stays on this host (nobrl)", "must not share"),
        ("/beegfs", NOTE, "not shown in the mount table", "tuneUseGlobalFileLocks"),
        ("/3fs", NOTE, "not shown in the mount table", "flock"),
        *((point, OK, "flock is seen by other hosts", "") for point in ("/weka", "/nfs4", "/nfs-rdma", "/lustre")),
    ],
)
def test_whether_locks_reach_other_hosts_is_said(point: str, status: str, found: str, advice: str) -> None:
    said = findings(point)["locks between hosts"]
    assert (said.status, said.found) == (status, found)
    assert advice in said.advice


@pytest.mark.parametrize(
    ("point", "known", "status", "found", "advice"),
    [
        ("/nvme", {"gpu": False}, NOTE, "no GPU", "host memory"),
        ("/nvme", {"nvidia_fs": False}, NOTE, "nvidia-fs is not loaded", "modprobe nvidia_fs"),
        ("/journaled", {}, NOTE, "ext4 with data=journal", "data=ordered"),
        ("/nfs4", {}, NOTE, "NFS without RDMA", "proto=rdma"),
        ("/3fs", {}, NOTE, "cuFile does not support fuse.hf3fs", "falls back"),
        ("/", {}, OK, "nvidia-fs is loaded, and cuFile supports ext4", ""),
        ("/nvme", {}, OK, "nvidia-fs is loaded, and cuFile supports xfs", ""),
        ("/weka", {}, OK, "nvidia-fs is loaded, and cuFile supports wekafs", "rdma_dev_addr_list"),
        *((f"/{kind}", {}, OK, f"nvidia-fs is loaded, and cuFile supports {kind}", "") for kind in ("lustre", "beegfs")),
        ("/nfs-rdma", {}, OK, "nvidia-fs is loaded, and cuFile supports nfs", ""),
    ],
)
def test_what_gds_can_do_and_what_keeps_it_away_is_said(
    point: str, known: dict[str, bool], status: str, found: str, advice: str
) -> None:
    said = findings(point, **known)["GPUDirect Storage"]
    assert (said.status, said.found) == (status, found)
    assert advice in said.advice


@pytest.mark.parametrize(("direct", "status", "found"), [(True, OK, "works there"), (False, NOTE, "does not work on xfs")])
def test_direct_io_is_tried(direct: bool, status: str, found: str) -> None:
    said = findings("/nvme", direct=direct)["O_DIRECT"]
    assert (said.status, said.found) == (status, found)


def test_every_note_and_problem_says_what_to_do() -> None:
    for mount in parse_mountinfo(TABLE):
        for gpu in (True, False):
            for finding in findings(mount.point, gpu=gpu, direct=False).values():
                assert finding.status == OK or finding.advice, finding
