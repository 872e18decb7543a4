"""The model, the prompts, and what vLLM's own prefix cache answers: once for all tests with engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engines import BLOCK_TOKENS, REPOSITORY, drive
from tests.vllm.models import shorten

DIVERGED_AFTER = 1100
"""Characters that two prompts have in common: blocks of them end in the middle of a chunk."""


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Make instances of a class and close them at the end of the test: `opened(Worker, device="cpu")`."""
    with ExitStack() as stack:
        yield lambda kind, *arguments, **named: stack.enter_context(closing(kind(*arguments, **named)))


@pytest.fixture(scope="session")
def imported() -> None:
    """Import vLLM once for all engines. Without it, the first test that calls `drive` would leave a process behind."""
    engines.import_vllm()


@pytest.fixture(scope="session")
def model(imported: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiercache.demo.model import prepare_model

    return str(shorten(prepare_model(REPOSITORY / "demo" / "model"), tmp_path_factory.mktemp("model") / "short"))


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Two prompts of about 280 tokens that share nothing."""

    licence = (REPOSITORY / "LICENSE").read_text()
    return [
        licence[:1340] + "\nQuestion: What is this document about?\nAnswer:",
        licence[6000:7425] + "\nQuestion: Who is the licensor?\nAnswer:",
    ]


@pytest.fixture(scope="session")
def continued() -> str:
    """A prompt of about 430 tokens that goes on where the text of the first of `prompts` ends."""
    return (REPOSITORY / "LICENSE").read_text()[:2125] + "\nQuestion: What may a contributor do?\nAnswer:"


@pytest.fixture(scope="session")
def diverged(prompts: list[str]) -> str:
    """A prompt that is the first of `prompts` up to the middle of a chunk."""
    return prompts[0][:DIVERGED_AFTER] + " of all that follows. Question: Which document is this?\nAnswer:"


@pytest.fixture(scope="session")
def oracles(model: str, prompts: list[str], continued: str, diverged: str) -> list[dict[str, Any]]:
    """vLLM's own prefix-cache hits, for `prompts`, `continued`, and `diverged` by the cache of the first prompt."""
    (cold, hit, diverged_hit, _, continued_hit), _ = drive(
        {"model": model, "enable_prefix_caching": True},
        [
            ["generate", prompts],
            ["generate", prompts],
            ["generate", [diverged]],
            ["generate", [continued]],
            ["generate", [continued]],
        ],
    )
    assert all(answer["cached"] == 0 for answer in cold)
    for answer in (*hit, *continued_hit):
        assert answer["cached"] == (answer["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return [*hit, *continued_hit, *diverged_hit]


@pytest.fixture(scope="session")
def oracle(oracles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return oracles[:2]
