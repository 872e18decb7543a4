"""The engine's paged KV: its groups of layers, the ranks that share it, and the copies between blocks and chunks.

Blocks move as opaque bytes. What lies inside a block (on the CPU a K half and a V half for each head) is the engine's
business and part of the layout's fingerprint.

In host memory a chunk's payload is (layers, blocks, block bytes), contiguous. On vLLM's CPU platform all layers lie in
one storage at equal distances, (layers, blocks, block bytes) with strides, so one `numpy.copyto` moves a run of
consecutive blocks of all layers: few, large calls that release the GIL. Many small copies on a thread beside the engine's
took up to 50 times longer (the GIL convoy).

In device memory a chunk's payload is (blocks, layers, block bytes), contiguous. vLLM 0.32 views every layer's KV as
(kernel blocks, heads, tokens, K and V of a token), in any order of memory (`vllm/v1/kv_cache_layout.py`; FlashAttention,
FlashInfer and Triton attention). A block that the engine's manager hands out is one kernel block or several consecutive
ones. Each layer is one plane of `PagedKv`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.device.driver import Driver
from tiercache.device.paged import PagedKv
from tiercache.errors import ConfigError, LayoutError
from tiercache.integrations.vllm.planning import HeadParts, KvGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATE_TOKENS = 2
"""The window that a recurrent state is like."""


def find_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[KvGroup, ...]:
    """The groups whose KV is cached. Raises LayoutError for models with layers that were not verified."""
    _check_engine(config)
    found = kv_cache_config.kv_cache_groups
    for group in found:
        _check_state(group.kv_cache_spec)
    groups = tuple(_group_of(index, found[index]) for index in kv_cache_config.prefix_cacheable_group_ids)
    if not groups:
        raise LayoutError("expected layers whose KV can be found by the tokens before it, found none")
    return groups if len(found) > 1 else (replace(groups[0], layers=()),)


def what_they_keep(groups: tuple[KvGroup, ...]) -> str:
    """In words, for the log."""
    windows = [group.window_tokens for group in groups if group.window_tokens is not None and not group.recurrent]
    states = sum(group.recurrent for group in groups)
    sizes = ", ".join(map(str, sorted(set(windows))))
    said = f", {len(windows)} of which keep a window ({sizes} tokens)" if windows else ""
    said += f", {states} of which keep a recurrent state, so that chunks are single blocks" if states else ""
    return f"{said}: of a hit they load what it leaves them" if said else ""


def is_plain(groups: tuple[KvGroup, ...], kv_cache_config: KVCacheConfig) -> bool:
    """Whether all layers keep every token in blocks of one kind."""
    return len(kv_cache_config.kv_cache_groups) == 1 and groups[0].window_tokens is None


def block_sizes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """What hits are multiples of, and how many tokens each of a request's block hashes stands for."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    aligned, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return aligned, getattr(kv_cache_config, "hash_block_size", None) or hashed  # vLLM 0.30 has no such field


def _group_of(index: int, group: Any) -> KvGroup:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    spec = group.kv_cache_spec
    if type(spec) is MambaSpec:
        return KvGroup(index, spec.block_size, tuple(group.layer_names), STATE_TOKENS, spec, recurrent=True)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        window_tokens = None
    elif type(spec) is SlidingWindowSpec:
        window_tokens = spec.sliding_window + spec.extra_retained_tokens
    else:
        raise LayoutError(
            f"expected layers with full attention, MLA, sliding windows or recurrent states, found {type(spec).__name__}; "
            "such a model was not verified with this connector (where vLLM can do without its hybrid KV cache manager, "
            "--disable-hybrid-kv-cache-manager may help: its layers are then all cached whole)"
        )
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1
    if packed or spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise LayoutError(
            f"expected K and V of each token side by side, plain or in fp8 with one scale, found {spec.kv_quant_mode.name} "
            f"with {spec.num_heads} x {spec.state_content_size_bytes} bytes; packed KV was not verified with this connector"
        )
    return KvGroup(index, spec.block_size, tuple(group.layer_names), window_tokens, spec)


def _check_state(spec: Any) -> None:
    """A state is found again where the engine leaves it at the end of a block. Raises LayoutError where it does not."""
    from vllm.v1.core.sched import output
    from vllm.v1.kv_cache_interface import MambaSpec

    if not isinstance(spec, MambaSpec):
        return
    if spec.mamba_cache_mode != "align":
        raise LayoutError(
            f"expected recurrent states at the ends of blocks, found mamba_cache_mode {spec.mamba_cache_mode}: with "
            "--enable-prefix-caching, and no --mamba-cache-mode, vLLM keeps them there"
        )
    if spec.num_speculative_blocks:
        raise LayoutError(
            "expected recurrent states that are there when a step's forward pass ends, found speculative decoding, with "
            "which they come later; this was not verified with this connector"
        )
    state = getattr(output, "KVConnectorBlockState", None)
    if "boundary_state_offloads" not in getattr(state, "__annotations__", getattr(state, "_fields", ())):
        raise LayoutError("expected vLLM 0.32 or newer: older ones do not say where a model's recurrent states are")


