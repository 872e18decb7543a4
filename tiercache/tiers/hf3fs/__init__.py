"""Chunks on DeepSeek's 3FS, through its user-space ring I/O (USRBIO)."""

from tiercache.tiers.hf3fs.tier import Hf3fsSettings, Hf3fsTier

__all__ = ["Hf3fsSettings", "Hf3fsTier"]
