"""Tiers as the assembly makes them."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.remote.made import configured
from tests.tiers.opened import open_tier
from tiercache.tiers.remote.redis import RedisTier


def value_name(key: bytes) -> bytes:
    """The name of a chunk's value on the server."""
    return f"tiercache:{key.hex()}".encode()


def make_tier(url: str, **settings: Any) -> RedisTier:
    return RedisTier(configured("redis", url, **settings))


def opened(url: str, **options: Any) -> AbstractAsyncContextManager[RedisTier]:
    return open_tier(make_tier(url, **options))
