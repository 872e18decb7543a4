"""Servers that tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.remote.redis.servers import Cluster, Server
    from tiercache.tiers.remote.redis import RedisTier


@pytest.fixture(scope="package")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.remote.redis.servers import running

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
    from tests.remote.redis.tiers import opened

    async with opened(f"redis://127.0.0.1:{server.port}") as tier:
        yield tier


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.remote.redis.servers import make_certificates

    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="package")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Server]:
    from tests.remote.redis.servers import running, tls_options
    from tests.servers.ports import hold_port

    port = hold_port()
    with running(tmp_path_factory.mktemp("tls"), *tls_options(port, certificates), port=port) as server:
        yield server


@pytest.fixture(scope="package")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from tests.remote.redis.servers import Cluster

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
