"""What `tiercache doctor` says of this machine, and of directories and mounts that it is shown."""

from pathlib import Path

import pytest

from tiercache.commands.doctor import NOTE, OK, PROBLEM, Finding, examine
from tiercache.tiers.files.access import Mount, file_system_of, mounts


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_every_part_is_examined(tmp_path: Path) -> None:
    found = by_topic(examine(tmp_path))
    assert {
        "python", "CPUs", "NUMA nodes", "memory", "transparent huge pages", "reserved huge pages", "memlock limit",
        "shared memory", f"disk at {tmp_path}", "mount", "tier", "O_DIRECT", "GPU", "GPUDirect Storage", "3FS mount",
        "Weka mount", "package uvloop", "package torch", "package vllm", "package kvikio", "package redis",
    } <= set(found)  # fmt: skip
    assert all(finding.status in (OK, NOTE, PROBLEM) for finding in found.values())


def test_a_problem_comes_with_advice(tmp_path: Path) -> None:
    problems = [finding for finding in examine(tmp_path / "absent") if finding.status == PROBLEM]
    assert [finding.found for finding in problems] == ["not a directory"]
    assert problems[0].advice


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_mounts_are_read_with_their_escapes(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
        "91 27 0:44 /of\\040it /mnt/three\\040fs rw - fuse.hf3fs hf3fs.stage rw,user_id=0\n"
        "something else\n"
    )
    assert mounts(table) == [
        Mount("/", "ext4", "/dev/vda", ("rw", "relatime", "discard")),
        Mount("/mnt/three fs", "fuse.hf3fs", "hf3fs.stage", ("rw", "user_id=0")),
    ]
    assert mounts(tmp_path / "absent") == []


def test_this_system_says_where_the_root_is_mounted() -> None:
    assert "/" in [mount.point for mount in mounts()]


@pytest.mark.parametrize(
    ("path", "kind"), [("/data/kv/x", "xfs"), ("/data/kvx", "tmpfs"), ("/data", "tmpfs"), ("/srv", "ext4")]
)
def test_the_longest_mount_point_above_a_path_is_its_file_system(path: str, kind: str) -> None:
    mounted = [Mount("/", "ext4"), Mount("/data", "nfs"), Mount("/data", "tmpfs"), Mount("/data/kv", "xfs")]
    assert file_system_of(Path(path), mounted) == kind


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [(0o700, OK, "only their owner"), (0o2770, OK, "this group's users"), (0o755, PROBLEM, "every user can read")],
)
def test_who_may_read_the_chunks(tmp_path: Path, mode: int, status: str, said: str) -> None:
    tmp_path.chmod(0o755)
    assert "file access" not in by_topic(examine(tmp_path)), "no cache has been here"
    for name in (".tiercache", "00", "ff"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    finding = by_topic(examine(tmp_path))["file access"]
    assert finding.status == status
    assert said in finding.found
    tmp_path.chmod(0o700)
    assert by_topic(examine(tmp_path))["file access"].status == OK, "others cannot get there"


@pytest.mark.parametrize(
    ("path", "size_gb", "status", "found"),
    [
        ("{in_memory}/kv", 0.01, (OK, NOTE), "0.01 GB for "),
        ("{in_memory}/kv", 1e6, (PROBLEM,), "/dev/shm has "),
        ("/proc/kv", 0.01, (PROBLEM,), "/proc/kv lies on proc"),
    ],
)
def test_the_shared_memory_tier_of_this_environment_is_looked_at(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, path: str, size_gb: float, status: tuple[str, ...], found: str
) -> None:
    assert "shared_memory_path" not in by_topic(examine(in_memory))
    monkeypatch.setenv("TIERCACHE_SHARED_MEMORY_PATH", path.format(in_memory=in_memory))
    monkeypatch.setenv("TIERCACHE_MAX_SHARED_MEMORY_SIZE", str(size_gb))
    finding = by_topic(examine(in_memory))["shared_memory_path"]
    assert finding.status in status and finding.found.startswith(found)
    assert finding.advice or finding.status == OK
