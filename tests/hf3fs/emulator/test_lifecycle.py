"""Starting, stopping, dying: of the daemon, and of its clients."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf3fs.emulator.client import PATIENCE_S
from tests.hf3fs_emulator import Hf3fsEmulator
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


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
def test_daemon_goes_with_its_owner(kind: str, emulator: Hf3fsEmulator, stopped: bool) -> None:
    """A stopped daemon does not see the end of its stdin, and a mount without a daemon hangs every process that uses it."""
    with start(OWNER, kind, emulator) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        daemon = os.pidfd_open(int(pid))
        try:
            if stopped:
                stop_process(int(pid))
            owner.kill()
            assert select.select([daemon], [], [], PATIENCE_S)[0], "it ends"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            os.close(daemon)
    if stopped and kind == "fuse":
        subprocess.run(["fusermount3", "-u", "-z", f"{directory}/mount"], check=False, capture_output=True)
    assert directory not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(directory)
