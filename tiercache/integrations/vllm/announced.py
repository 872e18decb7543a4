"""The chunks of a prompt that was announced by its token ids: those that a request of these tokens will look for."""

from __future__ import annotations

from tiercache.control.messages import Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey, keys_from_hashes
from tiercache.integrations.vllm.block_names import BlockNames
from tiercache.integrations.vllm.lookup import locate
from tiercache.integrations.vllm.planning import BlockGeometry, chunk_ends


class AnnouncedPrompts:
    """The connector's `Naming`. `names` is the worker's own, which follows the scheduler's through resets."""

    def __init__(self, names: BlockNames, geometry: BlockGeometry) -> None:
        self.names = names
        self._geometry = geometry

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """As a request finds them: full chunks as far as there are any, the longest tail behind them, then what is
        missing."""
        if (given := await given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        match, found = await locate(cache, names, self._geometry)
        full = chunk_ends(len(names), self._geometry)
        missing = [names[end - 1] for end in full if end > match.blocks]
        return [*found, *keys_from_hashes(cache.namespace, missing)]

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := await given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        if not self._geometry.save_tails:
            names = [names[end - 1] for end in chunk_ends(len(names), self._geometry)]
        return keys_from_hashes(cache.namespace, names)

    async def _names(self, prefix: Prefix) -> list[bytes]:
        lora = (prefix.lora.name, prefix.lora.path) if prefix.lora is not None else None
        return await self.names.of_tokens(prefix.tokens or (), prefix.cache_salt, lora)
