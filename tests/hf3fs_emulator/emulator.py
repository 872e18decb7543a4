"""Starts and stops a daemon for a test, and cleans up after one that was killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import tiercache
from tests.hf3fs_emulator.control import Control
from tests.hf3fs_emulator.daemon.run import Settings
from tests.hf3fs_emulator.install import SITE
from tests.hf3fs_emulator.wire import SHARED_MEMORY
from tests.servers.processes import stop_process

_START_S = 30.0
_STOP_S = 10.0


def why_no_fuse() -> str | None:
    """What a FUSE mount lacks on this machine; None when it lacks nothing."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is missing (Debian: apt-get install fuse3)"
    return None


class Hf3fsEmulator:
    """A 3FS mount of one's own, in its own process, as a context manager.

    ```python
    with Hf3fsEmulator() as emulator:
        emulator.mount          # a pathlib.Path, the mount point
        emulator.control        # faults
        emulator.kill(); emulator.restart()
    ```

    `directory` holds the mount point, the files and the daemon's log; without one it is temporary. Client processes need
    `environment`. The files outlive a restart.
    Sources of 3FS differ in whether a daemon takes rings of `io_depth < 0`: with `negative_io_depth=False` they are EINVAL.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        negative_io_depth: bool = True,
    ) -> None:
        self._given_directory = directory
        self.negative_io_depth = negative_io_depth
        self._daemon: subprocess.Popen[bytes] | None = None
        self._control: Control | None = None
        self._semaphores: list[str] = []

    def __enter__(self) -> Hf3fsEmulator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def control(self) -> Control:
        assert self._control is not None, "the daemon does not run"
        return self._control

    @property
    def pid(self) -> int:
        assert self._daemon is not None, "the daemon does not run"
        return self._daemon.pid

    @property
    def environment(self) -> dict[str, str]:
        """What a client process needs in its environment: where the modules are."""
        paths = [str(SITE), str(Path(tiercache.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def start(self) -> None:
        """Returns once clients can come. Raises RuntimeError, with what the daemon said, when it does not get so far."""
        if self._given_directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix=f"hf3fs-{os.getpid()}-")
            self.directory = Path(self._temporary.name).resolve()
        else:
            self.directory = self._given_directory.resolve()
        self.mount = self.directory / "mount"
        self.backing = self.directory / "files"
        self._log = self.directory / "daemon.log"
        self._launch()

    def stop(self) -> None:
        """Also after `kill`, and twice. Nothing stays behind but, in a given directory, the files."""
        if self._daemon is not None:
            self.resume()
            self._daemon.terminate()
            try:
                self._daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
            self._clean_up()
        if self._given_directory is None and hasattr(self, "_temporary"):
            self._temporary.cleanup()

    def kill(self) -> None:
        """kill -9. The mount is left as such a death leaves it: every call on it fails with ENOTCONN."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    def restart(self) -> None:
        """Clear away what the daemon left, and start another on the same files. Clients must register anew."""
        if self._daemon is not None:
            self._daemon.kill()
            self._clean_up()
        self._launch()

    def pause(self) -> None:
        """Stop the whole daemon (SIGSTOP): rings do not move, and every system call on the mount hangs."""
        stop_process(self.pid)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _launch(self) -> None:
        for directory in (self.mount, self.backing):
            directory.mkdir(parents=True, exist_ok=True)
        socket = self.directory / "control.sock"
        ready, ready_there = os.pipe()
        settings = Settings(
            str(self.mount), str(self.backing), str(socket), self.negative_io_depth, ready_descriptor=ready_there
        )
        command = [sys.executable, "-m", "tests.hf3fs_emulator", json.dumps(asdict(settings))]
        try:
            with self._log.open("ab") as log:
                # The daemon goes when we do, however we go: its stdin ends.
                self._daemon = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[ready_there],
                    env={**os.environ, **self.environment},
                    start_new_session=True,  # a Ctrl-C is ours to handle
                )
        finally:
            os.close(ready_there)
        with os.fdopen(ready, "rb") as answers:
            in_time = select.select([answers], [], [], _START_S)[0]
            line = answers.readline() if in_time else b""
        if not line:
            self._daemon.kill()
            self._clean_up()
            said = self._log.read_text().strip()
            raise RuntimeError(f"the emulator's daemon did not start; it said: {said or 'nothing'}")
        self._semaphores = json.loads(line)["semaphores"]
        self._control = Control(socket)

    def _clean_up(self) -> None:
        assert self._daemon is not None
        self._daemon.wait()
        if self._daemon.stdin is not None:
            self._daemon.stdin.close()
        self._daemon = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if _is_mounted(self.mount):
            subprocess.run(["fusermount3", "-u", "-z", str(self.mount)], check=True, timeout=_STOP_S)
        for name in self._semaphores:
            Path(SHARED_MEMORY, f"sem.{name}").unlink(missing_ok=True)
        self._semaphores = []
        (self.directory / "control.sock").unlink(missing_ok=True)


def _is_mounted(place: Path) -> bool:
    escaped = str(place).replace(" ", "\\040")
    return any(line.split(" ")[4] == escaped for line in Path("/proc/self/mountinfo").read_text().splitlines())
