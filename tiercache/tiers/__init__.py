"""Storage tiers. Each is a `Tier`; `TierContract` in `tiercache.testing` specifies it."""
