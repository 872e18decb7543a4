"""A tier for vLLM's own `OffloadingConnector`, in `--kv-transfer-config`:

```json
{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
  "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000, "secondary_tiers": [
    {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm_offloading", "config_file": "tiercache.yaml"}]}}
```

On vLLM's CPU platform, which has no spec of its own: `"spec_name": "CpuTieringSpec"` and
`"spec_module_path": "tiercache.integrations.vllm_offloading"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.integrations.vllm.versions import TESTED_OFFLOADING, needed_vllm

if TYPE_CHECKING:
    from tiercache.integrations.vllm_offloading.cpu_spec import CpuTieringSpec
    from tiercache.integrations.vllm_offloading.tier import TierCacheTier

__all__ = ["CpuTieringSpec", "TierCacheTier"]


def __getattr__(name: str) -> Any:
    """Importing vLLM takes many seconds; what decides here is of use, and tested, without it."""
    if name == "TierCacheTier":
        with needed_vllm(name, TESTED_OFFLOADING):
            from tiercache.integrations.vllm_offloading.tier import TierCacheTier
        return TierCacheTier
    if name == "CpuTieringSpec":
        with needed_vllm(name, TESTED_OFFLOADING):
            from tiercache.integrations.vllm_offloading.cpu_spec import CpuTieringSpec
        return CpuTieringSpec
    raise AttributeError(f"module 'tiercache.integrations.vllm_offloading' has no attribute {name!r}")
