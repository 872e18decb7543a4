"""A stand-in for the module `infinistore` 0.2.35, as strict as its API: registered memory only, RDMA when connected.

`test_infinistore.py` compares it with the real module where that is installed.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable

import numpy as np

TYPE_RDMA = "RDMA"
TYPE_TCP = "TCP"
LINK_ETHERNET = "Ethernet"
LINK_IB = "IB"


class InfiniStoreException(Exception):
    pass


class InfiniStoreKeyNotFound(InfiniStoreException):
    pass


class Server:
    """What all connections see. `codes` are given instead of answers, in turn; `hang` lets RDMA transfers hang."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: list[int] = []
        self.down = False
        self.hang = False
        self.may_connect = threading.Event()
        """Connecting waits for it."""
        self.may_connect.set()
        self.may_answer = threading.Event()
        """Transfers over TCP wait for it, also on a closed connection: closing a socket does not end its `recv`."""
        self.may_answer.set()
        self.may_close = threading.Event()
        """Closing waits for it."""
        self.may_close.set()
        self.connections: list[InfinityConnection] = []


server = Server()


class ClientConfig:
    def __init__(self, **kwargs):  # type: ignore[no-untyped-def]
        known = ("connection_type", "host_addr", "dev_name", "ib_port", "link_type", "service_port", "log_level")
        assert set(kwargs) <= set(known), kwargs
        self.connection_type = kwargs.get("connection_type")
        self.host_addr = kwargs.get("host_addr")
        self.dev_name = kwargs.get("dev_name", "mlx5_1")
        self.ib_port = kwargs.get("ib_port", 1)
        self.link_type = kwargs.get("link_type", "IB")
        self.service_port = kwargs.get("service_port")
        self.log_level = kwargs.get("log_level", "warning")

    def verify(self):  # type: ignore[no-untyped-def]
        assert self.connection_type in (TYPE_RDMA, TYPE_TCP)
        assert self.link_type in (LINK_IB, LINK_ETHERNET)
        assert isinstance(self.host_addr, str) and isinstance(self.service_port, int)


class InfinityConnection:
    def __init__(self, config: ClientConfig):
        config.verify()
        self.config = config
        self.rdma_connected = False
        self.connected = False
        self.regions: list[tuple[int, int]] = []
        self.semaphore = asyncio.BoundedSemaphore(128)
        self.held: list[Callable[[], None]] = []
        server.connections.append(self)

    def connect(self):  # type: ignore[no-untyped-def]
        assert server.may_connect.wait(30)
        if server.down:
            raise Exception("Failed to initialize remote connection")
        self.connected = True
        self.rdma_connected = self.config.connection_type == TYPE_RDMA

    def close(self):  # type: ignore[no-untyped-def]
        assert server.may_close.wait(30)
        self.connected = self.rdma_connected = False
        self.held.clear()

    def register_mr(self, arg: int, size: int | None = None):  # type: ignore[no-untyped-def]
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        assert isinstance(arg, int) and isinstance(size, int) and size > 0
        self.regions.append((arg, size))
        return 0

    async def rdma_write_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int):  # type: ignore[no-untyped-def]
        def move() -> int:
            for key, offset in blocks:
                self._check(ptr + offset, block_size)
                server.values[key] = ctypes.string_at(ptr + offset, block_size)
            return 200

        return await self._later(move)

    async def rdma_read_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int):  # type: ignore[no-untyped-def]
        def move() -> int:
            for key, offset in blocks:
                self._check(ptr + offset, block_size)
                value = server.values.get(key)
                if value is None:
                    return 404
                if len(value) > block_size:
                    return 400
                ctypes.memmove(ptr + offset, value, len(value))
            return 200

        return await self._later(move)

    async def _later(self, move: Callable[[], int]) -> int:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        await self.semaphore.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def callback() -> None:
            if not self.rdma_connected:
                return
            code = server.codes.pop(0) if server.codes else -1 if server.down else move()
            if code == 404:
                loop.call_soon_threadsafe(future.set_exception, InfiniStoreKeyNotFound("some keys not found"))
            elif code != 200:
                error = Exception(f"Failed to write to infinistore, ret = {code}")
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, code)
            self.semaphore.release()

        if server.hang:
            self.held.append(callback)
        else:
            threading.Thread(target=callback).start()
        return await future

    def _check(self, address: int, size: int) -> None:
        assert any(start <= address and address + size <= start + length for start, length in self.regions), (
            "Please register memory first"
        )

    def _check_connected(self) -> None:
        if server.down or not self.connected:
            raise Exception("Failed to check if this key exists")

    def tcp_read_cache(self, key: str, **kwargs) -> np.ndarray:  # type: ignore[no-untyped-def]
        assert server.may_answer.wait(30)
        self._check_connected()
        return np.frombuffer(server.values[key], dtype=np.uint8)

    def tcp_write_cache(self, key: str, ptr: int, size: int, **kwargs):  # type: ignore[no-untyped-def]
        assert server.may_answer.wait(30)
        self._check_connected()
        assert key and ptr and size
        server.values[key] = ctypes.string_at(ptr, size)

    def check_exist(self, key: str):  # type: ignore[no-untyped-def]
        self._check_connected()
        return key in server.values

    def get_match_last_index(self, keys: list[str]):  # type: ignore[no-untyped-def]
        self._check_connected()
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in server.values:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            raise Exception("can't find a match")
        return low - 1

    def delete_keys(self, keys: list[str]):  # type: ignore[no-untyped-def]
        self._check_connected()
        if any(key not in server.values for key in keys):
            raise Exception("somethings are wrong, not all the specified keys were deleted")
        for key in keys:
            del server.values[key]
        return len(keys)
