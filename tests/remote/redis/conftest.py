"""Servers that tests share, and tiers on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.redis.servers import Cluster, Server, free_port, make_certificates, running, tls_options
from tiercache.config.remote_options import options_of
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.redis import RedisTier

CHUNK_BYTES = 64 * 1024
FINGERPRINT = bytes(range(16))


def make_tier(
    url: str, *, timeout_s: float = 5.0, concurrency: int = 4, name: str = "redis", **options: Any
) -> RedisTier:
    """As the assembly makes it."""
    values = {option.name: option.default for option in options_of("redis").values()}
    unknown = set(options) - set(values)
    assert not unknown, unknown
    return RedisTier(
        RemoteSettings(
            name=name,
            type="redis",
            fingerprint=FINGERPRINT,
            chunk_bytes=options.pop("chunk_bytes", CHUNK_BYTES),
            url=url,
            options=values | options,
            timeout_s=timeout_s,
            concurrency=concurrency,
        )
    )


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


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="package")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Server]:
    port = free_port()
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
