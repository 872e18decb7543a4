"""Names for the blocks of a request: one for each full block, chained over the prefix, the same in every process.

vLLM has such names (`request.block_hashes`): SHA-256 over the block before, the token ids, and what else changes the KV
(name and path of the LoRA adapter, multimodal items with their place, cache salt, prompt embeddings). Their seed is fixed
unless PYTHONHASHSEED is set. This module adds the content of the adapter, and the tag of the tenant for a request with a
salt.

vLLM assumes that an adapter's content never changes under its name and path. That holds while an engine lives, but a cache
outlives engines. So the content is part of the names if the engine has certainly loaded the present files, that is, if
they last changed before the engine began, and were there at the first request for the adapter and since. Other adapters
get names that only this engine finds, and only until the files change: a link may lead to other old files, and the engine
does not load them at once. A thread checks the files for each request, since they may change at any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tiercache.core.keys import tenant_tag
from tiercache.errors import ConfigError
from tiercache.integrations.model_files import (
    GRAIN_NS,
    Stamp,
    adapter_files,
    identity_of_adapter,
    place_of,
    stamp_of,
)
from tiercache.integrations.vllm.planning import NAME_BYTES

logger = logging.getLogger("tiercache.vllm")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_AT_ONCE = 32
"""Blocks that are named in a row before other tasks of the loop may run."""
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_hashes(config: VllmConfig) -> None:
    """Raise ConfigError unless vLLM's block hashes are cryptographic: others may collide or differ with each start."""
    if (algorithm := config.cache_config.prefix_caching_hash_algo) not in _CRYPTOGRAPHIC:
        raise ConfigError(
            f"prefix_caching_hash_algo: expected {' or '.join(_CRYPTOGRAPHIC)}, found {algorithm}, which is not "
            "cryptographic; start vLLM with --prefix-caching-hash-algo sha256"
        )


class BlockNames:
    """Gives blocks their names. `extend` adds those that a request's list lacks; its cost grows with the new blocks only."""

    def __init__(
        self,
        hash_algorithm: str,
        block_tokens: int,
        hash_tokens: int | None = None,
        tenant_salt: str = "",
    ) -> None:
        """`hash_tokens` is the number of tokens per hash of the engine, by default a block; blocks are multiples of it.

        `tenant_salt` is the salt of the whole cache, which is also in the namespace.
        """
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens or block_tokens
        self._algorithm = hash_algorithm
        self._generation = b""
        self._tenant_salt = tenant_salt
        self._tag = tenant_tag(tenant_salt)
        self.adapters = Adapters(place_of)

    def forget_everything(self) -> bytes:
        """Begin a new generation, whose names no process has given before. Return the generation."""
        self._generation = os.urandom(16)
        return self._generation

    def follow(self, generation: bytes) -> None:
        """Use the `generation` that another process's `forget_everything` returned, so that both give the same names."""
        self._generation = generation

    async def of_tokens(self, tokens: Sequence[int], cache_salt: str, lora: tuple[str, str] | None) -> list[bytes]:
        """Return the names that a request with these tokens, this salt and this adapter (name and path) gets.

        Uses vLLM's own hashing, and lets other tasks of the loop run between blocks. Requests with images, audio or
        embeddings have other names, which cannot be computed from tokens.
        """
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            generate_block_hash_extra_keys,
            hash_block_tokens,
            resolve_none_hash_seed,
        )

        adapter = b""
        if lora:
            # Requests share the future, so a caller that is cancelled must not cancel it.
            known: bytes | None = await asyncio.shield(asyncio.wrap_future(self.adapters.key_of(lora[1])))
            adapter = known or nobodys_key()
        size = self._hash_tokens
        # The fields that vLLM's hashing reads.
        request: Any = SimpleNamespace(
            all_token_ids=list(tokens),
            num_tokens=len(tokens),
            cache_salt=cache_salt or None,
            lora_request=SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None,
            block_hashes=[],
            mm_features=(),
            prompt_embeds=None,
        )
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
        """Append the names of the blocks that `names` lacks; return `names`. `adapter` is the key from `Adapters.key_of`."""
        key = self._generation + adapter
        tag = tenant_tag(self._tenant_salt, request.cache_salt) if request.cache_salt else self._tag
        a_block = self._block_tokens // self._hash_tokens
        new = request.block_hashes[(len(names) + 1) * a_block - 1 :: a_block]
        if key:
            new = [hashlib.blake2b(value, digest_size=NAME_BYTES, key=key).digest() for value in new]
        names += [value + tag for value in new] if tag else new
        return names


Stamps = tuple[tuple[str, Stamp], ...]


class Adapters:
    """Identifies LoRA adapters by content, in a thread: `key_of` never waits. Thread-safe."""

    def __init__(self, place_of: Callable[[str], Path | None], since_ns: int | None = None) -> None:
        """`place_of` finds the directory of an adapter's path. The engine loads none before `since_ns` (default: now)."""
        self._place_of = place_of
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._secret = os.urandom(16)
        self._known: dict[str, tuple[Stamps, bytes | None]] = {}
        """The present files of each path, and the key of their content; None once the engine may have loaded others."""
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        """Held by the running check: one at a time."""
        self._waiting: dict[str, Future[bytes | None]] = {}
        """Checks that have not begun, by path. All requests for the adapter share one, so a mount that hangs holds few."""

    def key_of(self, path: str) -> Future[bytes | None]:
        """Return a future for the key that enters the names of the adapter's blocks besides vLLM's hash.

        The key is None for an adapter that cannot be read. The future never has an exception, and must not be cancelled.
        It has no result while the adapters' mount hangs: wait with a time limit.
        """
        with self._lock:
            if (future := self._waiting.get(path)) is None:
                future = self._waiting[path] = Future()
                try:
                    threading.Thread(target=self._answer, args=(path,), name="tiercache-adapters", daemon=True).start()
                except RuntimeError:  # no more threads
                    self._waiting.pop(path).set_result(None)
        return future

    def _answer(self, path: str) -> None:
        with self._checking:
            with self._lock:
                future = self._waiting.pop(path)
            try:
                key = self._find(path)
            except Exception as error:
                logger.warning("adapter %s is not identified, and its requests share no KV: %r", path, error)
                key = None
        future.set_result(key)

    def _find(self, path: str) -> bytes | None:
        place = self._place_of(path)
        if place is None:
            return None
        stamps = _stamps(place)
        is_young = any(max(stamp[1:3]) > self._since_ns - GRAIN_NS for _, stamp in stamps)
        known = self._known.get(path)
        if known is None and not is_young:
            known = stamps, b"adapter " + bytes.fromhex(identity_of_adapter(place))
            if _stamps(place) != stamps:
                return None
        elif known is None or known[0] != stamps:
            known = stamps, None
        self._known[path] = known
        private = hashlib.blake2b(repr((path, stamps)).encode(), digest_size=24, key=self._secret).digest()
        return known[1] or private


def nobodys_key() -> bytes:
    """Return a random key for an unknown adapter. No other request has it, so nothing is ever found by it."""
    return os.urandom(24)


def _stamps(place: Path) -> Stamps:
    """Return the stamps of the adapter's files, and of the links on the way to them."""
    place = place.absolute()
    links = [(str(one), stamp_of(one.lstat())) for one in (place, *place.parents) if one.is_symlink()]
    return (*links, *((name, stamp_of(path.stat())) for name, path in sorted(adapter_files(place).items())))
