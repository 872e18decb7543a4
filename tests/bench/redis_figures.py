"""The Redis tier on a server of its own, beside redis-py's asynchronous client and a bare loop over sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np

from tests.bench.lanes import timed_in_lanes
from tests.remote.redis.servers import Server, running
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import p99
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys, size_name
from tiercache.config.remote_options import options_of
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote

SIZES = (2 * MIB, 32 * MIB)
DEPTH = 4
_NAMES = 1000


async def measure_redis(figures: Figures, plan: Plan) -> None:
    """GB/s with four chunks in flight over the loopback, by one process: client and server share the machine's cores.

    `redis.tier_*`: the tier, which also makes and verifies checksums. `redis_py.*`: redis-py's asyncio client, with hiredis
    where it is installed, whole values as `bytes`. `ceiling.resp_*`: `loop.sock_recv_into` into the caller's memory and
    nothing around it. `*_lag_p99_ms`, `*_lag_max_ms`: of a timer of one millisecond on the loop meanwhile.
    `redis.exist_1000_ms`: which of 1,000 unknown chunks the server has.
    """
    if shutil.which("redis-server") is None:
        raise TierUnavailable("redis-server is not installed: the Redis tier cannot be measured")
    with redis_server(plan.directory / "redis") as server:
        for chunk_bytes in SIZES:
            await _measure_size(figures, plan, server, chunk_bytes)
        await _measure_existence(figures, plan, server)


Lane = tuple[int, np.ndarray]


class Client(Protocol):
    """What is measured. A lane is its number and its memory, uint8[chunk_bytes]."""

    prefix: str

    async def write(self, key: ChunkKey, lane: Lane) -> None: ...

    async def read(self, key: ChunkKey, lane: Lane) -> None: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...


async def _measure_size(figures: Figures, plan: Plan, server: Server, chunk_bytes: int) -> None:
    size, count = size_name(chunk_bytes), max(DEPTH, plan.count(chunk_bytes) // 2)
    sources = np.random.default_rng(3).integers(0, 256, (DEPTH, chunk_bytes), dtype=np.uint8)
    slots = np.zeros((DEPTH, chunk_bytes), np.uint8)
    async with AsyncExitStack() as stack:
        clients: list[Client] = [OurTier(server.port, chunk_bytes), RedisPy(server.port), BareLoop(server.port)]
        for client in clients:
            await client.open()
            stack.push_async_callback(client.close)

        def turn(client: Client) -> Callable[[], Awaitable[None]]:
            async def measure() -> None:
                keys = new_keys(count)
                for way, memory, move in (("put", sources, client.write), ("get", slots, client.read)):
                    took_s, late_s = await timed_in_lanes(keys, enumerate(memory), move)
                    figures.add(f"{client.prefix}_{way}_gbps.{size}", count * chunk_bytes / took_s / 1e9)
                    figures.add(f"{client.prefix}_lag_p99_ms.{way}.{size}", p99(late_s) * 1e3)
                    figures.add(f"{client.prefix}_lag_max_ms.{way}.{size}", late_s[-1] * 1e3)
                await asyncio.to_thread(_forget_all, server)

            return measure

        for pair in range(plan.pairs):
            plan.progress(f"Redis tier, {size}, pair {pair + 1} of {plan.pairs}")
            await in_turn(pair, *(turn(client) for client in clients))
    for way in ("put", "get"):
        for other in clients[1:]:
            figures.compare(f"{clients[0].prefix}_{way}_gbps.{size}", f"{other.prefix}_{way}_gbps.{size}")


async def _measure_existence(figures: Figures, plan: Plan, server: Server) -> None:
    client = OurTier(server.port, MIB)
    await client.open()
    try:
        for _ in range(plan.pairs):
            keys = new_keys(_NAMES)
            began = time.perf_counter()
            await client.tier.probe(keys)
            figures.add(f"redis.exist_{_NAMES}_ms", (time.perf_counter() - began) * 1e3)
    finally:
        await client.close()


class OurTier:
    prefix = "redis.tier"

    def __init__(self, port: int, chunk_bytes: int) -> None:
        options = {option.name: option.default for option in options_of("redis").values()}
        url = f"redis://127.0.0.1:{port}"
        self.tier = make_remote(
            RemoteSettings("redis", "redis", bytes(16), chunk_bytes, url, options, timeout_s=30.0, concurrency=DEPTH)
        )

    async def open(self) -> None:
        await self.tier.open()

    async def close(self) -> None:
        await self.tier.close()

    async def write(self, key: ChunkKey, lane: Lane) -> None:
        assert await self.tier.write(key, lane[1], lane[1].nbytes)

    async def read(self, key: ChunkKey, lane: Lane) -> None:
        assert await self.tier.read(key, lane[1]) == lane[1].nbytes


class RedisPy:
    prefix = "redis_py.client"

    def __init__(self, port: int) -> None:
        import redis.asyncio

        self._client: Any = redis.asyncio.Redis(port=port, max_connections=DEPTH)

    async def open(self) -> None:
        await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    async def write(self, key: ChunkKey, lane: Lane) -> None:
        assert await self._client.set(key, lane[1].data)

    async def read(self, key: ChunkKey, lane: Lane) -> None:
        assert len(await self._client.get(key)) == lane[1].nbytes


class BareLoop:
    """A connection a lane; a reply is a line, a payload that goes where it belongs, and a line end."""

    prefix = "ceiling.resp"

    def __init__(self, port: int) -> None:
        self._port = port
        self._sockets: list[socket.socket] = []

    async def open(self) -> None:
        for _ in range(DEPTH):
            connection = socket.create_connection(("127.0.0.1", self._port))
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(connection)

    async def close(self) -> None:
        for connection in self._sockets:
            connection.close()

    async def write(self, key: ChunkKey, lane: Lane) -> None:
        number, slot = lane
        loop, connection = asyncio.get_running_loop(), self._sockets[number]
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, slot.nbytes)
        await loop.sock_sendall(connection, head)
        await loop.sock_sendall(connection, slot.data)
        await loop.sock_sendall(connection, b"\r\n")
        assert await loop.sock_recv(connection, 16) == b"+OK\r\n"

    async def read(self, key: ChunkKey, lane: Lane) -> None:
        number, slot = lane
        loop, connection = asyncio.get_running_loop(), self._sockets[number]
        await loop.sock_sendall(connection, b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        line = await loop.sock_recv(connection, len(b"$%d\r\n" % slot.nbytes))
        assert line == b"$%d\r\n" % slot.nbytes
        view = slot.data
        while view:
            view = view[await loop.sock_recv_into(connection, view) :]
        end = b""
        while len(end) < 2:
            end += await loop.sock_recv(connection, 2 - len(end))


@contextmanager
def redis_server(place: Path) -> Iterator[Server]:
    """Run a server that saves nothing, and gives no memory back to the system: a cache's server is full most of its life,
    and is not to be measured while it meets each page for the first time."""
    keeps_memory = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}
    with mock.patch.dict(os.environ, keeps_memory), running(place) as server:
        yield server


def _forget_all(server: Server) -> None:
    with server.client() as client:
        client.flushall(asynchronous=True)  # a synchronous one would give the memory back to the system
        while client.info("memory")["lazyfree_pending_objects"]:
            time.sleep(0.001)
