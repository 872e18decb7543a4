"""Errors for callers and operators. A miss is not an error."""


class TierCacheError(Exception):
    """Base class of the errors below."""


class ConfigError(TierCacheError):
    """The configuration cannot be used. The message names key, value and the accepted values."""


class LayoutError(TierCacheError):
    """Bytes or an engine do not have the expected layout."""


class CorruptChunk(TierCacheError):
    """A stored chunk failed verification. Inside the cache this becomes a counted miss, and its file is deleted."""


class TierFull(TierCacheError):
    """A tier has no room under its cap or on its device, and nothing to evict."""


class TierUnavailable(TierCacheError):
    """A tier cannot be used: its device, directory or server failed, or its breaker is open."""


class CacheClosed(TierCacheError, RuntimeError):
    """The cache was used before its start or after `close`."""


class DeviceError(TierCacheError):
    """An accelerator or its driver failed.

    `lost` says that the device's context is corrupt, so that all further work fails.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost
