"""Find the chunks of the prefix in a control message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tiercache.control.messages import ControlError, Prefix
from tiercache.control.served import ServedCache
from tiercache.core.keys import KEY_BYTES, ChunkKey, chunk_keys

_TOKENS_AT_ONCE = 16 << 10


class Naming(Protocol):
    """The mapping from prefixes to chunk keys. Both methods raise ControlError for a prefix without keys."""

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """Return the prefix's chunk keys in order, as a request that begins with it looks them up."""

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """Return those keys and the keys of every shorter chunk that may end inside the prefix, in no order."""


class TokenNaming:
    """Map prefixes in a cache that stores and loads by token ids (`cache.store`, `cache.load`) or by keys.

    Yields to the loop between short steps, and maps one prompt at a time.
    """

    def __init__(self) -> None:
        self._naming = asyncio.Lock()

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is not None:
            return given
        if prefix.lora is not None:
            raise ControlError(
                "refused", "lora is known to a cache in vLLM only; this one names chunks by their token ids"
            )
        async with self._naming:
            return await _hashed(cache, prefix.tokens or (), prefix.cache_salt)

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        return await self.keys(cache, prefix)


async def _hashed(cache: ServedCache, tokens: Sequence[int], salt: str) -> list[ChunkKey]:
    """Compute the keys in steps. Each step continues from the last key, since a key depends on the previous one."""
    chunk_tokens = cache.layout.chunk_tokens
    namespace, tenant = cache.layout.named_by(cache.config.tenant_salt, salt)
    step = max(1, _TOKENS_AT_ONCE // chunk_tokens) * chunk_tokens
    keys: list[ChunkKey] = []
    for start in range(0, len(tokens), step):
        if start:
            await asyncio.sleep(0)
        before = keys[-1][:KEY_BYTES] if keys else namespace
        part = tokens[start : start + step]
        keys += chunk_keys(before, part, chunk_tokens, partial=bool(cache.config.save_unfull_chunk), tenant=tenant)
    return keys


def given_keys(prefix: Prefix) -> list[ChunkKey] | None:
    """Return the keys of a message, or None if it has tokens. Raises ControlError if it has both or neither."""
    if (prefix.tokens is None) == (prefix.keys is None):
        found = "neither" if prefix.tokens is None else "both"
        raise ControlError("malformed", f"expected either tokens (ids) or keys (hex), found {found}")
    return None if prefix.keys is None else [bytes.fromhex(key) for key in prefix.keys]
