"""The table of slots that a server of a cluster sends."""

from __future__ import annotations

from typing import Any

import pytest

from tiercache.tiers.remote.redis.address import Endpoint, RedisAddress
from tiercache.tiers.remote.redis.failures import BrokenConnection
from tiercache.tiers.remote.redis.topology import Cluster

ADDRESS = RedisAddress("cluster", (Endpoint("127.0.0.1", 7000),))


class Answering:
    """Stands for the connections: each server answers with these ranges."""

    def __init__(self, ranges: list[Any]) -> None:
        self.ranges = ranges

    def ask(self, endpoint: Endpoint, *command: str) -> list[Any]:
        return self.ranges


@pytest.mark.parametrize(("first", "last"), [(0, 10**9), (-1, 5), (9, 3), (16384, 16384)])
def test_slots_that_no_cluster_has_are_refused(first: int, last: int) -> None:
    """Before, a range of a thousand million slots was a list of as many."""
    cluster = Cluster(Answering([[first, last, [b"127.0.0.1", 7000, b"id"]]]), ADDRESS)  # type: ignore[arg-type]
    with pytest.raises(BrokenConnection, match="CLUSTER SLOTS"):
        cluster.endpoint_of(b"name")


def test_slots_of_a_cluster_are_taken() -> None:
    cluster = Cluster(Answering([[0, 16383, [b"127.0.0.1", 7001, b"id"]]]), ADDRESS)  # type: ignore[arg-type]
    assert cluster.endpoint_of(b"name") == Endpoint("127.0.0.1", 7001)
