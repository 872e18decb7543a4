"""Find the chunks of the prefix in a control message."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tiercache.control.messages import ControlError, Prefix
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey


class Naming(Protocol):
    """The mapping from prefixes to chunk keys. Both methods raise ControlError for a prefix without keys."""

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """Return the prefix's chunk keys in order, as a request that begins with it looks them up."""

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """Return those keys and the keys of every shorter chunk that may end inside the prefix, in no order."""


class TokenNaming:
    """Map prefixes in a cache that stores and loads by token ids (`cache.store`, `cache.load`) or by keys."""

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is not None:
            return given
        if prefix.lora is not None:
            raise ControlError(
                "refused", "lora is known to a cache in vLLM only; this one names chunks by their token ids"
            )
        # A long prompt takes tens of milliseconds.
        return await asyncio.to_thread(cache.keys, prefix.tokens or (), salt=prefix.cache_salt)

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        return await self.keys(cache, prefix)


def given_keys(prefix: Prefix) -> list[ChunkKey] | None:
    """Return the keys of a message, or None if it has tokens. Raises ControlError if it has both or neither."""
    if (prefix.tokens is None) == (prefix.keys is None):
        found = "neither" if prefix.tokens is None else "both"
        raise ControlError("malformed", f"expected either tokens (ids) or keys (hex), found {found}")
    return None if prefix.keys is None else [bytes.fromhex(key) for key in prefix.keys]
