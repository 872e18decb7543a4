"""Back ends. Each is an async coroutine-driven `Tier`; `TierContract` in `tiercache.testing` says what that means."""
