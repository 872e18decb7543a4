"""A tier for vLLM's own `OffloadingConnector`.

In `--kv-transfer-config`:

```json
{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
  "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000, "secondary_tiers": [
    {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm_offloading", "config_file": "tiercache.yaml"}]}}
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.integrations.needed import TESTED_OFFLOADING, needed_vllm

if TYPE_CHECKING:
    from tiercache.integrations.vllm_offloading.tier import TierCacheTier

__all__ = ["TierCacheTier"]


def __getattr__(name: str) -> Any:
    """Import on first use: importing vLLM takes many seconds, and the pure modules work without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_vllm(name, TESTED_OFFLOADING):
        from tiercache.integrations.vllm_offloading import tier

    return tier.TierCacheTier
