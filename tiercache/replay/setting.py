"""Sizes, speeds and policies of a simulation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercache.errors import TierCacheError

_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_MOST = 1e18
UNBOUNDED = 1 << 40
"""Blocks of a hot cache that holds everything."""


class SettingError(TierCacheError):
    """An argument of `tiercache replay` is invalid."""


@dataclass(frozen=True)
class Hardware:
    """Speeds in bytes and seconds. Defaults: Llama-3.1-8B in bf16 on one large GPU, PCIe 5, one data-centre SSD."""

    bytes_per_token: int = 131072
    prefill_tokens_per_s: float = 20000.0
    decode_tokens_per_s: float = 50.0
    ram_bytes_per_s: float = 50e9
    """Rate from the hot cache to the GPU."""
    flash_read_bytes_per_s: float = 7e9
    flash_latency_s: float = 100e-6
    engines: int = 0
    """Engines that prefill one request at a time each; 0 means one per request, so that no request waits for an engine."""


@dataclass(frozen=True)
class Setting:
    """Settings of one run. Sizes are in blocks of the trace; `flash_blocks` None means that flash holds everything."""

    ram_blocks: int
    flash_blocks: int | None = 0
    policy: str = "LRU"
    admission: str = "all"
    prefetch: tuple[str, ...] = ()
    """Predictors to use: `hints`, `sessions` or both."""
    prefetch_share: float = 0.5
    """Largest fraction of the hot cache for prefetched chunks that have not been accessed yet."""
    hint_lead_s: float = 10.0
    """Time from a program's announcement of its next turn to that turn, unless the request gives its own lead.

    The announcement is never earlier than the end of the last turn."""
    hint_error: float = 0.0
    """Largest error of an announced time, as a fraction of the lead. Errors are uniform in both directions."""
    noisy: float = 0.0
    """Blocks that a second, scanning tenant stores per block of the trace. It stores each block only once."""
    quotas: bool = False
    """Limit each tenant to half of RAM and half of the flash."""
    hardware: Hardware = Hardware()


def parse_size(text: str, block_bytes: int, unique_blocks: int | None) -> int | None:
    """Convert a size to blocks: `10%` (of unique blocks), `64GB`, `12000`, or `all` (None). Raises SettingError."""
    text = text.strip()
    if text.lower() in ("all", "infinite"):
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%|[KMGT]?B|)", text, re.IGNORECASE)
    if match is None:
        raise SettingError(f"size: expected 10%, 64GB, a number of blocks or all, found {text!r}")
    number, unit = float(match[1]), match[2].upper()
    if number >= _MOST:
        raise SettingError(f"size: expected less than {_MOST:g}, found {text[:40]!r}")
    if unit == "%":
        if unique_blocks is None:
            raise SettingError(f"size: {text!r} needs the number of unique blocks")
        return int(unique_blocks * number / 100)
    return int(number) if not unit else int(number * _UNITS[unit] // block_bytes)
