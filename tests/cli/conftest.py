"""A directory of the disk tier with six chunks, and the command line as a user runs it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.chunks import chunks_of
from tiercache import Config, Layout, TierCache

LAYOUT = Layout("cli", chunk_tokens=64, bytes_per_token=1024)


def tiercache(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiercache", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


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
