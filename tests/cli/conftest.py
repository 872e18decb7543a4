"""A directory of the disk tier with six chunks, and the command line as a user runs it."""

import contextlib
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import chunks_of
from tiercache import Config, Layout, TierCache

LAYOUT = Layout("cli", chunk_tokens=64, bytes_per_token=1024)
COLUMNS = 80
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def tiercache(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiercache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def in_terminal(*arguments: object, errors: bool = False) -> list[str]:
    """The lines that a terminal of 80 columns gets of a command's output, or of its errors, without colours."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tiercache", *map(str, arguments)],
        stdin=theirs,
        stdout=subprocess.DEVNULL if errors else theirs,
        stderr=theirs if errors else subprocess.DEVNULL,
        env=environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    raw = bytearray()
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while part := os.read(ours, 65536):
            raw += part
    os.close(ours)
    process.wait(60)
    return _ESCAPE.sub("", raw.decode()).replace("\r\n", "\n").splitlines()


def config_for(directory: Path) -> Config:
    values = {"max_local_cpu_size": 0.01, "local_disk": str(directory), "max_local_disk_size": 0.1}
    return Config.load(environ={}, overrides=values)


def chunk_paths(directory: Path) -> list[Path]:
    return sorted(chunks_of(directory).glob("??/*"))


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    async with TierCache.open(config_for(tmp_path / "kv"), LAYOUT) as cache:
        for number in range(6):
            await cache.put(number.to_bytes(24, "big"), np.full(LAYOUT.chunk_bytes, number, np.uint8))
    return tmp_path / "kv"
