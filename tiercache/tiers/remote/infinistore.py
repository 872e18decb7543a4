"""The InfiniStore tier: chunks in the memory of an InfiniStore server, over RDMA or TCP.

Written for the published Python API of infinistore 0.2.35 and tested with a fake of that API. **It has not been run
with a real server**, which needs RDMA hardware.

An InfiniStore value is a contiguous run of memory, and a slot of the arena has no room for a header. So a chunk is two
values: its payload under `prefix:key:payload`, moved directly between server and slot, and after it the 88-byte header
under `prefix:key`. A chunk exists if its header does; a header and a payload that do not match fail verification. The
server does not report the length of a value, so the header's length is used to read the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import mmap
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tiercache.core.header import PACKED_BYTES, aligned
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers, retrieve_exception
from tiercache.tiers.remote.base import NotOurs, RemoteSettings, RemoteTier

logger = logging.getLogger("tiercache.infinistore")

T = TypeVar("T")

_PORT = 12345
_CELL_BYTES = 128
_AGAIN_S = 1.0
_UNANSWERED = 8
_OUT_OF_MEMORY = 507
_BAD_REQUEST = 400
"""Error code of a read whose value is longer than the memory for it."""


class _Refused(TierUnavailable):
    """The server refused a request; the connection can still be used."""


class InfiniStoreTier(RemoteTier):
    """A connection to an InfiniStore server. RDMA transfers are asynchronous; blocking calls share one thread.

    Checks of existence, removals and TCP transfers block. An operation that has begun and does not end in `timeout_s`
    closes the connection, so that no byte arrives after its memory was reused. A new one is made in the background.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self._host, self._port, self._device = _read_url(settings)
        self._rdma = settings.options.get("connection_type", "RDMA") == "RDMA"
        self._arena: Arena | None = None
        self._api: Any = None
        self._connection: Any = None
        self._problem = "it is being connected"
        self._connecting: asyncio.Task[None] | None = None
        self._last: Any = None
        """The last connection that was made, until it is closed. Belongs to the connecting thread."""
        self._closed: asyncio.Future[None]
        """The end of the last closed connection. The next connection is made after it."""
        transfers = 2 * settings.concurrency + 4
        self._headers = np.frombuffer(mmap.mmap(-1, aligned(transfers * _CELL_BYTES)), dtype=np.uint8)
        """A header for each transfer."""
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in range(transfers):
            self._free.put_nowait(number * _CELL_BYTES)
        self._hashers = Workers(f"{self.name}-hash", settings.concurrency)
        self._blocking = Workers(f"{self.name}-calls", 1)
        self._connector = Workers(f"{self.name}-connect", 1)

    def use_arena(self, arena: Arena) -> None:
        self._arena = arena
        arena.pinned = True

    def describe(self) -> str:
        return f"{self.name} ({self._host}:{self._port}, {'RDMA' if self._rdma else 'TCP'})"

    # Connection

    def load_library(self) -> None:
        try:
            self._api = importlib.import_module("infinistore")
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs InfiniStore, which cannot be imported ({error}): pip install "
                "'tiercache[infinistore]', and the system's libibverbs1"
            ) from error

    async def _connect(self) -> None:
        """Start to connect. An unreachable server does not stop the start: operations fail until it is reachable."""
        await self._blocking.submit(self.load_library)
        self._connecting = asyncio.create_task(self._keep_trying())
        await asyncio.wait([self._connecting], timeout=self.settings.timeout_s)
        if self._connection is None:
            logger.warning("%s: starting without it: %s", self.name, self._problem)

    async def _disconnect(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connection, self._problem = None, "the tier is closed"
            self._closed = self._connector.submit(self._close_last)  # also a connection that is just being made
            await asyncio.wait([self._closed], timeout=self.settings.timeout_s)
        for workers in (self._hashers, self._blocking, self._connector):
            workers.close()

    async def _keep_trying(self) -> None:
        while True:
            try:
                self._connection = await self._connector.submit(self._connect_once)
                return
            except Exception as error:  # the API raises plain Exception
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.warning("%s: not there yet: %s", self.name, error)
            await asyncio.sleep(_AGAIN_S)

    def _connect_once(self) -> Any:
        api = self._api
        kind = api.TYPE_RDMA if self._rdma else api.TYPE_TCP
        link = getattr(api, str(self.settings.options.get("link_type", "LINK_ETHERNET")))
        config = api.ClientConfig(
            host_addr=self._host,
            service_port=self._port,
            log_level="warning",
            connection_type=kind,
            ib_port=1,
            link_type=link,
            dev_name=self._device,
        )
        connection = api.InfinityConnection(config)
        connection.connect()
        if self._rdma:
            places = [self._headers, *([self._arena.memory] if self._arena is not None else [])]
            try:
                for place in places:
                    connection.register_mr(int(place.ctypes.data), place.nbytes)
            except Exception:
                connection.close()
                raise
        self._last = connection
        return connection

    def _close_last(self) -> None:
        connection, self._last = self._last, None
        if connection is not None:
            connection.close()

    def _connected(self) -> Any:
        if self._connection is None:
            raise TierUnavailable(f"{self.name}: {self._host}:{self._port}: {self._problem}")
        return self._connection

    def _break(self, connection: Any, problem: str) -> asyncio.Future[None]:
        """Close `connection` once, and begin to make another. The result is done when the old one is closed."""
        if self._connection is connection:
            self._connection, self._problem = None, problem
            self._closed = self._connector.submit(self._close_last)
            # The single thread closes and connects, so the new connection is made after the end of the old.
            self._connecting = asyncio.create_task(self._keep_trying())
        return self._closed

    # Transfers

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        name = self.value_name(key)
        cell = await self._free.get()
        try:
            header = self._headers[cell : cell + PACKED_BYTES]
            header[:] = 0
            header_bytes = await self._read(name, header)
            if header_bytes is None:
                return None
            raw = header.tobytes()[:header_bytes]
            if header_bytes > PACKED_BYTES:
                raise NotOurs(f"{self.name}: {key.hex()}: expected a header of {PACKED_BYTES} bytes, found more")
            payload_bytes = self.verified_header(key, raw).payload_bytes
            if not 0 < payload_bytes <= into.nbytes:
                raise CorruptChunk(f"{self.name}: length: expected at most {into.nbytes} bytes, found {payload_bytes}")
            got_bytes = await self._read(f"{name}:payload", into[:payload_bytes])
            if got_bytes is None:
                return None
            return await self._hashers.submit(self.verified, key, raw, into, got_bytes)
        finally:
            self._free.put_nowait(cell)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        name = self.value_name(key)
        packed = await self._hashers.submit(self.packed_header, key, payload)
        cell = await self._free.get()
        try:
            header = self._headers[cell : cell + PACKED_BYTES]
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            await self._write(f"{name}:payload", payload)
            await self._write(name, header)
            return True
        finally:
            self._free.put_nowait(cell)

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Ask with one request. The server bisects, so all keys before the last found key count as present."""
        connection = self._connected()
        names = [self.value_name(key) for key in keys]

        def ask() -> int:
            with contextlib.suppress(Exception):  # "can't find a match", or no answer, and then the next call fails
                if len(names) > 1:
                    return int(connection.get_match_last_index(names))
            return 0 if connection.check_exist(names[0]) else -1

        last = await self._ask(ask)
        return [position <= last for position in range(len(names))]

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        for key in keys:  # one at a time, since `_exist` is right for prefixes only
            await self.probe([key])
        return [self.contains(key) for key in keys]

    async def _delete(self, key: ChunkKey) -> bool:
        connection = self._connected()
        name = self.value_name(key)

        def remove() -> bool:
            if not connection.check_exist(name):
                return False
            connection.delete_keys([name])
            if connection.check_exist(f"{name}:payload"):
                connection.delete_keys([f"{name}:payload"])
            return True

        return await self._ask(remove)

    # Single values

    async def _read(self, name: str, place: np.ndarray) -> int | None:
        """Read a value into `place`, and return its length; None if there is no value.

        A value that does not fit returns some length larger than that of `place`.
        """
        connection = self._connected()
        address = int(place.ctypes.data)
        try:
            if self._rdma:
                await self._transfer(connection, connection.rdma_read_cache_async([(name, 0)], place.nbytes, address))
            else:
                return await self._transfer_over_tcp(connection, _read_tcp, connection, name, place)
        except self._api.InfiniStoreKeyNotFound:
            return None
        except _Refused:
            return place.nbytes + 1
        return place.nbytes

    async def _write(self, name: str, place: np.ndarray) -> None:
        connection = self._connected()
        address = int(place.ctypes.data)
        if self._rdma:
            await self._transfer(connection, connection.rdma_write_cache_async([(name, 0)], place.nbytes, address))
        else:
            await self._transfer_over_tcp(connection, connection.tcp_write_cache, name, address, place.nbytes)

    async def _transfer(self, connection: Any, call: Awaitable[Any]) -> None:
        """Wait until the transfer has ended and its memory is no longer in use.

        Raises InfiniStoreKeyNotFound, TierFull, TierUnavailable.
        """
        # Cancelled only after the connection is closed: before, the API's callback would find a cancelled future.
        work = asyncio.ensure_future(call)
        await asyncio.wait([work], timeout=self.settings.timeout_s)
        if not work.done():
            work.add_done_callback(lambda late: late.cancelled() or late.exception())
            await asyncio.shield(self._break(connection, f"a transfer did not end in {self.settings.timeout_s:g} s"))
            work.cancel()
            raise TierUnavailable(f"{self.name}: {self._problem}")
        error = work.exception()
        if error is None or isinstance(error, self._api.InfiniStoreKeyNotFound):
            work.result()
            return
        # The code is found only in the text: `Failed to write to infinistore, ret = 507`.
        found = re.search(r"ret = (-?\d+)", str(error))
        code = int(found[1]) if found else None
        if code == _OUT_OF_MEMORY:
            raise TierFull(f"{self.name}: {error}")
        if code == _BAD_REQUEST:
            raise _Refused(f"{self.name}: {error}")
        if code is None or code < 0:
            await asyncio.shield(self._break(connection, str(error)))
        raise TierUnavailable(f"{self.name}: {error}")

    async def _transfer_over_tcp(self, connection: Any, call: Callable[..., T], *arguments: object) -> T:
        """Run a blocking transfer. It ends after `call`, which uses the caller's memory: closing does not wake a `recv`."""
        work = self._blocking.submit(call, *arguments)
        try:
            return await self._answer(connection, work)
        except TierUnavailable:
            await asyncio.wait([work])
            raise

    async def _ask(self, call: Callable[[], T]) -> T:
        """Run a blocking call without a payload, and abandon it after `timeout_s`."""
        connection = self._connected()
        if self._blocking.unfinished >= _UNANSWERED + 2 * self.settings.concurrency:
            raise TierUnavailable(f"{self.name}: the server answers none of {self._blocking.unfinished} requests")
        return await self._answer(connection, self._blocking.submit(call))

    async def _answer(self, connection: Any, work: asyncio.Future[T]) -> T:
        """Wait for a blocking call, for `timeout_s` at most. A call that has not begun by then is withdrawn."""
        await asyncio.wait([work], timeout=self.settings.timeout_s)
        if not work.done():
            problem = f"no answer in {self.settings.timeout_s:g} s"
            work.add_done_callback(retrieve_exception)
            if not self._blocking.withdraw(work):
                self._break(connection, problem)
            raise TierUnavailable(f"{self.name}: {problem}")
        try:
            return work.result()
        except Exception as error:  # the API raises plain Exception
            self._break(connection, str(error))
            raise TierUnavailable(f"{self.name}: {error}") from error


def _read_tcp(connection: Any, name: str, place: np.ndarray) -> int | None:
    if not connection.check_exist(name):
        return None
    found = connection.tcp_read_cache(name)
    fitting_bytes = min(found.nbytes, place.nbytes)
    np.copyto(place[:fitting_bytes], found[:fitting_bytes])
    return int(found.nbytes)


def _read_url(settings: RemoteSettings) -> tuple[str, int, str]:
    """Return host, port and device of `infinistore://host:port/?device=mlx5_0`. Raises ConfigError."""
    if "," in settings.url:
        raise settings.error("url", "expected one server")
    try:
        parts = urlsplit(settings.url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme != "infinistore":
        raise settings.error("url", "expected infinistore://host:port")
    given = parse_qs(parts.query).get("device", [""])[0]
    return host, port or _PORT, given or str(settings.options.get("device_name") or "mlx5_0")
