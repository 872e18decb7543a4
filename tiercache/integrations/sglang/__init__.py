"""Store pages of SGLang's HiCache.

Use `--hicache-storage-backend dynamic` and, in `--hicache-storage-backend-extra-config`:

```json
{"backend_name": "tiercache", "module_path": "tiercache.integrations.sglang", "class_name": "TierCacheStorage",
 "interface_v1": 1}
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.integrations.needed import needed

if TYPE_CHECKING:
    from tiercache.integrations.sglang.storage import TierCacheStorage

__all__ = ["TierCacheStorage"]


def __getattr__(name: str) -> Any:
    """Import SGLang when its class is requested, so that the pure modules work without it."""
    if name != "TierCacheStorage":
        raise AttributeError(f"module 'tiercache.integrations.sglang' has no attribute {name!r}")
    from tiercache.integrations.sglang.identity import TESTED

    with needed(name, f"SGLang {' or '.join(TESTED)}", f"sglang=={TESTED[-1]}"):
        from tiercache.integrations.sglang.storage import TierCacheStorage
    return TierCacheStorage
