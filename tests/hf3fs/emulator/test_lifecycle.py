"""Starting, stopping, dying: of the daemon, and of its clients."""

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hf3fs_fuse.io import extract_mount_point

from tests.hf3fs.emulator.client import PATIENCE_S, Client, fails, run
from tests.hf3fs_emulator import SITE, Hf3fsEmulator, install
from tests.needs import needs_fuse
from tests.servers.processes import stop_process

CLIENT = """
import os, sys
from multiprocessing import resource_tracker, shared_memory
from hf3fs_fuse.io import make_iovec, make_ioring, register_fd
shm = shared_memory.SharedMemory(sys.argv[2], create=True, size=4096)
resource_tracker.unregister(shm._name, "shared_memory")  # the test looks after it
mount = sys.argv[1]
iov, ring = make_iovec(shm, mount), make_ioring(mount, 4)
descriptor = os.open(f"{mount}/file", os.O_RDONLY)
register_fd(descriptor)
ring.prepare(iov[:1], True, descriptor, 0)
assert ring.submit().wait(min_results=1, timeout=20.0)[0].result == 1
print("ready", flush=True)
sys.stdin.readline()
ring.prepare(iov[:1], True, descriptor, 0)
ring.submit().wait(min_results=1)
"""

CLIENT_MEMORY = f"test-3fs-client-{os.getpid()}"

OWNER = """
import sys
from tests.hf3fs_emulator import Hf3fsEmulator
emulator = Hf3fsEmulator(fuse=sys.argv[1] == "fuse")
emulator.start()
print(emulator.pid, emulator.directory, flush=True)
sys.stdin.read()
"""


def start(code: str, argument: str, emulator: Hf3fsEmulator) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, argument, CLIENT_MEMORY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **emulator.environment},
    )


def test_files_survive_a_restart(mortal_client: Client, mortal: Hf3fsEmulator) -> None:
    mortal_client.file("file", b"kept")
    mortal.restart()
    mortal_client.recover()
    assert (mortal_client.mount / "file").read_bytes() == b"kept"
    assert run(mortal_client.ring(), mortal_client.iov[:4], True, mortal_client.open("file", os.O_RDONLY)) == 4


@needs_fuse
@pytest.mark.parametrize("kind", ["fuse"], indirect=True)
def test_mount_of_a_killed_daemon_is_dead(mortal_client: Client, mortal: Hf3fsEmulator) -> None:
    descriptor = mortal_client.open("file", os.O_RDONLY, b"x")
    mortal.kill()
    for call in (lambda: os.stat(mortal_client.mount), lambda: os.pread(descriptor, 1, 0)):
        with fails(errno.ENOTCONN):
            call()
    mortal.restart()
    mortal_client.recover()


def test_ring_of_a_killed_daemon_stays_dead(mortal_client: Client, mortal: Hf3fsEmulator) -> None:
    descriptor, ring = mortal_client.open("file", os.O_RDONLY, b"x"), mortal_client.ring()
    mortal.restart()
    ring.prepare(mortal_client.iov[:1], True, descriptor, 0).submit()
    assert ring.wait(min_results=1, timeout=0.05) == []
    mortal_client.recover()


def test_rule_9_waiting_without_a_timeout_is_for_ever_when_the_daemon_dies(mortal: Hf3fsEmulator) -> None:
    (mortal.mount / "file").write_bytes(b"x")
    with start(CLIENT, str(mortal.mount), mortal) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        mortal.control.hang()
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
        mortal.control.until_hanging(1)
        mortal.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()
    Path("/dev/shm", CLIENT_MEMORY).unlink()


