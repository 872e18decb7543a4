"""Clusters: names in their slots, slots that move, masters that die."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.remote.redis.servers import Cluster, Server, redis, until
from tests.remote.redis.tiers import make_tier, opened, value_name
from tests.remote.waiting import eventually
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.redis import RedisTier

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 40_000


@pytest.fixture
async def tier(cluster: Cluster) -> AsyncIterator[RedisTier]:
    async with opened(f"redis-cluster://127.0.0.1:{cluster.nodes[0].port}") as tier:
        yield tier


def slot(number: int) -> int:
    return redis.crc.key_slot(value_name(chunk(number)[0]))


@pytest.mark.parametrize("moved", ["nothing yet", "the names", "all"])
async def test_a_slot_that_is_moving_or_has_moved_is_followed(tier: RedisTier, cluster: Cluster, moved: str) -> None:
    key, payload = chunk(1, LENGTH)
    await tier.write(key, payload, LENGTH)
    with moving(cluster, slot(1)) as (source, target):
        if moved != "nothing yet":
            move_names(source, target, slot(1))
        if moved == "all":
            move_ends(cluster, slot(1), target)
        into = page_aligned(LENGTH)
        assert await tier.read(key, into) == LENGTH and np.array_equal(into[:LENGTH], payload[:LENGTH])
        tier.known.clear()
        assert await tier.probe([key]) == 1
        assert await tier.remove(key)
        assert [names(node) for node in (source, target)] == [0, 0]
        assert await tier.read(key, into) is None
        assert await tier.write(key, payload, LENGTH)
        assert [names(node) for node in (source, target)] == [0, 1], "new names belong to the new owner"
        into[:] = 0
        assert await tier.read(key, into) == LENGTH and np.array_equal(into[:LENGTH], payload[:LENGTH])


async def test_the_death_of_a_master_costs_its_chunks_until_its_replica_is_promoted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, replicas=3)
    tier = make_tier(f"redis-cluster://127.0.0.1:{cluster.nodes[0].port}", timeout_s=2.0)
    try:
        cluster.start()
        await tier.open()
        chunks = [chunk(number, LENGTH) for number in range(1, 13)]
        for key, payload in chunks:
            assert await tier.write(key, payload, LENGTH)
        for node in cluster.nodes[:3]:
            with node.client() as client:
                client.wait(1, 5000)
        cluster.nodes[0].kill()
        gone = [key for key, _ in chunks if redis.crc.key_slot(value_name(key)) <= 5460]
        there = [key for key, _ in chunks if key not in gone]
        assert gone and there
        into = page_aligned(LENGTH)
        with pytest.raises(TierUnavailable):
            await tier.read(gone[0], into)
        assert await tier.read(there[0], into) == LENGTH
        tier.known.clear()
        await tier.probe([*there, *gone])
        assert all(tier.contains(key) for key in there), "one dead node costs no other's chunks"
        for key, payload in chunks:
            assert await eventually(lambda key=key: tier.read(key, into)) == LENGTH
            assert np.array_equal(into[:LENGTH], payload[:LENGTH])
        assert await eventually(lambda: tier.remove(gone[0]))
        assert await eventually(lambda: tier.write(gone[0], chunks[0][1], LENGTH))
    finally:
        await tier.close()
        cluster.kill()


async def test_mistaken_modes_are_said(cluster: Cluster, server: Server) -> None:
    with pytest.raises(ConfigError, match="mode: .*part of a cluster"):
        await make_tier(f"redis://127.0.0.1:{cluster.nodes[0].port}").open()
    with pytest.raises(ConfigError, match="mode: .*not part of a cluster"):
        await make_tier(f"redis-cluster://127.0.0.1:{server.port}").open()
    async with opened(f"redis://127.0.0.1:{cluster.nodes[2].port}", mode="cluster") as tier:
        await asyncio.gather(*(tier.write(*chunk(number), 1000) for number in range(1, 9)))


def names(node: Server) -> int:
    with node.client() as client:
        return int(client.dbsize())


@contextmanager
def moving(cluster: Cluster, number: int) -> Iterator[tuple[Server, Server]]:
    """Begin to move a slot, yield its source and its target, and move it back at the end."""
    source = cluster.owner_of(number)
    target = cluster.nodes[(cluster.nodes.index(source) + 1) % 3]
    move_begins(cluster, number, source, target)
    try:
        yield source, target
    finally:
        move_names(source, target, number)
        move_ends(cluster, number, target)
        move_begins(cluster, number, target, source)
        move_names(target, source, number)
        move_ends(cluster, number, source)
        for node in cluster.nodes:
            until(lambda node=node: owner(node, number) == source.port)


def move_begins(cluster: Cluster, number: int, source: Server, target: Server) -> None:
    with source.client() as at_source, target.client() as at_target:
        at_target.execute_command("CLUSTER SETSLOT", number, "IMPORTING", cluster.id_of(source))
        at_source.execute_command("CLUSTER SETSLOT", number, "MIGRATING", cluster.id_of(target))


def move_names(source: Server, target: Server, number: int) -> None:
    with source.client() as client:
        found: list[Any] = client.execute_command("CLUSTER GETKEYSINSLOT", number, 1000)
        if found:
            client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *found)


def move_ends(cluster: Cluster, number: int, target: Server) -> None:
    for node in [target, *cluster.nodes]:
        with node.client() as client:
            client.execute_command("CLUSTER SETSLOT", number, "NODE", cluster.id_of(target))


def owner(node: Server, number: int) -> int:
    with node.client() as client:
        for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
            if first <= number <= last:
                return int(port)
    return 0
