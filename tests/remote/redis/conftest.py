"""Servers that tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.remote.redis.servers import Cluster, Server, running, tls_options
from tests.remote.redis.tiers import opened
from tests.servers.certificates import make_certificates
from tests.servers.ports import hold_port
from tiercache.tiers.remote.redis import RedisTier


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """Empty, and with the configuration that it started with."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
async def tier(server: Server) -> AsyncIterator[RedisTier]:
    async with opened(server.url) as tier:
        yield tier


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="package")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Server]:
    port = hold_port()
    with running(tmp_path_factory.mktemp("tls"), *tls_options(port, certificates), port=port) as server:
        yield server


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.kill()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    for node in shared_cluster.nodes:
        with node.client() as client:
            client.flushall()
    return shared_cluster
