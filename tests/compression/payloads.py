"""Payloads like KV."""

import numpy as np

from tiercache.testing import page_aligned


def kv(number: int, length_bytes: int) -> tuple[bytes, np.ndarray]:
    """A key and a padded payload of numbers in bfloat16 that are normally distributed, different for each number."""
    memory = page_aligned(length_bytes)
    values = np.random.default_rng(number).standard_normal(length_bytes // 4 + 1).astype("<f4").view("<u4") >> 16
    numbers = np.concatenate([values, values[::-1]]).astype("<u2")
    memory[:length_bytes] = numbers.view(np.uint8)[:length_bytes]
    return number.to_bytes(24, "big"), memory


def noise(number: int, length_bytes: int) -> tuple[bytes, np.ndarray]:
    memory = page_aligned(length_bytes)
    memory[:length_bytes] = np.random.default_rng(number).integers(0, 256, length_bytes, dtype=np.uint8)
    return number.to_bytes(24, "big"), memory
