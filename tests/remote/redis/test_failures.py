"""Servers that hang, die, come back, or are not what the configuration says."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.remote.redis.servers import Cluster, Server, redis, running
from tests.remote.redis.tiers import make_tier, opened, value_name
from tests.remote.waiting import eventually
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing.contract import chunk, page_aligned
from tiercache.tiers.remote.redis import RedisTier

pytestmark = pytest.mark.needs("redis-server")

SECRET = "correct-horse-7"  # what must never be shown
KEY, PAYLOAD = chunk(1, 9 << 20)
LENGTH = 9 << 20


async def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    tier = make_tier(server.url)
    await tier.open()
    try:
        for call in (tier.read(KEY, page_aligned(LENGTH)), tier.write(KEY, PAYLOAD, LENGTH), tier.probe([KEY])):
            with pytest.raises(TierUnavailable, match=str(server.port)):
                await call
        server.start().ready()
        assert await eventually(lambda: tier.write(KEY, PAYLOAD, LENGTH))
        assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH
    finally:
        await tier.close()
        server.kill()


async def test_a_server_that_comes_back_empty_is_written_to_again(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        async with opened(server.url) as tier:
            await tier.write(KEY, PAYLOAD, LENGTH)
            server.kill()
            with pytest.raises(TierUnavailable):
                await tier.read(KEY, page_aligned(LENGTH))
            server.start().ready()
            assert await eventually(lambda: tier.read(KEY, page_aligned(LENGTH))) is None
            assert await tier.probe([KEY]) == 0
            assert await tier.write(KEY, PAYLOAD, LENGTH)
            into = page_aligned(LENGTH)
            assert await tier.read(KEY, into) == LENGTH and np.array_equal(into, PAYLOAD)


async def test_a_restart_between_two_requests_goes_unnoticed(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        async with opened(server.url) as tier:
            await tier.write(KEY, PAYLOAD, LENGTH)
            server.kill()
            server.start().ready()
            assert await tier.read(KEY, page_aligned(LENGTH)) is None
            server.kill()
            server.start().ready()
            tier.known.clear()
            assert await tier.probe([KEY, chunk(2)[0]]) == 0
            server.kill()
            server.start().ready()
            assert await tier.write(KEY, PAYLOAD, LENGTH)


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_server_killed_in_the_middle_of_a_transfer_is_a_clean_failure(tmp_path: Path, way: str) -> None:
    with running(tmp_path) as server:
        async with opened(server.url) as tier:
            chunks = [chunk(number, 4 << 20) for number in range(1, 5)]
            if way == "read":
                await asyncio.gather(*(tier.write(key, payload, 4 << 20) for key, payload in chunks))
            places = [page_aligned(4 << 20) for _ in chunks]
            first = asyncio.Event()

            async def move(number: int) -> None:
                while True:
                    tier.known.clear()
                    if way == "read":
                        assert await tier.read(chunks[number][0], places[number]) == 4 << 20
                        assert np.array_equal(places[number], chunks[number][1])
                    else:
                        assert await tier.write(*chunks[number], 4 << 20)
                        await tier.remove(chunks[number][0])
                    first.set()

            moves = [asyncio.create_task(move(number)) for number in range(4)]
            await first.wait()
            server.kill()
            outcomes = await asyncio.wait_for(asyncio.gather(*moves, return_exceptions=True), 10)
            assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes), outcomes
            server.start().ready()
            assert await eventually(lambda: tier.write(*chunks[0], 4 << 20))


@pytest.mark.parametrize("where", ["in an answer", "in the greeting"])
async def test_closing_does_not_wait_for_a_frozen_server_whose_requests_end_at_their_deadline(
    tmp_path: Path, where: str
) -> None:
    """Their memory can be given back then."""
    with running(tmp_path) as server:
        async with opened(server.url, timeout_s=3.0) as tier:
            await tier.write(KEY, PAYLOAD, LENGTH)
            if where == "in the greeting":
                with server.client() as client:
                    client.client_kill_filter(_type="normal", skipme=True)
            server.freeze()
            work = [
                asyncio.create_task(tier.read(KEY, page_aligned(LENGTH))),
                asyncio.create_task(tier.write(*chunk(2, LENGTH), LENGTH)),
                asyncio.create_task(tier.remove(KEY)),
            ]
            async with asyncio.timeout(10):
                while tier._readers.unfinished + tier._writers.unfinished + tier._control.unfinished < len(work):
                    await asyncio.sleep(0)
            began_s = time.monotonic()
            await tier.close()
            assert time.monotonic() - began_s < 20.0
            await asyncio.wait(work, timeout=60)
            assert all(isinstance(task.exception(), TierUnavailable) for task in work)


async def test_a_frozen_server_is_left_at_the_deadline_and_used_again(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        async with opened(server.url, timeout_s=1.0) as tier:
            await tier.write(KEY, PAYLOAD, LENGTH)
            server.freeze()
            began = time.monotonic()
            with pytest.raises(TierUnavailable, match="did not answer within"):
                await tier.read(KEY, page_aligned(LENGTH))
            with pytest.raises(TierUnavailable):
                await tier.write(*chunk(2, LENGTH), LENGTH)
            assert time.monotonic() - began < 20.0
            server.thaw()
            assert await eventually(lambda: tier.read(KEY, page_aligned(LENGTH))) == LENGTH


@pytest.mark.parametrize("url", ["redis-cluster://{}", "redis-sentinel://{}/kv"])
async def test_a_start_waits_for_all_frozen_servers_as_long_as_for_one(url: str) -> None:
    """One after another would take twenty seconds."""
    with frozen_servers(40) as servers:
        tier = make_tier(url.format(servers), timeout_s=0.5)
        opening = asyncio.create_task(tier.open())
        await asyncio.wait([opening], timeout=10)
        assert opening.done()
        with pytest.raises(TierUnavailable):
            await tier.read(KEY, page_aligned(LENGTH))
        await tier.close()


@pytest.mark.parametrize("count", [3, 9])
async def test_a_cluster_is_found_behind_frozen_servers(cluster: Cluster, count: int) -> None:
    with frozen_servers(count) as servers:
        async with opened(f"redis-cluster://{servers},127.0.0.1:{cluster.nodes[0].port}", timeout_s=1.0) as tier:
            if count > 3:
                await eventually(lambda: tier.probe([KEY]))
            assert await tier.write(KEY, PAYLOAD, LENGTH)


async def test_a_lookup_waits_for_frozen_masters_as_for_a_few_and_finds_what_others_have(cluster: Cluster) -> None:
    """One after another would take twenty seconds."""
    healthy = f"127.0.0.1:{cluster.nodes[0].port}"
    with frozen_servers(40) as frozen, server_with_table([healthy, *frozen.split(",")]) as asked:
        async with opened(f"redis-cluster://{asked}", timeout_s=0.5) as tier:
            numbers = range(1, 200)
            found = next(number for number in numbers if redis.crc.key_slot(value_name(chunk(number, 1)[0])) < STEP)
            key, payload = chunk(found, LENGTH)
            assert await tier.write(key, payload, LENGTH)
            tier.known.clear()
            keys = [chunk(number, 1)[0] for number in numbers if number != found]
            lookup = asyncio.create_task(tier.probe([*keys, key]))
            await asyncio.wait([lookup], timeout=10)
            assert lookup.done()
            await lookup
            assert tier.contains(key)


STEP = 5461 // 14
"""Slots of each owner in `server_with_table`: the first master of `Cluster` has those of the first."""


@contextlib.contextmanager
def server_with_table(owners: list[str]) -> Iterator[str]:
    """Yield the address of a server that says which masters a cluster has."""
    bounds = [*(number * STEP for number in range(len(owners))), 16384]
    rows = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, end - 1, int(owner.split(":")[1]))
        for first, end, owner in zip(bounds, bounds[1:], owners, strict=False)
    ]
    table = b"*%d\r\n" % len(rows) + b"".join(rows)
    with answering(lambda words: table if b"SLOTS" in words else b"+OK\r\n" * words.count(b"SETINFO")) as address:
        yield address


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Yield the address of a server with one connection at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    connection = listener.accept()[0]
                    while words := connection.recv(1000):
                        connection.sendall(answer(words))
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def frozen_servers(count: int) -> Iterator[str]:
    """Yield the addresses of servers that accept and say nothing."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)


