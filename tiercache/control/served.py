"""The part of a cache that the control socket uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tiercache.config import Config
from tiercache.core.keys import ChunkKey
from tiercache.core.layout import Layout
from tiercache.scheduler.prefetcher import Prefetcher, PrefetchHandle
from tiercache.scheduler.reads import Hit
from tiercache.statistics import Statistics


class ServedCache(Protocol):
    """Implemented by `TierCache`, which documents each member."""

    config: Config
    layout: Layout
    namespace: bytes

    @property
    def ahead(self) -> Prefetcher: ...

    def keys(self, tokens: Sequence[int], *, salt: str = "") -> list[ChunkKey]: ...

    async def lookup_keys(
        self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None, counts: bool = True
    ) -> Hit: ...

    async def lookup_each(self, keys: Sequence[ChunkKey], *, deadline_s: float | None = None) -> list[bool]: ...

    def lookup_hot(self, keys: Sequence[ChunkKey]) -> int: ...

    def prefetch(
        self, what: Sequence[ChunkKey], *, deadline: float = ..., priority: int = ..., ttl: float = ...
    ) -> PrefetchHandle: ...

    async def forget(self, keys: Sequence[ChunkKey]) -> None: ...

    def statistics(self) -> Statistics: ...

    async def reconfigure(self, changes: Mapping[str, Any]) -> list[str]: ...

    async def reload(self) -> list[str]: ...

    async def detach(self, name: str, *, timeout_s: float = ...) -> None: ...

    async def attach(self, name: str) -> None: ...
