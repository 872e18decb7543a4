"""A whole cache over tiers each of whose operations can be held back, by kind and one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from tiercache import Config, Layout, TierCache
from tiercache.core.keys import ChunkKey
from tiercache.testing import MemoryTier
from tiercache.tiers.base import Traits
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.remote.base import RemoteSettings

CHUNK_BYTES = 64 * 1024
_ARENA_BYTES = 2 << 20
T = TypeVar("T")
KINDS = ("probe", "read", "write", "remove")


class HeldTier(MemoryTier):
    """What a read finds is decided when it begins, what a write or a removal changes when it ends: as late as can be."""

    made: dict[str, HeldTier] = {}  # noqa: RUF012 - how a test gets at the tier that a configuration names

    def __init__(self, settings: RemoteSettings) -> None:
        prefetches = int(settings.options.get("prefetches", 0)) or None
        super().__init__(settings.name, Traits(True, True, settings.concurrency, settings.concurrency, prefetches))
        self._gates = {kind: asyncio.Event() for kind in KINDS}
        for gate in self._gates.values():
            gate.set()
        self.entered = dict.fromkeys(KINDS, 0)
        self.fail_removals: list[Exception] = []
        self.fate: Callable[[], Awaitable[None]] | None = None
        """What happens to each operation on its way; it may raise."""
        self.made[settings.name] = self

    def hold(self, kind: str) -> None:
        self._gates[kind].clear()

    def let_go(self, *kinds: str) -> None:
        for kind in kinds or KINDS:
            self._gates[kind].set()

    async def until_entered(self, kind: str, operations: int = 1) -> None:
        await until(lambda: self.entered[kind] >= operations)

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        await self._enter("probe")
        return self.prefix(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        stored = self.chunks.get(key)
        await self._enter("read")
        if stored is None:
            return None
        into[: len(stored)] = np.frombuffer(stored, dtype=np.uint8)
        return len(stored)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        await self._enter("write")
        return await super().write(key, payload, payload_bytes)

    async def remove(self, key: ChunkKey) -> bool:
        await self._enter("remove")
        if self.fail_removals:
            raise self.fail_removals.pop(0)
        return await super().remove(key)

    async def _enter(self, kind: str) -> None:
        self.entered[kind] += 1
        await self._gates[kind].wait()
        if self.fate is not None:
            await self.fate()


@asynccontextmanager
async def opened(
    *names: str, only_read: str = "", slots: int = 32, concurrency: int = 2, prefetches: int = 0, **values: Any
) -> AsyncIterator[TierCache]:
    """The smallest arena, cut into so many slots; payloads need not fill theirs. At the end nobody holds anything."""
    settings: dict[str, object] = {}
    for name in names:
        own = {"module_path": __name__, "class_name": "HeldTier", "role": "read" if name == only_read else "both"}
        own |= {"concurrency": str(concurrency), "prefetches": str(prefetches)}
        settings |= {f"{name}.{option}": value for option, value in own.items()}
    config = Config(
        max_local_cpu_size=_ARENA_BYTES / 2**30,
        remote_storage_plugins=names,
        remote_storage_plugin_settings=settings,  # type: ignore[arg-type]
        **values,
    )
    async with TierCache.open(config, Layout("m", 16, _ARENA_BYTES // slots // 16)) as cache:
        assert cache.cpu.pool.count == slots
        try:
            yield cache
        finally:
            for name in names:
                HeldTier.made[name].let_go()
        await settle()
        assert is_whole(cache.cpu), "somebody holds a slot, or a budget counts one"


def tier(name: str) -> HeldTier:
    return HeldTier.made[name]


def key(number: int) -> ChunkKey:
    return number.to_bytes(24, "big")


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(CHUNK_BYTES)


OLD, NEW = payload(1), payload(2)


async def settle(rounds: int = 20) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """No virtual time passes."""
    while not condition():
        await asyncio.sleep(0)


async def found(cache: TierCache, wanted: ChunkKey, deadline_s: float = 5.0) -> bytes | None:
    async with cache.get(wanted, deadline_s=deadline_s) as lease:
        return None if lease is None else bytes(lease.view)


def raising(error: type[BaseException], *says: str) -> Callable[[], Awaitable[None]]:
    """A fate."""

    async def fate() -> None:
        raise error(*says)

    return fate


async def begun(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has come as far as it comes by itself."""
    task = asyncio.create_task(call)
    await settle()
    return task


def is_whole(cpu: CpuTier) -> bool:
    """Nobody holds anything: every slot can be had again, and no budget counts one."""
    return cpu.obtainable == cpu.pool.count and not any(cpu.budget.held)
