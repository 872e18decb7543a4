"""The contract of tiers, on every kind of server, the one of compressed chunks, and the tier in a cache."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.compression.contract import CompressionContract
from tests.remote.in_the_cache import chunks_come_back, works_without_its_server
from tests.remote.redis.servers import Cluster, Server
from tests.remote.redis.tiers import make_tier, opened, value_name
from tiercache import Config
from tiercache.core.keys import ChunkKey
from tiercache.testing import TierContract, chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier

pytestmark = pytest.mark.needs("redis-server")


class RedisContract(TierContract):
    server: Server
    client: ClassVar[dict[str, Any]] = {}

    def options(self) -> dict[str, object]:
        return {}

    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server.port}"

    async def make_tier(self, place: Path) -> Tier:
        return make_tier(self.url(), **self.options())

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        with self.server.client(**self.client) as client:
            assert client.setrange(value_name(key), 88 + 17, b"damaged!") > 100
        return True


async def test_a_chunk_comes_back_over_a_socket_and_from_another_database(server: Server) -> None:
    key, payload = chunk(1)
    for url, database in ((f"unix://{server.socket_path}", 0), (f"valkey://127.0.0.1:{server.port}/3", 3)):
        async with opened(url) as tier:
            assert await tier.write(key, payload, CHUNK_BYTES)
            assert await tier.read(key, page_aligned(CHUNK_BYTES)) == CHUNK_BYTES
        with server.client(db=database) as client:
            assert client.exists(value_name(key))


class TestStandalone(RedisContract):
    @pytest.fixture(autouse=True)
    def use(self, server: Server) -> None:
        self.server = server


@pytest.mark.needs("openssl")
class TestTls(RedisContract):
    client: ClassVar[dict[str, Any]] = {"ssl": True, "ssl_cert_reqs": "none"}

    @pytest.fixture(autouse=True)
    def use(self, tls_server: Server, certificates: Path) -> None:
        self.server, self.certificates = tls_server, certificates
        with tls_server.client(**self.client) as client:
            client.flushall()

    def url(self) -> str:
        return f"rediss://localhost:{self.server.port}"

    def options(self) -> dict[str, object]:
        return {"tls_ca_file": str(self.certificates / "ca.pem")}


class TestCluster(RedisContract):
    @pytest.fixture(autouse=True)
    def use(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def url(self) -> str:
        return f"redis-cluster://127.0.0.1:{self.cluster.nodes[1].port}"

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        for node in self.cluster.nodes:
            with node.client() as client:
                for name in client.keys(f"*{key.hex()}*"):
                    client.setrange(name, client.strlen(name) - 8, b"damaged!")
        return True


class TestCompressed(CompressionContract):
    @pytest.fixture(autouse=True)
    def use(self, server: Server) -> None:
        self.server = server

    async def make_tier(self, place: Path, compression: str) -> Tier:
        return make_tier(self.server.url, compression=compression, item_bytes=2)

    async def damage(self, tier: Tier, key: bytes) -> None:
        with self.server.client() as client:
            client.setrange(value_name(key), 20_000, b"damaged!")


def configured(port: int) -> Config:
    values = {"chunk_size": 16, "max_local_cpu_size": 0.004, "remote_url": f"redis://127.0.0.1:{port}"}
    return Config.load(environ={}, overrides=values)


async def test_chunks_come_back_in_another_cache(server: Server) -> None:
    await chunks_come_back(configured(server.port))


async def test_a_cache_starts_and_works_without_its_server() -> None:
    await works_without_its_server(configured(1))
