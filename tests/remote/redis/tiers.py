"""Tiers as the assembly makes them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import tests.remote.redis.servers  # noqa: F401 - skips where redis-py is missing, before the tier needs it
from tests.tiers.opened import open_tier
from tiercache.config.remote_options import options_of
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.redis import RedisTier

CHUNK_BYTES = 64 * 1024
FINGERPRINT = bytes(range(16))


def value_name(key: bytes) -> bytes:
    """The name of a chunk's value on the server."""
    return f"tiercache:{key.hex()}".encode()


def make_tier(
    url: str,
    *,
    timeout_s: float = 5.0,
    concurrency: int = 4,
    name: str = "redis",
    chunk_bytes: int = CHUNK_BYTES,
    item_bytes: int = 1,
    **options: Any,
) -> RedisTier:
    """As the assembly makes it."""
    values = {option.name: option.default for option in options_of("redis").values()}
    unknown = set(options) - set(values)
    assert not unknown, unknown
    return RedisTier(
        RemoteSettings(
            name=name,
            type="redis",
            fingerprint=FINGERPRINT,
            chunk_bytes=chunk_bytes,
            item_bytes=item_bytes,
            url=url,
            options=values | options,
            timeout_s=timeout_s,
            concurrency=concurrency,
        )
    )


def opened(url: str, **options: Any) -> AbstractAsyncContextManager[RedisTier]:
    return open_tier(make_tier(url, **options))
