"""What a model and an engine tell of their KV: groups of layers, ranks that hold the same, parts of heads; and which are
refused at start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_kv

from tiercache.errors import ConfigError, LayoutError
from tiercache.integrations.vllm.blocks import block_sizes, find_groups, head_parts, replicas_of
from tiercache.integrations.vllm.planning import BlockGeometry, HeadParts, KvGroup

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = vllm_kv.FullAttentionSpec(**SIZES)
SLIDING = vllm_kv.SlidingWindowSpec(**SIZES, sliding_window=128)
CHUNKED = vllm_kv.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)
MLA = vllm_kv.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)
MAMBA = vllm_kv.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
ALIGNED = replace(MAMBA, mamba_cache_mode="align")
FP8 = replace(FULL, kv_quant_mode=vllm_kv.KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)
NVFP4 = replace(FULL, kv_quant_mode=vllm_kv.KVQuantMode.NVFP4, dtype=torch.uint8)


# Groups of layers


def kv_of(*specs: Any) -> vllm_kv.KVCacheConfig:
    groups = [vllm_kv.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return vllm_kv.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_of(use_v2_model_runner: bool = False, **unusual: Any) -> Any:
    """vLLM's configuration: its parts are one object, with the settings of all."""
    settings: dict[str, Any] = {"block_size": 16, "prefix_match_unit": None, "enable_prefix_caching": True}
    settings |= dict.fromkeys(("decode_context_parallel_size", "pipeline_parallel_size", "nnodes_within_dp"), 1)
    settings |= dict.fromkeys(("enable_fault_tolerance", "enable_sleep_mode", "calculate_kv_scales"), False)
    parts = dict.fromkeys(("model_config", "parallel_config", "cache_config"), SimpleNamespace(**settings | unusual))
    return SimpleNamespace(use_v2_model_runner=use_v2_model_runner, kv_transfer_config=object(), **parts)


def groups_of(*specs: Any, **engine: Any) -> tuple[KvGroup, ...]:
    return find_groups(engine_of(**engine), kv_of(*specs))


def is_plain(*groups: KvGroup) -> bool:
    return BlockGeometry.for_chunk_size(64, 16, True, groups).plain


@pytest.mark.parametrize("spec", [FULL, MLA, FP8])
def test_one_group_of_full_attention_or_mla_has_all_layers(spec: Any) -> None:
    """In FP8 with one scale, too."""
    (group,) = groups_of(spec)
    assert (group.layers, group.window_tokens, group.spec) == ((), None, spec)
    assert is_plain(group)


def test_windows_are_groups_of_their_own() -> None:
    groups = groups_of(FULL, SLIDING, replace(SLIDING, extra_retained_tokens=2))
    found = [(one.index, *one.layers, one.window_tokens) for one in groups]
    assert found == [(0, "layer.0", None), (1, "layer.1", 128), (2, "layer.2", 130)]
    assert not is_plain(*groups)
    (alone,) = groups_of(SLIDING)
    assert (alone.layers, alone.window_tokens, is_plain(alone)) == ((), 128, False)


def test_a_recurrent_state_is_the_last_block() -> None:
    state, attention = groups_of(ALIGNED, FULL)
    assert state.recurrent and not attention.recurrent
    assert [state.first_block(tokens) for tokens in (16, 32, 160)] == [0, 1, 9]
    assert not is_plain(state)


def test_groups_that_no_prefix_names_are_left_out_and_the_others_keep_their_tables() -> None:
    kv = kv_of(FULL, SLIDING, SLIDING)
    kv.kv_cache_groups[1].enable_kv_transfer = False
    assert [one.index for one in find_groups(engine_of(), kv)] == [0, 2]
    kv = kv_of(SLIDING, FULL)
    kv.kv_cache_groups[0].enable_kv_transfer = False
    (group,) = find_groups(engine_of(), kv)
    assert group.index == 1 and group.layers == ("layer.1",)
    assert not is_plain(group), "a bad block cannot be told of where there are several groups"


def test_hits_are_aligned_to_all_blocks_and_names_to_what_vllm_hashes() -> None:
    wide = replace(FULL, block_size=48)
    assert block_sizes(engine_of(), kv_of(wide, replace(SLIDING, block_size=32))) == (96, 16)
    assert block_sizes(engine_of(), kv_of(FULL, SLIDING)) == (16, 16)
    assert block_sizes(engine_of(), kv_of(wide)) == (48, 48)


