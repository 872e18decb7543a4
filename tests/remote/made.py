"""Settings of remote tiers as the assembly makes them."""

from typing import Any

from tiercache.config.remote_options import options_of
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.remote.base import RemoteSettings


def configured(
    type_name: str,
    url: str,
    *,
    name: str | None = None,
    fingerprint: bytes = bytes(range(16)),
    chunk_bytes: int = CHUNK_BYTES,
    item_bytes: int = 1,
    timeout_s: float = 5.0,
    concurrency: int = 4,
    **options: Any,
) -> RemoteSettings:
    """Settings with the defaults of all options that are not given."""
    values = {option.name: option.default for option in options_of(type_name).values()}
    assert options.keys() <= values.keys(), options
    return RemoteSettings(
        name=name or type_name,
        type=type_name,
        fingerprint=fingerprint,
        chunk_bytes=chunk_bytes,
        item_bytes=item_bytes,
        url=url,
        options=values | options,
        timeout_s=timeout_s,
        concurrency=concurrency,
    )
