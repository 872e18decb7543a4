"""Tools to test tiers: `TierContract`, fault injection, a clock that jumps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.testing.clock import JumpingClockLoop
    from tiercache.testing.contract import TierContract, chunk, page_aligned
    from tiercache.testing.faults import FaultyTier, MemoryTier

_HOME = {
    "FaultyTier": "faults",
    "JumpingClockLoop": "clock",
    "MemoryTier": "faults",
    "TierContract": "contract",
    "chunk": "contract",
    "page_aligned": "contract",
}

__all__ = ["FaultyTier", "JumpingClockLoop", "MemoryTier", "TierContract", "chunk", "page_aligned"]


def __getattr__(name: str) -> Any:
    """Import on first use, since a Python without pytest uses some modules of this package."""
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tiercache.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value
