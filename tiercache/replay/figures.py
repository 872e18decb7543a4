"""Figures that a simulation counts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from tiercache.core.prefetch import Account

_STEP = 1.005


class Quantiles:
    """A histogram of non-negative times in steps of half a per cent: any number of values in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self._buckets[round(math.log(value, _STEP)) if value > 1e-9 else -(10**6)] += 1

    def at(self, part: float) -> float:
        """Return the quantile `part` (0..1) of the added values; 0 if there are none."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= part * self.count:
                return 0.0 if bucket == -(10**6) else _STEP**bucket
        return 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class Figures:
    """Figures of the measured requests (by default the second half), unless stated to cover the whole run."""

    requests: int = 0
    blocks: int = 0
    ram_blocks: int = 0
    """Blocks hit in RAM, within the contiguous prefix."""
    flash_blocks: int = 0
    """Blocks read from flash by a waiting request, within the contiguous prefix."""
    wanted_blocks: int = 0
    """Blocks of the contiguous prefix that RAM and flash together hold at arrival: the upper bound of a perfect prefetch."""
    saved_s: float = 0.0
    """Prefill seconds avoided by hits, less the seconds to load them."""
    ttft: Quantiles = field(default_factory=Quantiles)
    inserted_blocks: int = 0
    """Blocks that demand, not prefetch, inserted into RAM in the whole run: the writes of a single cache of this size."""
    flash_written_blocks: int = 0
    """Blocks written to flash in the whole run."""
    governed_blocks: int = 0
    """Blocks in the whole run that were admitted and then refused by the write limit."""
    accounts: dict[str, Account] = field(default_factory=dict)
    """Prefetched bytes by predictor."""
    all_requests: int = 0
    span_s: float = 0.0

    @property
    def hit(self) -> float:
        """Fraction of all requested blocks that was loaded from RAM or flash."""
        return (self.ram_blocks + self.flash_blocks) / self.blocks if self.blocks else 0.0

    @property
    def ram_hit(self) -> float:
        return self.ram_blocks / self.blocks if self.blocks else 0.0

    @property
    def ready(self) -> float:
        """Fraction of the requests' cached blocks that was in RAM at their arrival."""
        return self.ram_blocks / self.wanted_blocks if self.wanted_blocks else 0.0
