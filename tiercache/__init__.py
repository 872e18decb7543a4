"""tiercache: an asyncio-native tiered cache for the KV cache of language models.

```python
config = tiercache.Config.load("tiercache.yaml")
async with tiercache.TierCache.open(config, layout) as cache:
    await cache.put(key, payload)
    async with cache.get(key) as lease: ...
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.bridge import CacheThread
    from tiercache.cache import TierCache
    from tiercache.config import Config
    from tiercache.core.keys import ChunkKey, chunk_keys, keys_from_hashes
    from tiercache.core.layout import Layout
    from tiercache.errors import ConfigError, CorruptChunk, LayoutError, TierCacheError
    from tiercache.memory.slots import Lease
    from tiercache.scheduler.reads import Hit
    from tiercache.scheduler.writer import FlushReport
    from tiercache.statistics import Statistics

__version__ = "0.1.0"

_HOME = {
    "CacheThread": "bridge",
    "ChunkKey": "core.keys",
    "Config": "config",
    "ConfigError": "errors",
    "CorruptChunk": "errors",
    "FlushReport": "scheduler.writer",
    "Hit": "scheduler.reads",
    "Layout": "core.layout",
    "LayoutError": "errors",
    "Lease": "memory.slots",
    "Statistics": "statistics",
    "TierCache": "cache",
    "TierCacheError": "errors",
    "chunk_keys": "core.keys",
    "keys_from_hashes": "core.keys",
}

# A literal list, since type checkers do not export computed names.
__all__ = [
    "CacheThread",
    "ChunkKey",
    "Config",
    "ConfigError",
    "CorruptChunk",
    "FlushReport",
    "Hit",
    "Layout",
    "LayoutError",
    "Lease",
    "Statistics",
    "TierCache",
    "TierCacheError",
    "__version__",
    "chunk_keys",
    "keys_from_hashes",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that a command that prints a version does not import numpy."""
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tiercache.{_HOME[name]}"), name)
    globals()[name] = value
    return value
