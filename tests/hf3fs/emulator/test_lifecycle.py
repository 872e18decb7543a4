"""The emulator's daemon ends with its owner."""

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
from tests.servers.processes import stop_process

OWNER = """
import sys
from tests.hf3fs_emulator import Hf3fsEmulator
emulator = Hf3fsEmulator(fuse=sys.argv[1] == "fuse")
emulator.start()
print(emulator.pid, emulator.directory, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
def test_daemon_goes_with_its_owner(kind: str, stopped: bool) -> None:
    """A stopped daemon does not see the end of its stdin, and a mount without a daemon hangs every process that uses it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
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
