"""Which ranks are taken to hold the same KV, and when that is not certain enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tiercache.integrations.vllm.replicas import replicas_of

MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)


def heads(count: int) -> FullAttentionSpec:
    """`count`: of one rank."""
    return FullAttentionSpec(block_size=16, num_kv_heads=count, head_size=64, dtype=torch.bfloat16)


def replicas(
    *specs: Any,
    ranks: int,
    kv_heads: int,
    hosts: int = 1,
    executor: str = "mp",
    layers: list[dict[str, Any]] | None = None,
    draft: object | None = None,
    **text_config: Any,
) -> int:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, nnodes=hosts, distributed_executor_backend=executor
        ),
        model_config=SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_kv_heads=kv_heads, per_layer_overrides=layers),
            hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": kv_heads, **text_config}),
        ),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
    )
    return replicas_of(config, specs)


@pytest.mark.parametrize(("ranks", "kv_heads", "expected"), [(2, 1, 2), (8, 1, 8), (8, 4, 2), (2, 2, 1), (1, 1, 1)])
def test_fewer_kv_heads_than_ranks_are_on_several(ranks: int, kv_heads: int, expected: int) -> None:
    assert replicas(heads(1), ranks=ranks, kv_heads=kv_heads) == expected


def test_several_heads_on_a_rank_are_its_own() -> None:
    assert replicas(heads(2), ranks=2, kv_heads=4) == 1


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_mla_is_the_same_on_every_rank(ranks: int) -> None:
    assert replicas(MLA, ranks=ranks, kv_heads=128) == ranks


def test_of_unlike_groups_the_common_part_counts() -> None:
    assert replicas(MLA, heads(1), ranks=8, kv_heads=4) == 2


@pytest.mark.parametrize(
    "unsure",
    [
        {"hosts": 2},
        {"executor": "ray"},
        {"executor": "external_launcher"},
        {"layers": [{"total_num_kv_heads": 2}]},
        {"draft": object()},
        {"num_global_key_value_heads": 2},
    ],
)
def test_what_is_not_certain_is_no_replica(unsure: dict[str, Any]) -> None:
    assert replicas(heads(1), ranks=2, kv_heads=1, **unsure) == 1
