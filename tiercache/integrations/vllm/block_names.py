"""Names for the blocks of a request: one for each full block, chained over the whole prefix, the same in every process.

vLLM has such names already (`request.block_hashes`): SHA-256 over the block before, the token ids, and what else changes the
KV (name and path of the LoRA adapter, multimodal items with their place, cache salt, prompt embeddings); its seed is fixed
unless PYTHONHASHSEED is set. What the adapter holds is added here, and behind the name of a request with a salt stands
the tag of its tenant. With a hash that is not cryptographic the seed is random
in each process, and two prefixes may be made to collide, so then we hash for ourselves what vLLM would have hashed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tiercache.core.keys import tenant_tag
from tiercache.integrations.vllm.adapters import Adapters
from tiercache.integrations.vllm.model_in_vllm import place_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

NAME_BYTES = 32
"""Of a name, without its tenant's tag."""
_AT_ONCE = 32
"""Blocks that are named without letting others run."""
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


@dataclass
class _Adapter:
    lora_name: str
    lora_path: str


@dataclass
class _Announced:
    """What vLLM's hashing reads of a request, for one that is still to come."""

    all_token_ids: list[int]
    cache_salt: str | None
    lora_request: _Adapter | None
    block_hashes: list[bytes] = field(default_factory=list)
    mm_features: tuple[()] = ()
    prompt_embeds: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class BlockNames:
    """`extend` brings a request's list of names up to date, at a cost that grows with the new blocks only."""

    def __init__(
        self,
        hash_algorithm: str,
        block_tokens: int,
        hash_tokens: int | None = None,
        adapters: Adapters | None = None,
        tenant_salt: str = "",
    ) -> None:
        """The engine hashes every `hash_tokens` tokens, of which blocks are multiples; by default every block. `tenant_salt`
        is the whole cache's, which the namespace has."""
        self.from_engine = hash_algorithm in CRYPTOGRAPHIC
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens or block_tokens
        self._algorithm = hash_algorithm
        self._generation = b""
        self._tenant_salt = tenant_salt
        self._tag = tenant_tag(tenant_salt)
        self.adapters = adapters or Adapters(place_of)

    def forget_everything(self) -> bytes:
        """From now on no name is one that was ever given before, here or elsewhere. Returns what makes them so."""
        self._generation = os.urandom(16)
        return self._generation

    def follow(self, generation: bytes) -> None:
        """Give the names that another process gives since its `forget_everything` returned `generation`."""
        self._generation = generation

    async def of_tokens(self, tokens: Sequence[int], cache_salt: str, lora: tuple[str, str] | None) -> list[bytes]:
        """The names that a request of these tokens gets, with its salt and its adapter (name and path), if any.

        By vLLM's own hashing. Lets others run on the loop between blocks. Requests with images, audio or embeddings have
        other names, which cannot be known from tokens.
        """
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            generate_block_hash_extra_keys,
            hash_block_tokens,
            resolve_none_hash_seed,
        )

        adapter = await asyncio.wrap_future(self.adapters.key_of(lora[1])) if lora else b""
        size = self._hash_tokens
        request: Any = _Announced(list(tokens), cache_salt or None, lora and _Adapter(*lora))
        if self.from_engine:
            hash_function = get_hash_fn_by_name(self._algorithm)
            before = hash_function(resolve_none_hash_seed(hash_function))
            for number, start in enumerate(range(0, len(tokens) - size + 1, size)):
                extra, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
                before = hash_block_tokens(hash_function, before, request.all_token_ids[start : start + size], extra)
                request.block_hashes.append(before)
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
        return self.extend([], request, adapter)

    def extend(self, names: list[bytes], request: Request, adapter: bytes = b"") -> list[bytes]:
        """Append the names of the blocks that `names` lacks; returns `names`. `adapter`: what `Adapters` knows of its."""
        key = self._generation + adapter
        tag = tenant_tag(self._tenant_salt, request.cache_salt) if request.cache_salt else self._tag
        if not self.from_engine:
            for block in range(len(names), request.num_tokens // self._block_tokens):
                before = names[-1][:NAME_BYTES] if names else key
                names.append(self._own_name(before, request, block) + tag)
            return names
        a_block = self._block_tokens // self._hash_tokens
        new = request.block_hashes[(len(names) + 1) * a_block - 1 :: a_block]
        if key:
            new = [hashlib.blake2b(value, digest_size=NAME_BYTES, key=key).digest() for value in new]
        names += [value + tag for value in new] if tag else new
        return names

    def _own_name(self, before: bytes, request: Request, block: int) -> bytes:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        start, end = block * self._block_tokens, (block + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        tokens = np.asarray(request.all_token_ids[start:end], dtype="<i8").tobytes()
        content = msgspec.msgpack.encode((before, tokens, extra))
        return hashlib.blake2b(content, digest_size=NAME_BYTES).digest()
