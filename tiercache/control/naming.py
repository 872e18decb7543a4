"""From the prefix that a control message speaks of to the chunks that the cache knows it by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tiercache.control.messages import ControlError, Prefix
from tiercache.core.keys import ChunkKey

if TYPE_CHECKING:
    from tiercache.cache import TierCache


class Naming(Protocol):
    """How the program that owns the cache names prefixes. Both raise ControlError for what cannot be named."""

    async def keys(self, cache: TierCache, prefix: Prefix) -> list[ChunkKey]:
        """Its chunks, in order: what a request that begins with it would look for."""

    async def all_keys(self, cache: TierCache, prefix: Prefix) -> list[ChunkKey]:
        """Those, and every shorter chunk that may lie behind some part of it; in no order."""


class TokenNaming:
    """Of a cache whose program stores and loads by token ids (`cache.store`, `cache.load`) or by keys."""

    async def keys(self, cache: TierCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is not None:
            return given
        if prefix.cache_salt or prefix.lora is not None:
            raise ControlError(
                "refused", "cache_salt and lora are known to a cache in vLLM only; this one names chunks by their token ids"
            )
        return cache.keys(prefix.tokens or ())

    async def all_keys(self, cache: TierCache, prefix: Prefix) -> list[ChunkKey]:
        return await self.keys(cache, prefix)


def given_keys(prefix: Prefix) -> list[ChunkKey] | None:
    """The keys that a message itself has; None where it has tokens. Raises ControlError unless it has one of the two."""
    if (prefix.tokens is None) == (prefix.keys is None):
        found = "neither" if prefix.tokens is None else "both"
        raise ControlError("malformed", f"expected either tokens (ids) or keys (hex), found {found}")
    return prefix.chunk_keys
