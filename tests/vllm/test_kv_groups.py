"""Which groups of layers are known, and which models and engines are refused at start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tiercache.errors import LayoutError
from tiercache.integrations.vllm.blocks import block_sizes, find_groups
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=64
)


def engine_of(context: int = 1, stages: int = 1, scales: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=context, pipeline_parallel_size=stages),
        cache_config=SimpleNamespace(
            calculate_kv_scales=scales, block_size=16, prefix_match_unit=None, enable_prefix_caching=True
        ),
        kv_transfer_config=object(),
    )


def kv_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def is_plain(groups: tuple[KvGroup, ...]) -> bool:
    return BlockGeometry.for_chunk_size(64, 16, True, groups).plain


def groups_of(*specs: Any, **engine: Any) -> tuple[KvGroup, ...]:
    return find_groups(engine_of(**engine), kv_of(*specs))


@pytest.mark.parametrize("spec", [FULL, MLA])
def test_one_group_of_full_attention_or_mla_has_all_layers(spec: Any) -> None:
    (group,) = groups_of(spec)
    assert (group.layers, group.window_tokens, group.spec) == ((), None, spec)
    assert is_plain((group,))


def test_windows_are_groups_of_their_own() -> None:
    longer = replace(SLIDING, extra_retained_tokens=2)
    groups = groups_of(FULL, SLIDING, longer)
    assert [(one.index, one.layers, one.window_tokens) for one in groups] == [
        (0, ("layer.0",), None),
        (1, ("layer.1",), 128),
        (2, ("layer.2",), 130),
    ]
    assert not is_plain(groups)


def test_windows_alone_are_one_group_with_a_window() -> None:
    groups = groups_of(SLIDING)
    assert [(one.layers, one.window_tokens) for one in groups] == [((), 128)]
    assert not is_plain(groups)


def test_groups_that_no_prefix_names_are_left_out_and_the_others_keep_their_tables() -> None:
    kv = kv_of(FULL, SLIDING, SLIDING)
    kv.kv_cache_groups[1].enable_kv_transfer = False
    assert [one.index for one in find_groups(engine_of(), kv)] == [0, 2]
    kv = kv_of(SLIDING, FULL)
    kv.kv_cache_groups[0].enable_kv_transfer = False
    (group,) = find_groups(engine_of(), kv)
    assert group.index == 1 and group.layers == ("layer.1",)
    assert not is_plain((group,)), "a bad block cannot be told of where there are several groups"


def test_hits_are_aligned_to_all_blocks_and_names_to_what_vllm_hashes() -> None:
    wide = replace(FULL, block_size=48)
    assert block_sizes(engine_of(), kv_of(wide, replace(SLIDING, block_size=32))) == (96, 16)
    assert block_sizes(engine_of(), kv_of(FULL, SLIDING)) == (16, 16)
    assert block_sizes(engine_of(), kv_of(wide)) == (48, 48)


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ((FULL, MAMBA), "found mamba_cache_mode none: with --enable-prefix-caching"),
        ((FULL, replace(MAMBA, mamba_cache_mode="all")), "found mamba_cache_mode all"),
        ((FULL, replace(MAMBA, mamba_cache_mode="align", num_speculative_blocks=2)), "found speculative decoding"),
        ((FULL, CHUNKED), "found ChunkedLocalAttentionSpec"),
        ((), "found none"),
    ],
)
def test_other_models_are_refused(specs: tuple[Any, ...], found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        groups_of(*specs)


def test_a_recurrent_state_is_the_last_block() -> None:
    state, attention = groups_of(replace(MAMBA, mamba_cache_mode="align"), FULL)
    assert state.recurrent and not attention.recurrent
    assert [state.first_block(tokens) for tokens in (16, 32, 160)] == [0, 1, 9]
    assert not is_plain((state,))


@pytest.mark.parametrize(
    ("packing", "found"),
    [
        ({"state_content_bytes": 200}, "found NONE with 2 x 200 bytes"),
        ({"num_head_slots": 4}, "found NONE with 4 x 256 bytes"),
        ({"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}, "found INT8_PER_TOKEN_HEAD"),
        ({"kv_quant_mode": KVQuantMode.NVFP4, "dtype": torch.uint8}, "found NVFP4 with 2 x 128 bytes"),
    ],
)
def test_packed_kv_is_refused(packing: dict[str, Any], found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        groups_of(replace(FULL, **packing))


def test_fp8_with_one_scale_is_known() -> None:
    fp8 = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert groups_of(fp8)[0].spec is fp8


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ({"context": 2}, "expected no decode context parallelism, found 2"),
        ({"stages": 2}, "expected one pipeline stage, found 2"),
        ({"scales": True}, "found calculate_kv_scales"),
    ],
)
def test_other_engines_are_refused(engine: dict[str, Any], found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        groups_of(FULL, **engine)
