"""A mount that can be made to hang and to die: a directory seen through FUSE, served by a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.servers.processes import stop_process

_MOUNTED_S = 20.0

SERVER = """
import errno, os, sys
import mfusepy

ROOT = sys.argv[1]
FLIP = ROOT + ".flip"
FULL = ROOT + ".full"
UNREADABLE = ROOT + ".unreadable"
STATUS = "atime ctime mtime gid uid mode nlink size blocks ino".split()
SPACE = "bavail bfree blocks bsize favail ffree files flag frsize namemax".split()

class Loopback(mfusepy.Operations):
    use_ns = False

    def getattr(self, path, fh=None):
        status = os.lstat(ROOT + path)
        return {f"st_{name}": getattr(status, f"st_{name}") for name in STATUS}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(ROOT + path)]

    def statfs(self, path):
        found = os.statvfs(ROOT + path)
        return {f"f_{name}": getattr(found, f"f_{name}") for name in SPACE}

    def create(self, path, mode, fi=None):
        return os.open(ROOT + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path, flags):
        return os.open(ROOT + path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_DIRECT))

    def read(self, path, size, offset, fh):
        if os.path.exists(UNREADABLE) and any(map(path.endswith, open(UNREADABLE).read().split(","))):
            raise mfusepy.FuseOSError(errno.EIO)
        data = os.pread(fh, size, offset)
        if len(data) > 4096 and os.path.exists(FLIP):
            os.unlink(FLIP)
            data = data[:4096] + bytes([data[4096] ^ 1]) + data[4097:]
        return data

    def write(self, path, data, offset, fh):
        if os.path.exists(FULL):
            raise mfusepy.FuseOSError(errno.ENOSPC)
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(ROOT + path, length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)

    def rename(self, old, new):
        os.rename(ROOT + old, ROOT + new)

    def link(self, target, source):
        os.link(ROOT + source, ROOT + target)

    def mkdir(self, path, mode):
        os.mkdir(ROOT + path, mode)

    def rmdir(self, path):
        os.rmdir(ROOT + path)

    def unlink(self, path):
        os.unlink(ROOT + path)

mfusepy.FUSE(Loopback(), sys.argv[2], foreground=True, nothreads=False)
"""


class FragileMount:
    """`with FragileMount(place) as mount`: what is in `mount.path` lies in `mount.behind`."""

    def __init__(self, place: Path) -> None:
        self.path, self.behind = place / "mount", place / "behind"
        for directory in (self.path, self.behind):
            directory.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FragileMount:
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._unmount()

    def hang(self) -> None:
        """From here on nothing is answered: all threads of the server stand still."""
        assert self._process is not None
        stop_process(self._process.pid)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def flip_next(self) -> None:
        """A bit of the next large read flips on its way."""
        self.behind.with_name(f"{self.behind.name}.flip").touch()

    def make_unreadable(self, *ends: str) -> None:
        """From here on only files of which the path ends so cannot be read."""
        place = self.behind.with_name(f"{self.behind.name}.unreadable")
        place.write_text(",".join(ends)) if ends else place.unlink()

    def fill(self) -> None:
        """From here on nothing can be written."""
        self.behind.with_name(f"{self.behind.name}.full").touch()

    def make_room(self) -> None:
        self.behind.with_name(f"{self.behind.name}.full").unlink()

    def die(self) -> None:
        """From here on everything fails (ENOTCONN), also what was waiting."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def revive(self) -> None:
        """As when a server is back and its share is mounted again."""
        self._unmount()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, str(self.behind), str(self.path)]
        )
        until_s = time.monotonic() + _MOUNTED_S
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("the mount did not come up")
            time.sleep(0.01)
        os.listdir(self.path)  # answered: a process that is stopped before it has greeted the kernel is another matter

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
