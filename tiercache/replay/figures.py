"""Figures that a simulation counts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from tiercache.core.prefetch import Account

QUANTILES = (50, 95, 99)


def ttft_figures(times_s: Sequence[float]) -> dict[str, float]:
    """Return the mean and the quantiles of times to first token, by the names that a report gives them; 0 without times."""
    quantiles_s = np.percentile(times_s, QUANTILES, method="inverted_cdf") if times_s else (0.0,) * len(QUANTILES)
    figures = {"ttft_mean_s": fmean(times_s) if times_s else 0.0}
    return figures | {f"ttft_p{part}_s": float(value) for part, value in zip(QUANTILES, quantiles_s, strict=True)}


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
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    """Time to first token of each request."""
    inserted_blocks: int = 0
    """Blocks that demand, not prefetch, inserted into RAM in the whole run: the writes of a single cache of this size."""
    flash_written_blocks: int = 0
    """Blocks written to flash in the whole run."""
    accounts: dict[str, Account] = field(default_factory=dict)
    """Prefetched bytes by predictor."""
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
