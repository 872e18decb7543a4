"""xxh3-64 of device memory without a trip through the host: the same digest as in every chunk's header.

XXH3 by Yann Collet (xxHash 0.8, BSD). The kernels in `kernels.cu` do the bulk; what is left is eight numbers.
"""

from __future__ import annotations

import numpy as np

from tiercache.device.driver import Driver, Span, Stream

BLOCK_BYTES = 1024
SHORTEST_BYTES = 241
"""Shorter input has an algorithm of its own in XXH3; hash it on the host."""
RESULT_BYTES = 64
_MASK = (1 << 64) - 1
_PRIME64_1 = 0x9E3779B185EBCA87
_AVALANCHE = 0x165667919E3779F9
# Bytes 11 .. 75 of XXH3's default secret.
_MERGE_SECRET = np.frombuffer(
    bytes.fromhex(
        "2cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad0"
        "7dccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d065"
    ),
    dtype="<u8",
)


def scratch_bytes(payload_bytes: int) -> int:
    """Device memory that a digest of so many bytes needs beside the payload, the result included."""
    return RESULT_BYTES + _blocks(payload_bytes) * RESULT_BYTES


def begin(driver: Driver, payload: Span, scratch: Span, stream: Stream) -> Span:
    """Enqueue the digest of `payload` (at least 241 bytes, aligned to 8); returns where its eight numbers will lie.

    `scratch` (`scratch_bytes`, aligned to 8) must stay untouched until then.
    """
    length = payload.length_bytes
    if length < SHORTEST_BYTES or payload.address % 8:
        raise ValueError(f"expected at least {SHORTEST_BYTES} bytes at a multiple of 8, found {length} at {payload.address}")
    blocks = _blocks(length)
    result = scratch.part(0, RESULT_BYTES)
    sums = scratch.part(RESULT_BYTES, blocks * RESULT_BYTES)
    if blocks:
        driver.launch("xxh3_blocks", blocks * 8, [_u64(payload.address), _u64(blocks), _u64(sums.address)], stream)
    arguments = [_u64(payload.address), _u64(length), _u64(blocks), _u64(sums.address), _u64(result.address)]
    driver.launch("xxh3_fold", 8, arguments, stream)
    return result


def finish(accumulators: np.ndarray, payload_bytes: int) -> int:
    """The digest, from the eight numbers (uint64[8], in host memory)."""
    values = accumulators.tolist()
    secret = _MERGE_SECRET.tolist()
    digest = payload_bytes * _PRIME64_1 & _MASK
    for pair in range(0, 8, 2):
        product = (values[pair] ^ secret[pair]) * (values[pair + 1] ^ secret[pair + 1])
        digest += (product & _MASK) ^ (product >> 64)
    digest &= _MASK
    digest ^= digest >> 37
    digest = digest * _AVALANCHE & _MASK
    return digest ^ digest >> 32


def _blocks(payload_bytes: int) -> int:
    return (payload_bytes - 1) // BLOCK_BYTES


def _u64(value: int) -> np.ndarray:
    return np.array([value], dtype=np.uint64)
