"""Which models and engines are refused at start, and what else than the model names a layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, SlidingWindowSpec

from tiercache.errors import LayoutError
from tiercache.integrations.vllm.kv_layout import attention_spec

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def spec_of(*specs: Any, context: int = 1, stages: int = 1, scales: bool = False) -> Any:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=context, pipeline_parallel_size=stages),
        cache_config=SimpleNamespace(calculate_kv_scales=scales),
    )
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    return attention_spec(config, groups)


@pytest.mark.parametrize("spec", [FULL, MLA])
def test_one_group_of_full_attention_or_mla_is_known(spec: Any) -> None:
    assert spec_of(spec) is spec


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ((FULL, SLIDING), "found 2 .FullAttentionSpec, SlidingWindowSpec."),
        ((SLIDING,), "found 1 .SlidingWindowSpec."),
        ((), "found 0"),
    ],
)
def test_other_models_are_refused(specs: tuple[Any, ...], found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        spec_of(*specs)


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
        spec_of(replace(FULL, **packing))


def test_fp8_with_one_scale_is_known() -> None:
    fp8 = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert spec_of(fp8) is fp8


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
        spec_of(FULL, **engine)
