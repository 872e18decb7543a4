"""What `tiercache doctor` says of this machine, and of directories and mounts that it is shown."""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.remote.redis.servers import running
from tiercache.cli import app
from tiercache.commands.doctor import NOTE, OK, PROBLEM, Finding, examine
from tiercache.tiers.files.access import Mount, file_system_of, mounts


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_every_part_is_examined(tmp_path: Path) -> None:
    found = by_topic(examine(tmp_path))
    assert {
        "memory", "transparent huge pages", "shared memory", f"disk at {tmp_path}", "mount", "tier", "O_DIRECT",
        "GPUDirect Storage",
    } <= set(found)  # fmt: skip
    assert all(finding.status in (OK, NOTE, PROBLEM) for finding in found.values())
    assert found[f"disk at {tmp_path}"].status == OK
    assert list(tmp_path.iterdir()) == [], "what was tried is gone"


@pytest.mark.parametrize(
    ("name", "said"), [("absent", "not a directory"), ("x" * 300, "it cannot be used: File name too long")]
)
def test_a_path_that_cannot_be_looked_at_is_a_problem_beside_the_other_findings(
    tmp_path: Path, name: str, said: str
) -> None:
    ended = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path / name), "--json"])
    found = by_topic([Finding(**each) for each in json.loads(ended.stdout)])
    (problem,) = (finding for finding in found.values() if finding.status == PROBLEM)
    assert (problem.topic, problem.found) == (f"disk at {tmp_path / name}", said)
    assert problem.advice and ended.exit_code == 1
    assert {"memory", "tier cpu"} <= set(found)


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
    table.write_bytes(b"27 1 254:0 / /mnt/caf\xe9 rw - ext4 /dev/vda rw\n")
    assert [os.fsencode(mount.point) for mount in mounts(table)] == [b"/mnt/caf\xe9"], "of an old network share"
    assert mounts(tmp_path / "absent") == []
    assert "/" in [mount.point for mount in mounts()], "of this system"


@pytest.mark.parametrize(
    ("path", "kind"), [("/data/kv/x", "xfs"), ("/data/kvx", "tmpfs"), ("/data", "tmpfs"), ("/srv", "ext4")]
)
def test_the_longest_mount_point_above_a_path_is_its_file_system(path: str, kind: str) -> None:
    mounted = [Mount("/", "ext4"), Mount("/data", "nfs"), Mount("/data", "tmpfs"), Mount("/data/kv", "xfs")]
    assert file_system_of(Path(path), mounted) == kind


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
    assert "tier shared_memory" not in by_topic(examine(in_memory))
    monkeypatch.setenv("TIERCACHE_SHARED_MEMORY_PATH", path.format(in_memory=in_memory))
    monkeypatch.setenv("TIERCACHE_MAX_SHARED_MEMORY_SIZE", str(size_gb))
    finding = by_topic(examine(in_memory))["tier shared_memory"]
    assert finding.status in status and finding.found.startswith(found)
    assert finding.advice or finding.status == OK


def test_it_ends_with_a_verdict_for_each_tier_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "tiercache.yaml"
    file.write_text(f"""
        max_local_cpu_size: 100000
        local_disk: {tmp_path / "kv"}
        max_local_disk_size: 0.001
        gds_path: {tmp_path / "file"}
        gds_buffer_size: 64
        weka_path: {tmp_path / "weka"}
        remote_storage_plugins: [redis, fs.a, fs.b]
        remote_storage_plugin.redis.url: redis://:hush@127.0.0.1:1
        remote_storage_plugin.fs.a.base_path: here
        remote_url: lm://host
    """)
    monkeypatch.setenv("TIERCACHE_CONFIG_FILE", str(file))
    verdicts = [finding for finding in examine(tmp_path)[-8:] if finding.topic.startswith("tier ")]
    assert [(finding.topic, finding.status) for finding in verdicts] == [
        ("tier cpu", PROBLEM), ("tier disk", OK), ("tier gds", PROBLEM), ("tier weka", PROBLEM), ("tier redis", PROBLEM),
        ("tier fs.a", PROBLEM), ("tier fs.b", PROBLEM), ("tier lm", NOTE),
    ]  # fmt: skip
    assert "is not a directory" in verdicts[2].found and "not on WekaFS" in verdicts[3].found
    assert "Connection refused" in verdicts[4].found and "works without this tier" in verdicts[4].advice
    assert not [finding for finding in verdicts if "hush" in finding.found]
    file.write_text("chunk_sise: 1")
    assert "the nearest is chunk_size" in by_topic(examine(tmp_path))["configuration"].found


