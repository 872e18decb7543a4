"""Read the configuration: tiercache's own keys and LMCache's, from YAML, the environment and overrides.

`Config.load` reads and checks; `explain` tells where each value came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.config.loading import Config

if TYPE_CHECKING:
    from tiercache.config.explanation import Explanation, explain

__all__ = ["Config", "Explanation", "explain"]


def __getattr__(name: str) -> Any:
    """Import the explanation on first use, since loading does not need it."""
    if name not in ("Explanation", "explain"):
        raise AttributeError(f"module 'tiercache.config' has no attribute {name!r}")
    from tiercache.config import explanation

    return getattr(explanation, name)
