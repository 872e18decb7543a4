"""The vLLM connector, for `--kv-transfer-config`:

```json
{"kv_connector": "TierCacheConnector", "kv_connector_module_path": "tiercache.integrations.vllm", "kv_role": "kv_both"}
```
"""

from tiercache.integrations.vllm.connector import TierCacheConnector

__all__ = ["TierCacheConnector"]
