"""The hot cache of examples/prefetch_gateway.py: the conversation has to fit into its prefetched share, two have not to."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.examples import load_example

MODEL = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
"""SmolLM2-135M, the model of the demo."""


@pytest.fixture(scope="module")
def example() -> Any:
    return load_example("prefetch_gateway")


@pytest.mark.parametrize(("dtype", "number_bytes"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("tokens", [1024, 4100])
def test_one_conversation_fits_and_two_do_not(example: Any, dtype: str, number_bytes: int, tokens: int) -> None:
    kv_bytes = tokens * 2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"] * number_bytes
    hot_bytes = example.hot_gb(tokens, dtype) * 2**30
    share = yaml.safe_load(example.CONFIG.format(place="x", hot_gb=1))["prefetch_share"]
    assert kv_bytes < share * hot_bytes
    assert hot_bytes < 2 * kv_bytes
