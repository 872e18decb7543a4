"""What is simulated: sizes, speeds and policies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercache.errors import TierCacheError

_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


class SettingError(TierCacheError):
    """An argument of `tiercache replay` that cannot be."""


@dataclass(frozen=True)
class Hardware:
    """Bytes and seconds. The defaults: Llama-3.1-8B in bf16 on one large GPU, PCIe 5, one data-centre SSD."""

    bytes_per_token: int = 131072
    prefill_tokens_per_s: float = 20000.0
    decode_tokens_per_s: float = 50.0
    ram_bytes_per_s: float = 50e9
    """From the hot cache to the GPU."""
    flash_read_bytes_per_s: float = 7e9
    flash_latency_s: float = 100e-6
    engines: int = 0
    """Engines that prefill one request at a time each; 0: as many as it takes, so that nobody waits for another one."""


@dataclass(frozen=True)
class Setting:
    """One run. Sizes are in blocks of the trace; `flash_blocks` None: holds everything."""

    ram_blocks: int
    flash_blocks: int | None = 0
    policy: str = "LRU"
    admission: str = "all"
    flash_bytes_per_day: float = 0.0
    prefetch: tuple[str, ...] = ()
    """Of hints, sessions."""
    prefetch_bytes_per_s: float = 0.0
    """0: what the flash gives."""
    prefetch_share: float = 0.5
    """Of the hot cache, for chunks that were prefetched and not used yet."""
    hint_lead_s: float = 10.0
    """With `hints`, programs announce the next turn of a session so long before it comes, or when the last one ended, if
    that was later. A request of our own format says it itself."""
    hint_error: float = 0.0
    """Programs are wrong about when, by up to this part of the time that they say, evenly and either way."""
    noisy: float = 0.0
    """Another tenant stores so many blocks for each one of the trace, and none twice."""
    quotas: bool = False
    """A tenant may hold half of RAM, and half of the flash."""
    hardware: Hardware = Hardware()


def parse_size(text: str, block_bytes: int, unique_blocks: int | None) -> int | None:
    """Blocks of `text`: `10%` (of unique blocks), `64GB`, `12000` (blocks), or `all` (None). Raises SettingError."""
    text = text.strip()
    if text.lower() in ("all", "infinite"):
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%|[KMGT]?B|)", text, re.IGNORECASE)
    if match is None:
        raise SettingError(f"size: expected 10%, 64GB, a number of blocks or all, found {text!r}")
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if unique_blocks is None:
            raise SettingError(f"size: {text!r} needs the number of unique blocks")
        return int(unique_blocks * number / 100)
    return int(number) if not unit else int(number * _UNITS[unit] // block_bytes)
