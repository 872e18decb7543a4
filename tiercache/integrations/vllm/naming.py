"""Names for the blocks of a request: one for each full block, chained over the whole prefix, the same in every process.

vLLM has such names already (`request.block_hashes`): SHA-256 over the block before, the token ids, and what else changes the
KV (LoRA adapter, multimodal items with their place, cache salt, prompt embeddings); its seed is fixed unless PYTHONHASHSEED
is set. With a hash that is not cryptographic the seed is random in each process, and two prefixes may be made to collide, so
then we hash for ourselves what vLLM would have hashed.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NAME_BYTES = 32
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


class BlockNames:
    """`extend` brings a request's list of names up to date, at a cost that grows with the new blocks only."""

    def __init__(self, hash_algorithm: str, block_tokens: int) -> None:
        self.from_engine = hash_algorithm in _CRYPTOGRAPHIC
        self._block_tokens = block_tokens
        self._generation = b""

    def forget_everything(self) -> None:
        """From now on no name is one that was ever given before, here or elsewhere."""
        self._generation = os.urandom(16)

    def extend(self, names: list[bytes], request: Request) -> list[bytes]:
        """Append the names of the blocks that `names` lacks; returns `names`."""
        if not self.from_engine:
            for block in range(len(names), request.num_tokens // self._block_tokens):
                names.append(self._own_name(names[-1] if names else self._generation, request, block))
        elif self._generation:
            names += [
                hashlib.blake2b(value, digest_size=_NAME_BYTES, key=self._generation).digest()
                for value in request.block_hashes[len(names) :]
            ]
        else:
            names += request.block_hashes[len(names) :]
        return names

    def _own_name(self, before: bytes, request: Request, block: int) -> bytes:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        start, end = block * self._block_tokens, (block + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        tokens = np.asarray(request.all_token_ids[start:end], dtype="<i8").tobytes()
        content = msgspec.msgpack.encode((before, tokens, extra))
        return hashlib.blake2b(content, digest_size=_NAME_BYTES).digest()
