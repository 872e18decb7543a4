"""Chunks on Mooncake Store."""

from tiercache.tiers.remote.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