def test_a_remote_tier_that_the_cache_would_refuse_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its library is imported late, and where the class or the directory is the operator's own."""
    (tmp_path / "file").touch()
    file = tmp_path / "tiercache.yaml"
    file.write_text(f"""
        remote_storage_plugins: [mooncake, infinistore, hf3fs, own, fs.a, fs.b]
        remote_storage_plugin.mooncake.url: mooncakestore://127.0.0.1:1
        remote_storage_plugin.infinistore.url: infinistore://127.0.0.1:1
        hf3fs_base_path: {tmp_path / "3fs"}
        remote_storage_plugin.own.module_path: there_is_no_such_module
        remote_storage_plugin.own.class_name: Tier
        remote_storage_plugin.fs.a.base_path: {tmp_path / "file"}
        remote_storage_plugin.fs.b.base_path: {tmp_path / "kv"}
    """)
    monkeypatch.setenv("TIERCACHE_CONFIG_FILE", str(file))
    for library in ("mooncake.store", "infinistore", "hf3fs_fuse", "hf3fs_fuse.io"):
        monkeypatch.setitem(sys.modules, library, None)
    found = by_topic(examine(tmp_path))
    for tier, says in {
        "mooncake": "tiercache[mooncake]",
        "infinistore": "tiercache[infinistore]",
        "hf3fs": "hf3fs_py_usrbio",
        "own": "there_is_no_such_module",
        "fs.a": "is not a directory",
    }.items():
        assert found[f"tier {tier}"].status == PROBLEM, found[f"tier {tier}"]
        assert says in found[f"tier {tier}"].found
    assert found["tier fs.b"].status == OK and str(tmp_path / "kv") in found["tier fs.b"].found
    ended = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path), "--json"])
    assert ended.exit_code == 1 and found.keys() == {finding["topic"] for finding in json.loads(ended.stdout)}


@pytest.mark.needs("redis-server")
def test_redis_is_asked_with_its_password_and_nothing_changes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "--requirepass", "right") as server:
        found = {}
        for password in ("right", "wrong"):
            monkeypatch.setenv("TIERCACHE_REMOTE_URL", server.url.replace("//", f"//:{password}@"))
            found[password] = by_topic(examine(tmp_path))["tier redis"]
        with server.client(password="right") as client:
            assert client.dbsize() == 0
    assert found["right"] == Finding("tier redis", OK, f"redis://***@127.0.0.1:{server.port}: the server answers")
    assert found["wrong"].status == PROBLEM and "does not accept it" in found["wrong"].found
    assert found["wrong"].advice == "correct it: the cache does not start"


@pytest.mark.needs("/dev/fuse", "mount")
def test_a_mount_that_hangs_is_a_problem_of_its_tier_and_not_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.commands.doctor._ANSWER_S", 0.5)
    monkeypatch.setenv("TIERCACHE_LOCAL_DISK", str(tmp_path / "hung" / "kv"))
    monkeypatch.setenv("TIERCACHE_MAX_LOCAL_DISK_SIZE", "0.001")
    monkeypatch.setenv("TIERCACHE_REMOTE_URL", f"fs://host:1{tmp_path / 'kv'}")
    (tmp_path / "hung").mkdir()
    with hung_mount(tmp_path / "hung"):
        said = CliRunner().invoke(app, ["doctor", "--json", "--path", str(tmp_path / "hung")]).stdout
    found = by_topic([Finding(**each) for each in json.loads(said)])
    assert found[f"disk at {tmp_path / 'hung'}"].status == found["tier disk"].status == PROBLEM
    assert "no answer within 0.5 s" in found["tier disk"].found
    assert found["tier fs"].status == OK


@contextmanager
def hung_mount(place: Path) -> Iterator[None]:
    """A FUSE mount whose daemon never answers. The calls that wait fail when it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/dev/fuse", "r+b", buffering=0) as daemon:
        options = f"fd={daemon.fileno()},rootmode=40000,user_id=0,group_id=0"
        if libc.mount(b"hung", bytes(place), b"fuse.hung", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")
        try:
            yield
        finally:
            libc.umount2(bytes(place), 2)  # MNT_DETACH
