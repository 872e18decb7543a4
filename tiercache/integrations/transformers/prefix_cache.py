"""Load prefixes of conversations from a TierCache into a `transformers.Cache`, and store them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from tiercache.cache import TierCache
from tiercache.core.keys import KEY_BYTES, ChunkKey, keys_from_hashes, tenant_of
from tiercache.errors import LayoutError
from tiercache.integrations.transformers.kv_cache import Landing, TieredCache
from tiercache.integrations.transformers.model_kv import ModelKv
from tiercache.integrations.transformers.parts import needed

Ids = Sequence[int] | np.ndarray
"""Token ids of one conversation from its first token on, without padding."""


class PrefixCache:
    """Bound to the event loop of `cache`, which has to be opened with `kv.layout`.

    Token ids name the chunks, so the KV must depend on `ids` alone: no embeddings, images, custom positions or masks. A
    model that remembers the positions of an earlier image, such as Qwen2-VL, needs `position_ids` from 0 on. Under
    autocast the model raises LayoutError. Assisted decoding cannot continue a hit, since it computes the prefix again.
    """

    def __init__(self, cache: TierCache, kv: ModelKv) -> None:
        if cache.layout != kv.layout:
            raise LayoutError("the cache was opened with another layout than this model's: open it with `kv.layout`")
        self.cache = cache
        self.kv = kv

    async def load(self, ids: Ids, *, salt: str = "") -> TieredCache:
        """Load the longest stored prefix of `ids` in whole chunks, at least one token shorter than `ids`.

        The result is empty after a miss. A model has to compute at least one token to continue. `salt` separates
        tenants. Chunks have `blocking_timeout_secs` to come. Raises LayoutError if the model's weights have changed since
        `kv` read them. Cancellation keeps nothing.
        """
        past = TieredCache(self.kv, salt)
        names = self._names(self.keys(ids[: max(0, len(ids) - 1)], salt=salt))
        await asyncio.to_thread(self.kv.check_unchanged)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.cache.config.blocking_timeout_secs
        chunks, counts = len(names[0]), True
        while True:
            chunks, past.hit_by_tier = await self._reach(names, chunks, counts=counts)
            counts = False
            if not chunks:
                return past
            landing = Landing(self.kv, chunks)
            wanted = needed(self.kv.parts, chunks, self.kv.chunk_tokens)
            sinks = [partial(landing.land, self.kv.parts[part], chunk) for chunk, part in wanted]
            keys = [names[part][chunk] for chunk, part in wanted]
            delivered = await self.cache.get_to(keys, sinks, deadline_s=max(0.0, until_s - loop.time()))
            if delivered == len(wanted):
                await asyncio.to_thread(past.take, landing.tensors, names[0][:chunks])
                return past
            # The chunk was removed after the lookup, or is late. A shorter hit needs earlier chunks of the windows.
            chunks = wanted[delivered][0]

    async def store(self, past: TieredCache, ids: Ids) -> int:
        """Store the KV computed since the load, in whole chunks. Return the number of tokens of `ids` that are hot now.

        `ids` are all tokens in `past`, and optionally the next token, which `generate` returns without computing its
        KV. `past` is read until this returns, and no model may continue it before. Raises ValueError if `past` does not
        match `ids`. Raises LayoutError, and stores nothing, if `past` is of another model or the weights have changed
        since `kv` read them.
        """
        if past.kv.layout != self.kv.layout:
            raise LayoutError("what was computed is of another model than what is stored here")
        await asyncio.to_thread(past.kv.check_unchanged)
        tokens = past.get_seq_length()
        if tokens not in (len(ids), len(ids) - 1):
            raise ValueError(f"expected the ids of the {tokens} tokens that were computed, found {len(ids)}")
        keys = self.keys(ids[:tokens], salt=past.salt)
        hit_chunks = past.hit_tokens // self.kv.chunk_tokens
        if keys[:hit_chunks] != past.stored_keys[:hit_chunks]:
            raise ValueError(
                "the ids do not begin with those of the prefix that was loaded: this is another conversation"
            )
        known = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(keys, past.stored_keys, strict=False))))
        names = self._names(keys)
        items = [
            (names[number][chunk], part.bytes_per_token * self.kv.chunk_tokens, partial(past.fill, part, chunk))
            for chunk in range(known, len(keys))
            for number, part in enumerate(self.kv.parts)
        ]
        stored = await self.cache.put_from(items, prefix=True) if items else 0
        past.stored_keys = keys[: known + stored // len(self.kv.parts)]
        return len(past.stored_keys) * self.kv.chunk_tokens

    def keys(self, ids: Ids, *, salt: str = "") -> list[ChunkKey]:
        """Return the names of the whole chunks of `ids`, for all layers.

        With sliding windows, each name stands for several chunks of the cache.
        """
        whole = len(ids) // self.kv.chunk_tokens * self.kv.chunk_tokens
        return self.cache.keys(ids[:whole], salt=salt)

    def stored_as(self, ids: Ids, *, salt: str = "") -> list[ChunkKey]:
        """Return the cache's chunks needed to continue `ids`, for `prefetch`, `ahead`, `warm_soon` and `forget`."""
        names = self._names(self.keys(ids, salt=salt))
        return [names[part][chunk] for chunk, part in needed(self.kv.parts, len(names[0]), self.kv.chunk_tokens)]

    def _names(self, keys: list[ChunkKey]) -> list[list[ChunkKey]]:
        """Return the names of the chunks of each part. Those of the first part are `keys`."""
        if not keys:
            return [[] for _ in self.kv.parts]
        tenant, hashes = tenant_of(keys[0]), [key[:KEY_BYTES] for key in keys]
        others = [keys_from_hashes(b"part %d" % number, hashes, tenant) for number in range(1, len(self.kv.parts))]
        return [keys, *others]

    async def _reach(self, names: list[list[ChunkKey]], chunks: int, *, counts: bool) -> tuple[int, dict[str, int]]:
        """Return how many chunks, at most `chunks`, a hit can have, and its tokens by tier.

        Every chunk that the windows of such a hit need is stored. The tokens by tier are those of the layers with the
        longest window. `counts` says that this is the first question about a prompt.
        """
        while chunks:
            by_tier: list[dict[str, int]] = []
            for part, keys in zip(self.kv.parts, names, strict=True):
                first = part.first_chunk(chunks, self.kv.chunk_tokens)
                hit = await self.cache.lookup_keys(keys[first:chunks], counts=counts)
                counts = False
                by_tier.append({tier: found * self.kv.chunk_tokens for tier, found in hit.by_tier.items()})
                if first + hit.chunks < chunks:
                    chunks = first + hit.chunks
                    break
            else:
                return chunks, by_tier[0]
        return 0, {}