async def refusal(tier: RedisTier) -> str:
    """What the operator reads."""
    with pytest.raises(ConfigError) as caught:
        await tier.open()
    assert SECRET not in str(caught.value) and SECRET not in repr(tier.settings) and SECRET not in repr(tier.address)
    assert SECRET not in tier.describe()
    return str(caught.value)


async def test_wrong_password_and_users_name_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path, "--requirepass", "right") as server:
        with server.client(password="right") as client:
            client.execute_command("ACL", "SETUSER", "reader", "on", ">right", "~*", "+get", "+ping")
            client.execute_command("ACL", "SETUSER", "cache", "on", ">right", "~tiercache:*", "~{tiercache:*", "+@all")
        place = f"127.0.0.1:{server.port}"
        assert ".password: " in await refusal(make_tier(f"redis://:{SECRET}@{place}"))
        assert ".password: " in await refusal(make_tier(f"redis://{place}"))
        assert ".password: " in await refusal(make_tier(f"redis://{place}", username="cache", password=SECRET))
        assert ".username: " in await refusal(make_tier(f"redis://reader:right@{place}"))
        assert ".username: " in await refusal(make_tier(f"redis://cache:right@{place}", prefix="elsewhere"))
        assert ".database: " in await refusal(make_tier(f"redis://:right@{place}/99"))
        tier = make_tier(f"redis://{place}", username="cache", password="right")
        await tier.open()
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH
        assert await tier.remove(KEY)
        await tier.close()
    assert SECRET not in caplog.text


