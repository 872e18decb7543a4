"""A cache with a control socket, over a real disk tier."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=4096)
RANKS = [replace(LAYOUT, rank=rank, world_size=2) for rank in (0, 1)]
CHUNKS = 12
TOKENS = list(range(16 * CHUNKS))
TOKEN = "correct-horse-battery-staple-42"


def config_of(place: Path, **more: Any) -> Config:
    return Config(
        max_local_cpu_size=0.002,
        local_disk=(str(place / "kv"),),
        max_local_disk_size=0.1,
        control_socket=str(place / "c.sock"),
        **more,
    )


def token_file(tmp_path: Path, mode: int = 0o600) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(mode)
    return file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "c.sock"


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[TierCache]:
    """Twelve chunks on disk and none hot."""
    async with TierCache.open(config_of(tmp_path), LAYOUT) as cache:
        await cache.store(TOKENS, [np.full(LAYOUT.chunk_bytes, number, np.uint8) for number in range(CHUNKS)])
        await cache.flush()
        cache.clear_hot()
        yield cache
