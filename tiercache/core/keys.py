"""Chunk keys: a chained cryptographic hash over token ids.

A key is BLAKE2b-192 of the key before it and the chunk's tokens, so it stands for the whole prefix. BLAKE2b is used rather
than a fast hash because a key must not collide and must not be forgeable between tenants; 24 bytes because a Python `bytes`
of 16 and one of 24 take the same memory.

A tenant is defined by its salt. The 24 bytes of its keys are followed by its tag, an 8-byte hash of the salt, so that every
tier and process knows the tenant of a chunk from the chunk's name. The tag does not isolate tenants; the salt, which is
hashed into the 24 bytes, does. A key without a salt has no tag.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

ChunkKey = bytes
Item = TypeVar("Item", bound="tuple[Any, ...]")
"""A tuple that begins with a key."""
Tenant = bytes
"""The tag of a tenant; empty for keys without a salt."""
KEY_BYTES = 24
"""Length of a key without a tag."""
TAG_BYTES = 8
TAGGED_KEY_BYTES = KEY_BYTES + TAG_BYTES
HEX_KEY = rf"(?:[0-9a-f]{{{2 * KEY_BYTES}}}|[0-9a-f]{{{2 * TAGGED_KEY_BYTES}}})"
"""A regular expression for a key in file names and messages."""
SHORTEST_HASH_BYTES = 16

_TOKEN_BYTES = 4
# The C type with four bytes depends on the platform; the hashed bytes are little-endian everywhere.
_TOKEN_TYPECODE = "I" if array("I").itemsize == _TOKEN_BYTES else "L"
_LITTLE_ENDIAN = np.dtype("<u4")


def chunk_keys(
    namespace: bytes,
    tokens: Sequence[int] | np.ndarray,
    chunk_tokens: int,
    *,
    partial: bool = False,
    tenant: Tenant = b"",
) -> list[ChunkKey]:
    """Return the keys of the consecutive chunks of `tokens` (ids in 0 .. 2**32 - 1), in order.

    `namespace` comes from `Layout.namespace`, or is the previous chunk's key without its tag. A tail shorter than
    `chunk_tokens` gets a key only with `partial`. `tenant` is the tag of the tenant whose salt is in the namespace.
    Raises OverflowError or ValueError for an id out of range.
    """
    raw = _token_bytes(tokens)
    step = chunk_tokens * _TOKEN_BYTES
    end = len(raw) if partial else len(raw) - len(raw) % step
    keys = []
    key = namespace
    blake2b = hashlib.blake2b
    for start in range(0, end, step):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(raw[start : min(start + step, end)])
        key = digest.digest()
        keys.append(key)
    return [key + tenant for key in keys] if tenant else keys


def tenant_tag(*salts: str) -> Tenant:
    """Return the tag of the tenant with these salts, ignoring empty salts; empty if all are.

    A salt that can be guessed reveals its tag, so it must be as hard to guess as a password.
    """
    found = [salt_bytes(salt) for salt in salts if salt]
    if not found:
        return b""
    tag = hashlib.blake2b(digest_size=TAG_BYTES, person=b"tiercache-tenant")
    for salt in found:
        tag.update(len(salt).to_bytes(8, "little") + salt)
    return tag.digest()


def salt_bytes(salt: str) -> bytes:
    """Encode a salt, lone surrogates included. Raises TypeError unless it is a str."""
    if not isinstance(salt, str):
        raise TypeError(f"salt: expected a text, found {type(salt).__name__}")
    return salt.encode("utf-8", "surrogatepass")


def tenant_of(key: ChunkKey) -> Tenant:
    """Return the tag of the tenant that the chunk belongs to."""
    return key[KEY_BYTES:]


def check_keys(keys: Iterable[ChunkKey]) -> None:
    """Raise TypeError or ValueError, with what was expected and found, unless all are keys."""
    for key in keys:
        if type(key) is not bytes or (len(key) != KEY_BYTES and len(key) != TAGGED_KEY_BYTES):
            raise _no_key(key)


def check_one_each(keys: Sequence[ChunkKey], things: Sequence[object], name: str) -> None:
    """Check keys as `check_keys` does. Raises ValueError unless there are as many `things`, whose singular is `name`."""
    check_keys(keys)
    if len(keys) != len(things):
        raise ValueError(f"expected one {name} a key: {len(keys)} keys, {len(things)} {name}s")


def check_key(key: ChunkKey) -> None:
    """Check one key as `check_keys` does."""
    if type(key) is not bytes or (len(key) != KEY_BYTES and len(key) != TAGGED_KEY_BYTES):
        raise _no_key(key)


def each_once(items: Sequence[Item]) -> Sequence[Item]:
    """Return the first of the `items` with each key. An item begins with its key."""
    if len(items) == 1:
        return items
    first: dict[ChunkKey, Item] = {}
    for item in items:
        first.setdefault(item[0], item)
    return items if len(first) == len(items) else list(first.values())


def _no_key(found: object) -> Exception:
    expected = f"key: expected {KEY_BYTES} bytes, or {TAGGED_KEY_BYTES} (from `cache.keys` or `keys_from_hashes`), found"
    if isinstance(found, bytes):
        return ValueError(f"{expected} {len(found)} bytes")
    return TypeError(f"{expected} {type(found).__name__}")


def keys_from_hashes(namespace: bytes, hashes: Sequence[bytes], tenant: Tenant = b"") -> list[ChunkKey]:
    """Return a key for each hash that an engine already has.

    The hashes must be chained and cryptographic themselves. With a `tenant` (from `tenant_tag`) its salt must be in
    them, or in the namespace. Raises TypeError unless all are bytes, and ValueError for a hash of fewer than 16 bytes.
    """
    for position, value in enumerate(hashes):
        if not isinstance(value, bytes):
            raise TypeError(f"hashes: expected bytes, found {type(value).__name__} at position {position}")
        if len(value) < SHORTEST_HASH_BYTES:
            raise ValueError(
                f"hashes: expected at least {SHORTEST_HASH_BYTES} bytes (a shorter one is no cryptographic hash), found "
                f"{len(value)} at position {position}"
            )
    blake2b = hashlib.blake2b
    keys = [blake2b(value, digest_size=KEY_BYTES, key=namespace).digest() for value in hashes]
    return [key + tenant for key in keys] if tenant else keys


def _token_bytes(tokens: Sequence[int] | np.ndarray) -> memoryview:
    """Return the ids as little-endian 32-bit integers."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: expected a vector of integers, found {tokens.dtype} of shape {tokens.shape}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >> 32):
            raise OverflowError("tokens: ids must be within 0 .. 2**32 - 1")
        return np.ascontiguousarray(tokens, dtype=_LITTLE_ENDIAN).data.cast("B")
    if hasattr(tokens, "numpy"):
        return _token_bytes(tokens.numpy())
    if isinstance(tokens, bytes | bytearray | memoryview):
        tokens = list(tokens)  # an array would take four bytes for one id
    packed = array(_TOKEN_TYPECODE, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")
