"""A password that is rotated while a cache runs."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.remote.redis.servers import Server, running
from tests.test_cache import CHUNK_BYTES, LAYOUT, key, payload
from tiercache import Config, TierCache
from tiercache.errors import ConfigError

pytestmark = pytest.mark.needs("redis-server")

OLD, NEW = "first-secret-5e1", "second-secret-9c3"


def configured(server: Server, **values: object) -> Config:
    values = {
        "max_local_cpu_size": 2 / 1024,
        "remote_storage_plugins": "redis",
        "remote_storage_plugin.redis.url": server.url,
        "remote_storage_plugin.redis.password": OLD,
        **values,
    }
    return Config.load(environ={}, overrides=values)


async def written_and_read(cache: TierCache, number: int) -> None:
    before = cache.statistics().tiers["redis"]
    assert await cache.put(key(number), payload(number))
    assert (await cache.flush()).complete
    cache.clear_hot()
    async with cache.get(key(number)) as lease:
        assert lease is not None and bytes(lease.view) == payload(number, CHUNK_BYTES).tobytes()
    after = cache.statistics().tiers["redis"]
    assert (after.writes, after.reads) == (before.writes + 1, before.reads + 1), "counters go on"


@pytest.mark.parametrize("place", ["option", "url"])
async def test_a_rotated_password_is_used_at_once_and_a_wrong_one_changes_nothing(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path, "--requirepass", OLD) as server:
        of_url = server.url.replace("//", "//:{}@")
        values: dict[str, object] = {}
        if place == "url":
            values = {"remote_storage_plugins": "", "remote_url": of_url.format(OLD)}
            values |= {f"remote_storage_plugin.redis.{name}": None for name in ("url", "password")}
        name = "remote_storage_plugin.redis.password" if place == "option" else "remote_url"

        def rotated(password: str) -> dict[str, object]:
            return {name: password if place == "option" else of_url.format(password)}

        async with TierCache.open(configured(server, **values), LAYOUT) as cache:
            await written_and_read(cache, 1)
            with pytest.raises(ConfigError) as refused:
                await cache.reconfigure(rotated("wrong-secret-77"))
            await written_and_read(cache, 2)
            with server.client(password=OLD) as client:
                client.config_set("requirepass", NEW)
            said = await cache.reconfigure(rotated(NEW))
            await written_and_read(cache, 3)
            with server.client(password=NEW) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await written_and_read(cache, 4)
            told = f"{refused.value} {said} {cache.config} {caplog.text}"
            assert said[0].startswith(f"{name}: ") and "***" in said[0]
            assert not any(secret in told for secret in (OLD, NEW, "wrong-secret-77"))
            with pytest.raises(ConfigError, match="needs a restart"):
                await cache.reconfigure({"remote_storage_plugin.redis.prefix": "other"})


async def test_a_password_is_rotated_while_requests_run_and_none_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, "--requirepass", OLD) as server:
        async with TierCache.open(configured(server), LAYOUT) as cache:
            rounds, stop = 0, False

            async def use(numbers: range) -> None:
                nonlocal rounds
                while not stop:
                    for number in numbers:
                        await cache.put(key(number), payload(number))
                    await cache.flush()
                    cache.clear_hot([key(number) for number in numbers])
                    for number in numbers:
                        async with cache.get(key(number)) as lease:
                            assert lease is not None and bytes(lease.view) == payload(number).tobytes()
                    rounds += 1

            users = [asyncio.create_task(use(range(first, first + 4))) for first in (1, 5, 9)]
            password = OLD
            for number in range(5):
                old, password = password, f"secret-{number}"
                with server.client(password=old) as client:
                    # The server accepts both until the cache has the new one: connections are made at any time.
                    client.execute_command("ACL", "SETUSER", "default", f">{password}")
                    await cache.reconfigure({"remote_storage_plugin.redis.password": password})
                    client.execute_command("ACL", "SETUSER", "default", f"<{old}")
                until = rounds + 4
                while rounds < until and not any(user.done() for user in users):
                    await asyncio.sleep(0)
            stop = True
            await asyncio.gather(*users)
            assert cache.statistics().breakers == {"redis": "closed"}
            assert cache.cpu.obtainable == cache.cpu.pool.count