def test_stopped_daemon_goes_with_its_owner(kind: str) -> None:
    """Though it does not see the end of its stdin: a mount that nobody serves hangs whoever comes by."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        daemon = os.pidfd_open(int(pid))
        try:
            stop_process(int(pid))
            owner.kill()
            owner.wait()
            assert select.select([daemon], [], [], PATIENCE_S)[0], "it ends"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            os.close(daemon)
        if kind == "fuse":
            subprocess.run(["fusermount3", "-u", "-z", f"{directory}/mount"], check=False, capture_output=True)
        shutil.rmtree(directory)


def test_stopping_after_a_kill_leaves_nothing(kind: str) -> None:
    emulator = Hf3fsEmulator(fuse=kind == "fuse")
    emulator.start()
    emulator.kill()
    emulator.stop()
    emulator.stop()
    assert not emulator.directory.exists()


def test_stopping_does_not_wait_for_open_files(kind: str) -> None:
    with Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        (emulator.mount / "file").touch()
        descriptor = os.open(emulator.mount / "file", os.O_RDONLY)
    assert not emulator.directory.exists()
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["directory"], indirect=True)
def test_daemon_by_hand(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hf3fs_emulator", "--mount", str(tmp_path / "mount")]
    with subprocess.Popen([*command, "--no-fuse"], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == f"serving {tmp_path}/mount\n"
        assert extract_mount_point(str(tmp_path / "mount")) == str(tmp_path / "mount")
        daemon.send_signal(signal.SIGINT)
    assert daemon.returncode == 0
    refused = subprocess.run([*command, "--no-fuse", "--backing", str(tmp_path)], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--no-fuse" in refused.stderr


def test_exception_leaves_nothing(kind: str) -> None:
    with pytest.raises(ZeroDivisionError), Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        raise ZeroDivisionError
    assert not emulator.directory.exists()


def test_given_directory_keeps_its_files(kind: str, tmp_path: Path) -> None:
    for _ in range(2):
        with Hf3fsEmulator(tmp_path, fuse=kind == "fuse") as emulator:
            (emulator.mount / "file").touch()
    assert (emulator.backing / "file").exists()


def test_daemon_that_cannot_start_says_why(kind: str, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "3fs-virt").touch()
    (tmp_path / "files").touch()
    with pytest.raises(RuntimeError, match="Error"):
        Hf3fsEmulator(tmp_path, fuse=kind == "fuse").start()


def test_paused_daemon_does_nothing_until_it_is_resumed(client: Client, emulator: Hf3fsEmulator) -> None:
    descriptor, ring = client.open("file", os.O_RDONLY, b"x"), client.ring()
    emulator.pause()
    ring.prepare(client.iov[:1], True, descriptor, 0).submit()
    assert ring.wait(min_results=1, timeout=0.05) == []
    emulator.resume()
    assert len(ring.wait(min_results=1, timeout=PATIENCE_S)) == 1


def test_paused_daemon_can_be_stopped(kind: str) -> None:
    with Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        emulator.pause()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_client_registered_goes_with_it(client: Client, emulator: Hf3fsEmulator, death: signal.Signals) -> None:
    client.file("file", b"x")
    with start(CLIENT, str(emulator.mount), emulator) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert (emulator.control.statistics().buffers, emulator.control.statistics().rings) == (2, 1)
        process.send_signal(death)
    Path("/dev/shm", CLIENT_MEMORY).unlink()
    emulator.control.until_registered(buffers=1, rings=0)
    emulator.control.until_open_files(0)


def test_daemon_goes_with_its_owner(kind: str, emulator: Hf3fsEmulator) -> None:
    with start(OWNER, kind, emulator) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        daemon = os.pidfd_open(int(pid))
        process.kill()
    assert select.select([daemon], [], [], PATIENCE_S)[0]
    os.close(daemon)
    assert directory not in Path("/proc/self/mountinfo").read_text()
    subprocess.run(["rm", "-r", directory], check=True)


def test_modules_are_found_in_another_process(emulator: Hf3fsEmulator) -> None:
    code = "import hf3fs_py_usrbio, hf3fs_fuse.io; print(hf3fs_py_usrbio.__file__)"
    environment = {**os.environ, **emulator.environment}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).parent == SITE


def test_other_modules_of_these_names_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert sys.path.count(str(SITE)) == 1
    monkeypatch.setitem(sys.modules, "hf3fs_py_usrbio", pytest)
    with pytest.raises(RuntimeError, match="hf3fs_py_usrbio is imported already"):
        install()
