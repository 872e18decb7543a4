"""The chunks of a prompt that was announced by its token ids: those that a request of these tokens will look for."""

from __future__ import annotations

from tiercache.control.messages import Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.block_names import BlockNames
from tiercache.integrations.vllm.grouped import all_names, held_names, keys_of
from tiercache.integrations.vllm.lookup import locate
from tiercache.integrations.vllm.planning import BlockGeometry


class AnnouncedPrompts:
    """The connector's `Naming`. `names` is the worker's own, which follows the scheduler's through resets."""

    def __init__(self, names: BlockNames, geometry: BlockGeometry) -> None:
        self.names = names
        self._geometry = geometry

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """As a request finds them: full chunks as far as there are any, the longest tail behind them, then what is
        missing."""
        if (given := given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        _, found = await locate(cache, names, self._geometry)
        known = set(found)
        full = self._geometry.whole_chunks(len(names))
        wanted = keys_of(cache.namespace, held_names(names, full, self._geometry), self._geometry)
        return [*found, *(key for key in wanted if key not in known)]

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        return keys_of(cache.namespace, all_names(names, self._geometry), self._geometry)

    async def _names(self, prefix: Prefix) -> list[bytes]:
        lora = (prefix.lora.name, prefix.lora.path) if prefix.lora is not None else None
        return await self.names.of_tokens(prefix.tokens or (), prefix.cache_salt, lora)
