"""A master and its replica, watched by three Sentinels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.remote.redis.servers import Server, until
from tests.remote.redis.tiers import make_tier, opened
from tests.remote.waiting import eventually
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 40_000


class Watched:
    def __init__(self, place: Path) -> None:
        self.master = Server(place / "master", "--repl-diskless-sync-delay", "0")
        self.replica = Server(
            place / "replica", "--replicaof", f"127.0.0.1 {self.master.port}", "--repl-diskless-sync-delay", "0"
        )
        self.sentinels = [Server(place / f"sentinel{number}", "--sentinel", sentinel=True) for number in range(3)]

    @property
    def url(self) -> str:
        return "redis-sentinel://" + ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels) + "/kv"

    def start(self) -> Watched:
        self.master.start().ready()
        self.replica.start().ready()
        until(lambda: self._master_says("connected_slaves") == 1)
        for sentinel in self.sentinels:
            sentinel.place.mkdir(parents=True)
            (sentinel.place / f"{sentinel.port}.conf").write_text(
                f"sentinel monitor kv 127.0.0.1 {self.master.port} 2\n"
                "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 3000\n"
            )
            sentinel.start().ready()
        for sentinel in self.sentinels:
            until(lambda sentinel=sentinel: self._sees_all(sentinel))
        return self

    def kill(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.kill()

    def _master_says(self, field: str) -> object:
        with self.master.client() as client:
            return client.info("replication")[field]

    def _sees_all(self, sentinel: Server) -> bool:
        with sentinel.client() as client:
            seen = client.sentinel_master("kv")
            return bool(seen["num-other-sentinels"] == 2 and seen["num-slaves"] == 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("sentinel"))
    try:
        yield watched.start()
    finally:
        watched.kill()


@pytest.fixture
def watched(shared: Watched) -> Watched:
    with shared.master.client() as client:
        client.flushall()
    return shared


async def test_a_service_that_nobody_knows_does_not_stop_the_start(watched: Watched) -> None:
    async with opened(watched.url.replace("/kv", "/other")) as tier:
        with pytest.raises(TierUnavailable, match="'other'"):
            await tier.read(chunk(1)[0], page_aligned(LENGTH))


async def test_the_variable_of_lmcache_names_the_service(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVICE_NAME", "kv")
    async with opened(watched.url.removesuffix("/kv")) as tier:
        assert await tier.probe([chunk(1)[0]]) == 0
    async with opened(watched.url.replace("/kv", "/other")) as tier:
        with pytest.raises(TierUnavailable, match="'other'"):
            await tier.probe([chunk(1)[0]])


async def test_a_sentinel_taken_for_a_server_and_the_other_way_round_are_said(watched: Watched) -> None:
    with pytest.raises(ConfigError, match="is a Sentinel"):
        await make_tier(f"redis://127.0.0.1:{watched.sentinels[0].port}").open()
    with pytest.raises(ConfigError, match="url: "):
        await make_tier(f"redis-sentinel://127.0.0.1:{watched.master.port}/kv").open()


@contextmanager
def asking_for_a_password(sentinels: list[Server]) -> Iterator[None]:
    for sentinel in sentinels:
        with sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">right")
    try:
        yield
    finally:
        for sentinel in sentinels:
            with sentinel.client(password="right") as client:
                client.execute_command("ACL", "SETUSER", "default", "nopass")


@pytest.mark.parametrize("given", ["wrong", None])
async def test_a_wrong_sentinel_password_is_said(watched: Watched, given: str | None) -> None:
    with asking_for_a_password(watched.sentinels):
        with pytest.raises(ConfigError, match=r"\.sentinel_password: ") as caught:
            await make_tier(watched.url, sentinel_password=given).open()
        assert "wrong" not in str(caught.value)
        async with opened(watched.url, sentinel_password="right") as tier:
            assert await tier.probe([chunk(1)[0]]) == 0


async def test_one_sentinel_with_another_password_does_not_stop_the_start(watched: Watched) -> None:
    with asking_for_a_password(watched.sentinels[:1]):
        async with opened(watched.url.replace("/kv", "/other")) as tier:
            with pytest.raises(TierUnavailable, match="'other'"):
                await tier.probe([chunk(1)[0]])


async def test_a_fail_over_is_survived(shared: Watched) -> None:
    """The last test of the module: the master is another one after it."""
    async with opened(shared.url, timeout_s=2.0) as tier:
        key, payload = chunk(1, LENGTH)
        assert await tier.write(key, payload, LENGTH)
        with shared.master.client() as client:
            assert client.wait(1, 5000) == 1
        shared.sentinels[0].kill()
        shared.master.kill()
        into = page_aligned(LENGTH)
        with pytest.raises(TierUnavailable):
            await tier.read(key, into)
        assert await eventually(lambda: tier.read(key, into)) == LENGTH
        assert np.array_equal(into[:LENGTH], payload[:LENGTH])
        other = chunk(2, LENGTH)
        assert await eventually(lambda: tier.write(*other, LENGTH))
        with shared.replica.client() as client:
            # Someone makes it a replica: what is written goes to nobody else, and the Sentinels put it right.
            client.replicaof("127.0.0.1", shared.master.port)
        third = chunk(3, LENGTH)
        with pytest.raises(TierUnavailable, match="READONLY|answers"):
            await tier.write(*third, LENGTH)