def _check_engine(config: VllmConfig) -> None:
    context = config.parallel_config.decode_context_parallel_size
    if context > 1:
        raise LayoutError(f"expected no decode context parallelism, found {context} ranks: blocks are interleaved then")
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        # vLLM 0.32 fails with 2 stages on CPU in its first step, without any connector too (KeyError in the scheduler).
        raise LayoutError(
            f"expected one pipeline stage, found {stages}: more could not be verified with this connector"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "expected KV scales from the checkpoint, found calculate_kv_scales: the meaning of a byte would differ "
            "from one process to the next"
        )


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
        raise ConfigError(
            "kv_head_parts: expected KV of heads in all layers, which MLA and states are not; leave it out"
        )
    if heads is None or any(group.spec.num_kv_heads * ranks != heads for group in groups):
        raise ConfigError(
            "kv_head_parts: expected as many KV heads in all layers, and no fewer than ranks; leave it out"
        )
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


class KvBlocks:
    """All layers' KV tensors of one worker. Raises LayoutError for an arrangement that was not verified.

    Expected of each tensor: shape (blocks, heads, block_tokens, head_size + head_size_v), dense, in host memory. By
    default V is as wide as K; MLA's latents are no two of them. Of recurrent states: (blocks, heads, 1, `state_bytes`), with
    room behind each block. With `part` they are views of a part of the heads.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        blocks: int,
        heads: int,
        block_tokens: int,
        head_size: int = 0,
        head_size_v: int | None = None,
        state_bytes: int | None = None,
        part: bool = False,
    ) -> None:
        if not tensors:
            raise LayoutError("the engine registered no KV tensors")
        first_name, first = next(iter(tensors.items()))
        self.shape = tuple(first.shape)
        self.strides = tuple(first.stride())
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.layers = len(tensors)
        self.block_tokens = block_tokens
        width = head_size + (head_size if head_size_v is None else head_size_v)
        inside = (heads, block_tokens, width) if state_bytes is None else (heads, 1, state_bytes)
        self._check(first_name, first, (blocks, *inside), padded=part or state_bytes is not None)
        self._part = part
        for name, tensor in tensors.items():
            found = (tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
            if found != (self.shape, self.strides, self.dtype):
                raise LayoutError(
                    f"KV of layer {name}: expected shape, strides and dtype of {first_name} "
                    f"{(self.shape, self.strides, self.dtype)}, found {found}; models with unlike layers are not supported"
                )
        self.blocks = self.shape[0]
        self.block_bytes: int = math.prod(inside) * first.element_size()
        stride = self.strides[0] * first.element_size()
        self._planes = _planes(list(tensors.values()), self.blocks, self.block_bytes, stride)

    @property
    def bytes_per_block(self) -> int:
        """Of one block over all layers."""
        return self.layers * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)

    def describe(self) -> str:
        """The byte format, for the layout's fingerprint. Of a part it does not say how far apart blocks lie."""
        if self._part:
            return f"vllm-blocks(layers,blocks,bytes) part={self.shape[1:]} dtype={self.dtype}"
        return f"vllm-blocks(layers,blocks,bytes) shape={self.shape[1:]} strides={self.strides} dtype={self.dtype}"

    def gather(self, blocks: Sequence[int], payload: np.ndarray) -> None:
        """Copy `blocks` of all layers into `payload` (uint8[layers * len(blocks) * block_bytes])."""
        chunk = payload.reshape(self.layers, len(blocks), self.block_bytes)
        for start, stop, block in _runs(blocks):
            layer = 0
            for plane in self._planes:
                part = plane[:, block : block + stop - start]
                np.copyto(chunk[layer : layer + len(plane), start:stop], part)
                layer += len(plane)

    def scatter(self, payload: np.ndarray, chunk_blocks: int, skip: int, blocks: Sequence[int]) -> None:
        """Copy blocks `skip` .. `skip + len(blocks)` of a chunk of `chunk_blocks` blocks to `blocks` of all layers.

        Raises LayoutError when the payload is not that long.
        """
        if payload.nbytes != chunk_blocks * self.bytes_per_block:
            raise LayoutError(f"chunk: expected {chunk_blocks * self.bytes_per_block} bytes, found {payload.nbytes}")
        chunk = payload.reshape(self.layers, chunk_blocks, self.block_bytes)
        for start, stop, block in _runs(blocks):
            layer = 0
            for plane in self._planes:
                part = chunk[layer : layer + len(plane), skip + start : skip + stop]
                np.copyto(plane[:, block : block + stop - start], part)
                layer += len(plane)

    @staticmethod
    def _check(name: str, tensor: Any, expected: tuple[int, ...], *, padded: bool) -> None:
        if str(tensor.device) != "cpu":
            raise LayoutError(f"KV of layer {name}: expected memory of the CPU platform, found device {tensor.device}")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if shape != expected:
            raise LayoutError(
                f"KV of layer {name}: expected shape {expected} (blocks, heads, tokens, K and V of a head) as vLLM 0.32 has "
                f"it on CPU, found {shape}; this layout was not verified, so its bytes are not touched"
            )
        dense = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        # How far the next one would be does not matter where there is only one, as with MLA's heads.
        inside = list(zip(shape, strides, dense, strict=True))[padded:]
        if any(size > 1 and found != stride for size, found, stride in inside) or strides[0] < dense[0]:
            raise LayoutError(f"KV of layer {name}: expected dense blocks with strides {dense}, found {strides}")