@pytest.mark.parametrize(
    ("specs", "engine", "found"),
    [
        ((FULL, MAMBA), {}, "found mamba_cache_mode none: with --enable-prefix-caching"),
        ((FULL, replace(MAMBA, mamba_cache_mode="all")), {}, "found mamba_cache_mode all"),
        ((FULL, replace(ALIGNED, num_speculative_blocks=2)), {}, "found speculative decoding"),
        ((FULL, CHUNKED), {}, "found ChunkedLocalAttentionSpec"),
        ((), {}, "found none"),
        ((replace(FULL, state_content_bytes=200),), {}, "found NONE with 2 x 200 bytes"),
        ((replace(FULL, num_head_slots=4),), {}, "found NONE with 4 x 256 bytes"),
        ((replace(FULL, kv_quant_mode=vllm_kv.KVQuantMode.INT8_PER_TOKEN_HEAD),), {}, "found INT8_PER_TOKEN_HEAD"),
        ((NVFP4,), {}, "found NVFP4 with 2 x 128 bytes"),
        ((FULL,), {"decode_context_parallel_size": 2}, "expected no decode context parallelism, found 2"),
        ((FULL,), {"pipeline_parallel_size": 2}, "expected one pipeline stage, found 2"),
        ((FULL,), {"nnodes_within_dp": 2}, "expected all ranks of an engine on one host, found 2 hosts"),
        ((FULL,), {"calculate_kv_scales": True}, "found calculate_kv_scales"),
        ((FULL,), {"enable_fault_tolerance": True}, "found enable_fault_tolerance"),
        ((FULL,), {"enable_sleep_mode": True}, "found enable_sleep_mode"),
        ((FULL, ALIGNED), {"use_v2_model_runner": True}, "found the V2 model runner"),
    ],
)
def test_other_models_and_engines_are_refused(specs: tuple[Any, ...], engine: dict[str, Any], found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        groups_of(*specs, **engine)


def test_blocks_that_the_engine_moves_to_the_host_are_refused() -> None:
    with pytest.raises(LayoutError, match="found HiSparse"):
        find_groups(engine_of(), replace(kv_of(FULL), hisparse_host_num_blocks=8))


# Ranks


def heads(count: int) -> vllm_kv.FullAttentionSpec:
    """`count`: of one rank."""
    return replace(FULL, num_kv_heads=count)


def config_of(ranks: int, kv_heads: int, rank: int = 0, **unusual: Any) -> Any:
    draft, layers = unusual.pop("draft", None), unusual.pop("layers", None)
    text_config = {"num_key_value_heads": kv_heads} | unusual.pop("text_config", {})
    parallel = {"pipeline_parallel_size": 1, "distributed_executor_backend": "mp"} | unusual
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks, **parallel),
        model_config=SimpleNamespace(
            model_arch_config=SimpleNamespace(total_num_kv_heads=kv_heads, per_layer_overrides=layers),
            hf_text_config=SimpleNamespace(to_dict=lambda: text_config),
        ),
        speculative_config=draft and SimpleNamespace(draft_model_config=draft),
    )


@pytest.mark.parametrize(
    ("specs", "ranks", "kv_heads", "replicas"),
    [
        ([heads(1)], 2, 1, 2),
        ([heads(1)], 8, 4, 2),
        ([heads(1)], 2, 2, 1),
        ([heads(1)], 1, 1, 1),
        ([heads(2)], 2, 4, 1),
        ([MLA], 1, 128, 1),
        ([MLA], 8, 128, 8),
        ([MLA, heads(1)], 8, 4, 2),
    ],
)
def test_few_kv_heads_and_mla_are_on_several(specs: list[Any], ranks: int, kv_heads: int, replicas: int) -> None:
    """With unlike groups what they have in common counts."""
    assert replicas_of(config_of(ranks=ranks, kv_heads=kv_heads), specs) == replicas


@pytest.mark.parametrize(
    "unsure",
    [
        {"distributed_executor_backend": "ray"},
        {"layers": [{"total_num_kv_heads": 2}]},
        {"draft": object()},
        {"text_config": {"num_global_key_value_heads": 2}},
    ],
)
def test_what_is_not_certain_is_no_replica(unsure: dict[str, Any]) -> None:
    assert replicas_of(config_of(ranks=2, kv_heads=1, **unsure), [heads(1)]) == 1


@pytest.mark.parametrize(
    ("wanted", "ranks", "rank", "parts"),
    [(4, 1, 0, (4, 4, 0)), (4, 4, 3, (4, 1, 3)), (8, 2, 1, (8, 4, 4)), (0, 2, 1, ())],
)
def test_a_rank_has_its_parts_of_the_heads(wanted: int, ranks: int, rank: int, parts: tuple[int, ...]) -> None:
    found = head_parts(config_of(ranks=ranks, rank=rank, kv_heads=8), [KvGroup(0, 16, spec=heads(8 // ranks))], wanted)
    assert found == (HeadParts(*parts) if parts else None)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (heads(4), {"ranks": 2, "kv_heads": 8, "wanted": 3}, "multiple of the 2 .* found 3; 2, 4, 8 would do"),
        (heads(4), {"ranks": 2, "kv_heads": 8, "wanted": 16}, "found 16; 2, 4, 8 would do"),
        (heads(1), {"ranks": 8, "kv_heads": 4, "wanted": 8}, "no fewer than ranks"),
        (heads(8), {"ranks": 1, "kv_heads": 8, "draft": object(), "wanted": 8}, "as many KV heads in all layers"),
        (MLA, {"ranks": 2, "kv_heads": 128, "wanted": 2}, "MLA"),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(spec: Any, options: dict[str, Any], said: str) -> None:
    wanted = options.pop("wanted")
    with pytest.raises(ConfigError, match=f"kv_head_parts: .*{said}"):
        head_parts(config_of(**options), [KvGroup(0, 16, spec=spec)], wanted)
