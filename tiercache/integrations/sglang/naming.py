"""How the control socket of a cache in SGLang names pages: by their keys alone."""

from __future__ import annotations

from tiercache.control.messages import ControlError, Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey


class PageNaming:
    """SGLang hashes tokens itself, in a way that changes with speculation, LoRA and salt. What was named in another way
    would be found nowhere, so it is refused."""

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is None:
            raise ControlError(
                "refused", "a cache in SGLang names pages by SGLang's hashes: expected keys, found tokens"
            )
        return given

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        return await self.keys(cache, prefix)