def _planes(tensors: list[Any], blocks: int, block_bytes: int, stride: int) -> list[np.ndarray]:
    """uint8 views (layers, blocks, block bytes) that together cover all layers: one where they lie at equal distances in
    one storage, else one a layer."""
    starts = [tensor.data_ptr() for tensor in tensors]
    distance = starts[1] - starts[0] if len(starts) > 1 else 0
    evenly = all(after - before == distance for before, after in itertools.pairwise(starts))
    together = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    if together and evenly and distance >= 0:
        memory = _bytes_of(tensors[0])
        shape, strides = (len(tensors), blocks, block_bytes), (distance, stride, 1)
        return [np.lib.stride_tricks.as_strided(memory, shape, strides)]
    return [
        np.lib.stride_tricks.as_strided(_bytes_of(tensor), (1, blocks, block_bytes), (0, stride, 1))
        for tensor in tensors
    ]


def _bytes_of(tensor: Any) -> np.ndarray:
    """The tensor's storage from its first element on."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    view: np.ndarray = whole.numpy()[tensor.storage_offset() * tensor.element_size() :]
    return view


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first block id) of the runs of consecutive ids."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + 1:
            yield start, position, blocks[start]
            start = position


class DeviceKvBlocks:
    """All layers' KV tensors of one worker. Raises LayoutError for a shape that was not verified, or blocks that overlap.

    Expected of each tensor: shape (kernel blocks, heads, tokens, `content_bytes`), in memory of `driver`. `blocks` and
    `block_tokens` are those of the engine's block manager. Of recurrent states there is one in the place of the tokens
    (`states`).
    """

    def __init__(
        self,
        driver: Driver,
        tensors: Mapping[str, Any],
        *,
        blocks: int,
        heads: int,
        block_tokens: int,
        content_bytes: int,
        states: bool = False,
    ) -> None:
        if not tensors:
            raise LayoutError("the engine registered no KV tensors")
        first_name, first = next(iter(tensors.items()))
        self.driver = driver
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.layers = len(tensors)
        self.blocks = blocks
        self.block_tokens = block_tokens
        _check_shape(first_name, first, blocks, heads, 1 if states else block_tokens, content_bytes)
        for name, tensor in tensors.items():
            if not driver.owns(tensor):
                raise LayoutError(f"KV of layer {name}: expected memory of {driver.name}, found device {tensor.device}")
            if _kind(tensor) != _kind(first):
                raise LayoutError(
                    f"KV of layer {name}: expected shape, strides and dtype of {first_name} {_kind(first)}, found "
                    f"{_kind(tensor)}; models with unlike layers are not supported"
                )
        try:
            self.kv = PagedKv(driver, list(tensors.values()), blocks)
        except LayoutError as error:
            raise LayoutError(f"KV of layer {first_name}: {error}") from error
        self.bytes_per_block: int = self.kv.block_bytes
        """The bytes of one block over all layers."""

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)

    def describe(self) -> str:
        """Return the byte format, for the layout's fingerprint. Where the blocks lie is no part of it."""
        return f"vllm-device-{self.kv.describe()}"


def _check_shape(name: str, tensor: Any, blocks: int, heads: int, block_tokens: int, content_bytes: int) -> None:
    shape, size = tuple(tensor.shape), tensor.element_size()
    split = shape[0] // blocks if len(shape) == 4 and blocks > 0 else 0
    whole = split > 0 and block_tokens % split == 0 and content_bytes % size == 0
    if not whole or shape != (blocks * split, heads, block_tokens // split, content_bytes // size):
        raise LayoutError(
            f"KV of layer {name}: expected shape (blocks, heads, tokens, K and V of a token) with {blocks} blocks of "
            f"{block_tokens} tokens (or equal parts of them), {heads} heads and {content_bytes} bytes, as vLLM 0.32 has "
            f"it on CUDA, found {shape} of {size} bytes each; this layout was not verified, so its bytes are not touched"
        )


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
