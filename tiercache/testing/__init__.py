"""What users and we test tiers with: `TierContract`, fault injection, a clock that jumps."""

from tiercache.testing.clock import JumpingClockLoop
from tiercache.testing.contract import TierContract, chunk, page_aligned
from tiercache.testing.faults import FaultyTier, MemoryTier

__all__ = ["FaultyTier", "JumpingClockLoop", "MemoryTier", "TierContract", "chunk", "page_aligned"]
