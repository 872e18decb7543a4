"""The vLLM connector.

Pass it to `--kv-transfer-config`:

```json
{"kv_connector": "TierCacheConnector", "kv_connector_module_path": "tiercache.integrations.vllm", "kv_role": "kv_both"}
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.integrations.needed import TESTED_VLLM, needed_vllm

if TYPE_CHECKING:
    from tiercache.integrations.vllm.connector import TierCacheConnector

__all__ = ["TierCacheConnector"]


def __getattr__(name: str) -> Any:
    """Import on first use: importing vLLM takes many seconds, and planning and block copies work without it."""
    if name != "TierCacheConnector":
        raise AttributeError(f"module 'tiercache.integrations.vllm' has no attribute {name!r}")
    with needed_vllm(name, TESTED_VLLM):
        from tiercache.integrations.vllm.connector import TierCacheConnector
    return TierCacheConnector
