"""Which ranks are taken to hold the same KV, and when that is not certain enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tiercache.errors import ConfigError
from tiercache.integrations.vllm.blocks import head_parts, replicas_of
from tiercache.integrations.vllm.planning import HeadParts, KvGroup

MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)


def heads(count: int) -> FullAttentionSpec:
    """`count`: of one rank."""
    return FullAttentionSpec(block_size=16, num_kv_heads=count, head_size=64, dtype=torch.bfloat16)


def config_of(
    *,
    ranks: int,
    kv_heads: int,
    rank: int = 0,
    stages: int = 1,
    hosts: int = 1,
    executor: str = "mp",
    layers: list[dict[str, Any]] | None = None,
    draft: object | None = None,
    **text_config: Any,
) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            rank=rank,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            nnodes=hosts,
            distributed_executor_backend=executor,
        ),
        model_config=SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_kv_heads=kv_heads, per_layer_overrides=layers),
            hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": kv_heads, **text_config}),
        ),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
    )


def replicas(*specs: Any, **options: Any) -> int:
    return replicas_of(config_of(**options), specs)


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


@pytest.mark.parametrize(
    ("wanted", "ranks", "rank", "parts"),
    [
        (4, 1, 0, HeadParts(4, 4, 0)),
        (4, 2, 1, HeadParts(4, 2, 2)),
        (4, 4, 3, HeadParts(4, 1, 3)),
        (8, 2, 1, HeadParts(8, 4, 4)),
        (0, 2, 1, None),
    ],
)
def test_a_rank_has_its_parts_of_the_heads(wanted: int, ranks: int, rank: int, parts: HeadParts | None) -> None:
    groups = [KvGroup(0, 16, spec=heads(8 // ranks))]
    assert head_parts(config_of(ranks=ranks, rank=rank, kv_heads=8), groups, wanted) == parts


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (heads(4), {"ranks": 2, "kv_heads": 8, "wanted": 3}, "multiple of the 2 .* found 3; 2, 4, 8 would do"),
        (heads(4), {"ranks": 2, "kv_heads": 8, "wanted": 16}, "found 16; 2, 4, 8 would do"),
        (heads(1), {"ranks": 8, "kv_heads": 4, "wanted": 8}, "no fewer than ranks"),
        (heads(8), {"ranks": 1, "kv_heads": 8, "stages": 2, "wanted": 8}, "pipeline parallelism"),
        (heads(8), {"ranks": 1, "kv_heads": 8, "draft": object(), "wanted": 8}, "as many KV heads in all layers"),
        (MLA, {"ranks": 2, "kv_heads": 128, "wanted": 2}, "MLA"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(spec: Any, options: dict[str, Any], said: str) -> None:
    wanted = options.pop("wanted")
    with pytest.raises(ConfigError, match=f"kv_head_parts: .*{said}"):
        head_parts(config_of(**options), [KvGroup(0, 16, spec=spec)], wanted)