async def test_a_password_that_is_changed_later_makes_the_tier_unavailable(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        async with opened(server.url, password=None) as tier:
            await tier.write(KEY, PAYLOAD, LENGTH)
            with server.client() as client:
                client.config_set("requirepass", SECRET)
                client.auth(SECRET)
                client.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(TierUnavailable) as caught:
                await tier.read(KEY, page_aligned(LENGTH))
            assert SECRET not in str(caught.value)


@pytest.mark.needs("openssl")
async def test_tls_where_there_is_none_and_none_where_there_is(
    server: Server, tls_server: Server, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, tls = f"localhost:{server.port}", f"localhost:{tls_server.port}"
    for url, hint in ((f"rediss://{plain}", "use redis://"), (f"redis://{tls}", "use rediss://")):
        tier = make_tier(url, timeout_s=1.0, connect_timeout_s=1.0)
        await tier.open()
        assert hint in caplog.text
        await tier.close()
    assert ".tls_ca_file: " in await refusal(make_tier(f"rediss://{tls}"))
    assert ".tls_ca_file: " in await refusal(make_tier(f"rediss://{tls}", tls_ca_file="/nowhere.pem"))
    async with opened(f"redis://{tls}", tls=True, tls_verify=False) as unchecked:
        assert await unchecked.write(KEY, PAYLOAD, LENGTH)


async def test_what_is_no_redis_at_all_is_said() -> None:
    with answering(lambda words: b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as address:
        assert "not a Redis server" in await refusal(make_tier(f"redis://{address}"))


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("", {}, "url: "),
        (f"http://:{SECRET}@host", {}, "url: "),
        (f"{SECRET}@host:6379", {}, "url: "),
        (f"redis://:{SECRET}@host:notaport", {}, "url: "),
        (f"redis://:{SECRET}@a,b", {}, "url: "),
        (f"redis://:{SECRET}@a/service", {}, "url: "),
        (f"redis://:{SECRET}@a..b:6379", {}, "url: "),
        (f"redis-cluster://:{SECRET}@{'a' * 64}.b", {}, "url: "),
        ("unix://relative", {}, "url: "),
        ("redis://host?password=" + SECRET, {}, "url: "),
        ("rediss://host", {"tls": False}, "tls: "),
        ("redis-cluster://a,b/3", {}, "database: "),
        ("redis://host", {"prefix": "a{b}"}, "prefix: "),
        ("redis://user@host", {}, "password: "),
    ],
)
def test_bad_settings_fail_at_once_with_their_key(url: str, options: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make_tier(url, **options)
    assert SECRET not in str(caught.value)


def test_addresses_are_read_from_urls() -> None:
    address = make_tier("rediss://us%40er:pa%2Fss@[::1]:7000/4").address
    assert (address.username, address.password, address.database, address.tls) == ("us@er", "pa/ss", 4, True)
    assert str(address) == "[::1]:7000"
    assert make_tier("redis://a", database=3, password=SECRET).address.database == 3
    watched = make_tier(f"redis-sentinel://:{SECRET}@a,b:27000/main/2").address
    assert (watched.mode, watched.service, watched.database) == ("sentinel", "main", 2)
    assert [str(each) for each in watched.endpoints] == ["a:26379", "b:27000"]
    assert make_tier("valkey://a:1", mode="cluster").address.mode == "cluster"
    assert SECRET not in repr(watched) and SECRET not in str(watched)
    assert make_tier("unix:///run/redis.sock?db=2").address.database == 2
