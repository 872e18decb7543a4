"""The Redis tier in a cache, from a configuration."""

from __future__ import annotations

import pytest

from tests.remote.in_the_cache import chunks_come_back, works_without_its_server
from tests.remote.redis.servers import Server
from tiercache import Config

pytestmark = pytest.mark.needs("redis-server")


def configured(port: int) -> Config:
    values = {"chunk_size": 16, "max_local_cpu_size": 0.004, "remote_url": f"redis://127.0.0.1:{port}"}
    return Config.load(environ={}, overrides=values)


async def test_chunks_come_back_in_another_cache(server: Server) -> None:
    await chunks_come_back(configured(server.port))


async def test_a_cache_starts_and_works_without_its_server() -> None:
    await works_without_its_server(configured(1))
