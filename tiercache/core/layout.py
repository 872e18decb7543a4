"""The meaning of a chunk's bytes, and the fingerprint that separates chunks of different meaning."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import index

from tiercache.core.compression import item_bytes
from tiercache.core.keys import KEY_BYTES, Tenant, salt_bytes, tenant_tag

FINGERPRINT_BYTES = 16
_NUMBERS = (
    *("chunk_tokens", "bytes_per_token", "layers", "kv_heads", "head_size", "block_tokens"),
    *("rank", "world_size", "replicas", "parts"),
)


@dataclass(frozen=True)
class Layout:
    """The meaning of a chunk's bytes. Every property that changes the bytes is a field, and `fingerprint` covers it.

    `bytes_per_token` is the KV of one token over all layers that this rank holds. `byte_format` names the order of
    the bytes inside a chunk (for vLLM: shape, strides and attention back end); `engine` names the engine that wrote them.
    `extra` carries fields of a particular engine (LoRA base, quantisation of the weights, ...).

    `replicas` consecutive ranks hold the same bytes (MLA's latents; fewer KV heads than ranks). The fingerprint has the
    `shard`, which they share, and not the rank: each rank finds the chunks that any of them stored.

    With `parts` a chunk is a part of the KV, the number of the part is in the chunk's name, and each rank has its own
    parts. All ranks then have the same fingerprint, which does not depend on their number.
    """

    model: str
    chunk_tokens: int
    bytes_per_token: int
    kv_dtype: str = "bfloat16"
    revision: str = ""
    layers: int = 0
    kv_heads: int = 0
    head_size: int = 0
    block_tokens: int = 0
    byte_format: str = "opaque"
    engine: str = ""
    rank: int = 0
    world_size: int = 1
    extra: tuple[tuple[str, str], ...] = ()
    replicas: int = 1
    parts: int = 0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            try:
                object.__setattr__(self, name, int(index(getattr(self, name))))  # numpy's too
            except TypeError:
                raise TypeError(f"layout: {name} must be a whole number, found {getattr(self, name)!r}") from None
        for name in ("chunk_tokens", "bytes_per_token", "world_size", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout: {name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"layout: rank must be within 0..{self.world_size - 1}, found {self.rank}")
        if self.world_size % self.replicas:
            raise ValueError(f"layout: world_size ({self.world_size}) must be a multiple of replicas ({self.replicas})")
        if self.block_tokens and self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"layout: chunk_tokens ({self.chunk_tokens}) must be a multiple of block_tokens ({self.block_tokens})"
            )

    @property
    def chunk_bytes(self) -> int:
        """Payload of a full chunk, in bytes."""
        return self.chunk_tokens * self.bytes_per_token

    @property
    def item_bytes(self) -> int:
        """Length of one number of the KV, in bytes."""
        return item_bytes(self.kv_dtype)

    @property
    def shard(self) -> int:
        """Number of the part of the KV that this rank holds, as far as the fingerprint distinguishes parts."""
        return 0 if self.parts else self.rank // self.replicas

    @property
    def shards(self) -> int:
        """Number of parts that the fingerprints of the ranks distinguish."""
        return 1 if self.parts else self.world_size // self.replicas

    def keeps(self, key: bytes) -> bool:
        """Return True if this rank writes the chunk `key` to shared tiers, among the ranks that hold the same bytes.

        Each of them has an equal part of all keys.
        """
        return int.from_bytes(key[KEY_BYTES - 4 : KEY_BYTES]) % self.replicas == self.rank % self.replicas

    @cached_property
    def fingerprint(self) -> bytes:
        """A 16-byte hash that differs whenever a field differs that changes the bytes.

        Ranks that hold the same bytes have the same hash; with `parts` all ranks have. It is the same in every process
        and on every machine.
        """
        fields = asdict(self) | {"rank": self.shard, "world_size": self.shards}
        del fields["replicas"]
        if not self.parts:
            del fields["parts"]  # fingerprints of chunks in one piece do not depend on it
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.blake2b(canonical, digest_size=FINGERPRINT_BYTES, person=b"tiercache-layout").digest()

    def namespace(self, salt: str = "", request_salt: str = "") -> bytes:
        """Return the 24-byte seed of the key chain, so that layouts and tenants never share a key.

        `salt` belongs to the whole cache, `request_salt` to a request.
        """
        seed = hashlib.blake2b(self.fingerprint, digest_size=KEY_BYTES, person=b"tiercache-space1")
        seed.update(salt_bytes(salt))
        if not request_salt:
            return seed.digest()
        return hashlib.blake2b(
            salt_bytes(request_salt), digest_size=KEY_BYTES, key=seed.digest(), person=b"tiercache-space2"
        ).digest()

    def named_by(self, salt: str, request_salt: str = "") -> tuple[bytes, Tenant]:
        """Return the namespace of a tenant and its tag, the arguments of `chunk_keys`."""
        return self.namespace(salt, request_salt), tenant_tag(salt, request_salt)
