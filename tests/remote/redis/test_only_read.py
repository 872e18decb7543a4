"""`role: read`: whatever this process finds, the server keeps it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tests.remote.redis.servers import Server
from tiercache import Config, Layout, TierCache
from tiercache.core.header import PACKED_BYTES
from tiercache.testing import chunk

pytestmark = pytest.mark.needs("redis-server")

LAYOUT = Layout("m", chunk_tokens=64, bytes_per_token=4096)
CHUNKS = [chunk(number, LAYOUT.chunk_bytes) for number in range(1, 6)]
KEYS = [key for key, _ in CHUNKS]


def configured(port: int, role: str) -> Config:
    prefix = "remote_storage_plugin.redis."
    values = {
        "chunk_size": 64,
        "max_local_cpu_size": 0.02,
        "remote_storage_plugins": ["redis"],
        f"{prefix}url": f"redis://127.0.0.1:{port}",
        f"{prefix}role": role,
    }
    return Config.load(environ={}, overrides=values)


def contents(client: Any) -> dict[bytes, str]:
    return {name: hashlib.sha256(client.dump(name)).hexdigest() for name in client.keys("*")}


@pytest.mark.parametrize("harm", ["none", "bit of the header", "bit of the payload", "cut"])
async def test_a_reader_leaves_the_server_as_it_is(server: Server, harm: str) -> None:
    async with TierCache.open(configured(server.port, "both"), LAYOUT) as cache:
        assert await cache.put_many(KEYS[:4], [payload for _, payload in CHUNKS[:4]]) == 4
        assert (await cache.flush()).complete
    with server.client() as client:
        (name,) = client.keys(f"*:{KEYS[0].hex()}")
        value = client.get(name)
        if harm == "cut":
            client.set(name, value[:1000])
        elif harm != "none":
            at = 40 if harm == "bit of the header" else PACKED_BYTES + 1
            client.setrange(name, at, bytes([value[at] ^ 0x80]))
        before = contents(client)
        async with TierCache.open(configured(server.port, "read"), LAYOUT) as cache:
            buffers = [np.empty(LAYOUT.chunk_bytes, np.uint8) for _ in KEYS]
            assert await cache.get_into(KEYS[1:4], buffers[1:4]) == 3
            assert await cache.get_into(KEYS[:1], buffers[:1]) == (harm == "none")
            assert await cache.put(*CHUNKS[4])
            await cache.forget(KEYS)
            assert (await cache.flush()).complete
        assert contents(client) == before
