"""Tiers of chunk files: one class, `FileTier`, and what it is composed of."""
