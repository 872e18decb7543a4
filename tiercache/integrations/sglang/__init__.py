"""The storage back end of SGLang's HiCache, for `--hicache-storage-backend dynamic` and, in
`--hicache-storage-backend-extra-config`:

```json
{"backend_name": "tiercache", "module_path": "tiercache.integrations.sglang", "class_name": "TierCacheStorage",
 "interface_v1": 1}
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.integrations.sglang.storage import TierCacheStorage

__all__ = ["TierCacheStorage"]


def __getattr__(name: str) -> Any:
    """Pages and hits are of use, and tested, without SGLang."""
    if name != "TierCacheStorage":
        raise AttributeError(f"module 'tiercache.integrations.sglang' has no attribute {name!r}")
    try:
        importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    except ImportError as error:
        raise ImportError(
            f"TierCacheStorage needs SGLang, which cannot be imported ({error}): pip install sglang"
        ) from error
    from tiercache.integrations.sglang.storage import TierCacheStorage

    return TierCacheStorage
