"""Which tensor-parallel ranks hold the same KV, and which parts of it a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from tiercache.errors import ConfigError
from tiercache.integrations.vllm.planning import HeadParts, KvGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def replicas_of(config: VllmConfig, specs: Iterable[Any]) -> int:
    """How many consecutive ranks hold the same bytes of every layer, whose specifications are `specs`. 1: unknown, or each
    has its own.

    1 also where the ranks may be on several hosts: each chunk is written by one of them, and a disk is seen by one host.
    """
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size
    if parallel.nnodes > 1 or parallel.distributed_executor_backend not in ("mp", "uni"):
        return 1
    heads = _kv_heads(config)
    return reduce(math.gcd, (_replicas(spec, ranks, heads) for spec in specs), int(ranks))


def head_parts(config: VllmConfig, groups: Sequence[KvGroup], wanted: int) -> HeadParts | None:
    """The parts of this rank for `kv_head_parts`, which `wanted` is. Raises ConfigError where heads cannot be cut so."""
    if not wanted:
        return None
    parallel, heads = config.parallel_config, _kv_heads(config)
    ranks = int(parallel.tensor_parallel_size)
    if not all(_has_heads(group) for group in groups):
        raise ConfigError("kv_head_parts: expected KV of heads in all layers, which MLA and states are not; leave it out")
    if heads is None or any(group.spec.num_kv_heads * ranks != heads for group in groups):
        raise ConfigError("kv_head_parts: expected as many KV heads in all layers, and no fewer than ranks; leave it out")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("kv_head_parts: expected all layers in every rank; leave it out with pipeline parallelism")
    if wanted % ranks or heads % wanted:
        fitting = [parts for parts in range(ranks, heads + 1, ranks) if heads % parts == 0]
        raise ConfigError(
            f"kv_head_parts: expected a multiple of the {ranks} tensor-parallel ranks that divides the {heads} KV heads, "
            f"found {wanted}; {', '.join(map(str, fitting)) or 'none'} would do"
        )
    here = wanted // ranks
    return HeadParts(wanted, here, parallel.rank % ranks * here)


def _has_heads(group: KvGroup) -> bool:
    return not group.recurrent and getattr(group.spec, "max_tp_shards", None) is None and group.spec.num_kv_heads > 0


def _replicas(spec: Any, ranks: int, heads: int | None) -> int:
    if (shards := getattr(spec, "max_tp_shards", None)) is not None:
        # vLLM's own word. MLA has one latent for all heads, which every rank computes.
        return max(1, ranks // int(shards))
    if not hasattr(spec, "num_kv_heads"):
        return ranks if spec.tp_replicated else 1  # a recurrent state
    if heads is not None and spec.num_kv_heads == 1 and ranks % heads == 0:
        # Consecutive ranks share a head (vLLM's QKVParallelLinear).
        return ranks // heads
    return 1


def _kv_heads(config: VllmConfig) -> int | None:
    """Of each layer, over all ranks; None where layers have unlike numbers, or a draft model has layers as well."""
    model, speculative = config.model_config, config.speculative_config
    if speculative is not None and getattr(speculative, "draft_model_config", None) is not None:
        return None
    architecture = model.model_arch_config
    said = {
        repr(value)
        for name, value in model.hf_text_config.to_dict().items()
        if ("key_value_heads" in name or "kv_heads" in name) and value is not None
    }
    if architecture.per_layer_overrides is not None or len(said) > 1:
        return None
    heads = int(architecture.total_num_kv_heads)
    return heads if heads > 0 else None
