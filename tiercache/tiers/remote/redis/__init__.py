"""Chunks on Redis and Valkey."""

from tiercache.tiers.remote.redis.tier import RedisTier

__all__ = ["RedisTier"]
