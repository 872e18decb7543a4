"""The engine's paged KV: its groups of layers, the ranks that share it, and the copies between blocks and chunks.

Blocks move as opaque bytes. The engine determines their inner order (on the CPU a K half and a V half for each head),
which is part of the layout's fingerprint.

In host memory a chunk's payload is (layers, blocks, block bytes), contiguous. On vLLM's CPU platform all layers lie in
one storage at equal distances, (layers, blocks, block bytes) with strides, so one `numpy.copyto` moves a run of
consecutive blocks of all layers: few, large calls that release the GIL. Many small copies on a thread beside the engine's
took up to 50 times longer, since the threads contend for the GIL.

In device memory a chunk's payload is (blocks, layers, block bytes), contiguous. vLLM 0.32 views every layer's KV as
(kernel blocks, heads, tokens, K and V of a token), in any order of memory (`vllm/v1/kv_cache_layout.py`; FlashAttention,
FlashInfer and Triton attention). A block that the engine's manager hands out is one kernel block or several consecutive
ones. Each layer is one plane of `PagedKv`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.assembly import make_cpu_driver
from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import CudaDriver, Driver, Event, Stream, Tensor
from tiercache.device.paged import PagedChunk, PagedKv
from tiercache.errors import ConfigError, DeviceError, LayoutError
from tiercache.integrations.lending import Lending
from tiercache.integrations.vllm.planning import BlockTransfer, HeadParts, KvGroup
from tiercache.memory.slots import Lease

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATE_TOKENS = 2
"""Window size that represents a recurrent state."""
_POLL_S = 0.0005
"""Interval in seconds between two queries of a device's events."""


def find_groups(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[KvGroup, ...]:
    """Return the groups whose KV is cached. Raises LayoutError for models with layers that were not verified."""
    _check_engine(config)
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:  # vLLM 0.30 has no such field
        raise LayoutError("expected KV on the device, found HiSparse, which moves blocks to the host by itself")
    if kv_cache_config.needs_kv_cache_zeroing and getattr(config, "use_v2_model_runner", True):
        raise LayoutError(
            "expected blocks that stay as they are until they are saved, found the V2 model runner, which clears the new "
            "blocks of such a model before it asks the connector to wait; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    found = kv_cache_config.kv_cache_groups
    for group in found:
        _check_state(group.kv_cache_spec)
    groups = tuple(_group_of(index, found[index]) for index in kv_cache_config.prefix_cacheable_group_ids)
    if not groups:
        raise LayoutError("expected layers whose KV can be found by the tokens before it, found none")
    return groups if len(found) > 1 else (replace(groups[0], layers=()),)


def block_sizes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return the tokens that a hit is a multiple of, and the tokens that each of a request's block hashes covers."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        block_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        return block_tokens, block_tokens
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
    """Raise LayoutError unless the engine leaves recurrent states at the ends of blocks, where they can be found."""
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
    hosts = config.parallel_config.nnodes_within_dp
    if hosts > 1:
        raise LayoutError(
            f"expected all ranks of an engine on one host, found {hosts} hosts: the scheduler looks up prompts through the "
            "Unix socket of each rank"
        )
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        raise LayoutError(
            "expected an engine that ends when a step fails, found enable_fault_tolerance: it goes on, and KV that the step "
            "computed while a rank was missing would be stored"
        )
    if config.model_config.enable_sleep_mode:
        raise LayoutError(
            "expected KV memory that stays, found enable_sleep_mode: a sleep would take it from loads and saves under way"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "expected KV scales from the checkpoint, found calculate_kv_scales: the meaning of a byte would differ "
            "from one process to the next"
        )


def replicas_of(config: VllmConfig, specs: Iterable[Any]) -> int:
    """Return how many consecutive ranks hold the same bytes of every layer; 1 if each has its own, or if unknown.

    `specs` are the specifications of the layers. Also returns 1 if the ranks may be on several hosts (Ray): only one rank
    writes each chunk, and other hosts may not see its disk.
    """
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size
    if parallel.distributed_executor_backend not in ("mp", "uni"):
        return 1
    heads = _kv_heads(config)
    return reduce(math.gcd, (_replicas(spec, ranks, heads) for spec in specs), int(ranks))


def head_parts(config: VllmConfig, groups: Sequence[KvGroup], wanted: int) -> HeadParts | None:
    """Return the parts of this rank; `wanted` is `kv_head_parts`. Raises ConfigError if the heads cannot be cut so."""
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
        # vLLM states it for MLA, which has one latent for all heads that every rank computes.
        return max(1, ranks // int(shards))
    if not hasattr(spec, "num_kv_heads"):
        return ranks if spec.tp_replicated else 1  # a recurrent state
    if heads is not None and spec.num_kv_heads == 1 and ranks % heads == 0:
        # Consecutive ranks share a head (vLLM's QKVParallelLinear).
        return ranks // heads
    return 1


def _kv_heads(config: VllmConfig) -> int | None:
    """Return the KV heads of each layer over all ranks; None if layers may differ, or if there is a draft model."""
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


class _LayerTensors:
    """The common part of KV in host and device memory: one tensor per layer, all of one shape, strides and dtype.

    Each tensor has the shape (kernel blocks, heads, tokens, K and V of a token). `blocks` and `block_tokens` are those
    of the engine's block manager; a token has `content_bytes` in each of `heads`. With `states` a block has one
    recurrent state in place of the tokens. Raises LayoutError for other shapes, which were not verified.
    """

    bytes_per_block: int
    """The bytes of one block over all layers."""

    def __init__(
        self,
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
        self.first_name, first = next(iter(tensors.items()))
        self.shape, self.strides, self.dtype = _kind(first)
        self.layers = len(tensors)
        self.blocks = blocks
        self.block_tokens = block_tokens
        tokens, size = 1 if states else block_tokens, first.element_size()
        split = self.shape[0] // blocks if len(self.shape) == 4 and blocks > 0 else 0
        whole = split > 0 and tokens % split == 0 and content_bytes % size == 0
        if not whole or self.shape != (blocks * split, heads, tokens // split, content_bytes // size):
            raise LayoutError(
                f"KV of layer {self.first_name}: expected shape (blocks, heads, tokens, K and V of a token) with {blocks} "
                f"blocks of {tokens} tokens (or equal parts of them), {heads} heads and {content_bytes} bytes, as vLLM "
                f"0.32 has it, found {self.shape} of {size} bytes each; this was not verified, so its bytes are not touched"
            )
        for name, tensor in tensors.items():
            if _kind(tensor) != _kind(first):
                raise LayoutError(
                    f"KV of layer {name}: expected shape, strides and dtype of {self.first_name} {_kind(first)}, "
                    f"found {_kind(tensor)}; models with unlike layers are not supported"
                )

    @property
    def bytes_per_token(self) -> int:
        return -(-self.bytes_per_block // self.block_tokens)


class KvBlocks(_LayerTensors):
    """KV in host memory. Raises LayoutError for an arrangement that was not verified.

    Blocks are whole and dense. With `part` the tensors are views of a part of the heads. A gap may follow such a part,
    or a recurrent state, before the next block.
    """

    def __init__(self, tensors: Mapping[str, Any], *, part: bool = False, states: bool = False, **sizes: int) -> None:
        super().__init__(tensors, states=states, **sizes)
        self._part = part
        size = next(iter(tensors.values())).element_size()
        dense = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(4))
        # The stride of an axis with one entry does not matter, as with MLA's heads.
        inside = list(zip(self.shape, self.strides, dense, strict=True))[part or states :]
        spread = any(count > 1 and found != stride for count, found, stride in inside)
        if spread or self.strides[0] < dense[0] or self.shape[0] != self.blocks:
            raise LayoutError(
                f"KV of layer {self.first_name}: expected {self.blocks} dense blocks with strides {dense}, found "
                f"{self.shape[0]} with {self.strides}"
            )
        self.block_bytes: int = dense[0] * size
        self.bytes_per_block = self.layers * self.block_bytes
        self._planes = _planes(list(tensors.values()), self.blocks, self.block_bytes, self.strides[0] * size)

    def describe(self) -> str:
        """Return the byte format, for the layout's fingerprint. It leaves out the strides of a part of the heads."""
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

        Raises LayoutError if the payload has another length.
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


def _planes(tensors: list[Any], blocks: int, block_bytes: int, stride: int) -> list[np.ndarray]:
    """Return uint8 views (layers, blocks, block bytes) that together cover all layers.

    There is one view if the layers lie at equal distances in one storage, otherwise one per layer.
    """
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
    """Return the tensor's storage from its first element on, as bytes."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    view: np.ndarray = whole.numpy()[tensor.storage_offset() * tensor.element_size() :]
    return view


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, first block id) for each run of consecutive ids."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + 1:
            yield start, position, blocks[start]
            start = position


class DeviceKvBlocks(_LayerTensors):
    """KV in device memory, in any order. Raises LayoutError for unverified shapes and for overlapping blocks."""

    def __init__(self, driver: Driver, tensors: Mapping[str, Any], *, states: bool = False, **sizes: int) -> None:
        super().__init__(tensors, states=states, **sizes)
        self.driver = driver
        try:
            self.kv = PagedKv(driver, list(tensors.values()), self.blocks)
        except LayoutError as error:
            raise LayoutError(f"KV of layer {self.first_name}: {error}") from error
        self.bytes_per_block = self.kv.block_bytes

    def describe(self) -> str:
        """Return the byte format, for the layout's fingerprint. It is independent of the places of the blocks."""
        return f"vllm-device-{self.kv.describe()}"


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")


class Move:
    """A transfer of chunks between the engine's blocks and the cache.

    The engine's thread calls the public methods, except `copy`, which runs on a thread of the cache. In device memory
    `copy` only enqueues its work, after the work that the engine had enqueued when the move began (`after`), and an
    event tells when it has ended. So a save releases the engine's blocks as soon as they are gathered, long before the
    chunks arrive in the host's memory or a file.
    """

    future: concurrent.futures.Future[int]
    """Ends with the number of chunks in the cache (saves), or in the blocks (loads; a contiguous prefix)."""

    def __init__(self, driver: Driver | None, thread: CacheThread, copies: int) -> None:
        self._driver = driver
        self._thread = thread
        self._lending = Lending()
        self._task: asyncio.Task[int] | None = None
        self._lock = threading.Lock()
        self._to_come = copies
        """Number of copies that have not run, or have failed."""
        self._last_has_run = threading.Event()
        """Set when no further copy will run: all have run, the operation has ended, or the blocks were taken back."""
        self._behind: dict[Stream, Event] = {}
        """The last event of each stream, kept until it is known to have happened."""
        self.after = driver.record(driver.current_stream()) if driver is not None else None

    def begin(self, operation: Callable[[], Coroutine[Any, Any, int]]) -> None:
        """Run `operation` on the cache's loop. Raises CacheClosed."""
        self.future = self._thread.submit(self._run(operation))

    def is_off_blocks(self) -> bool:
        """Return True if the move no longer uses the blocks. This may be true long before `future` is done."""
        return self._last_has_run.is_set() and self._have_ended()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the move no longer uses the blocks. Return False if it still does after `timeout_s` seconds."""
        until_s = time.monotonic() + timeout_s
        if not self._last_has_run.wait(timeout_s):
            return False
        while not self._have_ended():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def take_back(self, wait_s: float) -> bool:
        """Let no copy begin, and wait up to `2 * wait_s` seconds for running ones. Return False if one may go on."""
        returned = self._lending.take_back(wait_s)
        self._last_has_run.set()
        self._thread.call_soon(self._cancel)
        if returned and self.wait(wait_s):
            return True
        with self._lock, contextlib.suppress(DeviceError):
            # At least order the engine's later work after these copies.
            for event in self._behind.values():
                assert self._driver is not None
                self._driver.wait(self._driver.current_stream(), event)
        return False

    def copy(self, copy: Callable[[], None], stream: Stream = None) -> None:
        """Run one copy of the blocks, on a thread of the cache. Raises TakenBack."""
        with self._lending:
            try:
                copy()
            finally:
                if self._driver is not None:
                    # A copy that failed may have been enqueued in part.
                    event = self._driver.record(stream)
                    with self._lock:
                        self._behind[stream] = event
            self._lending.check()
            with self._lock:
                self._to_come -= 1
                if not self._to_come:
                    self._last_has_run.set()

    async def _run(self, operation: Callable[[], Coroutine[Any, Any, int]]) -> int:
        self._task = asyncio.current_task()
        try:
            self._lending.check()
            return await operation()
        finally:
            self._last_has_run.set()

    def _cancel(self) -> None:
        """Called on the cache's loop. `future` ends when the operation does, which may still use a slot."""
        if self._task is not None:
            self._task.cancel()

    def _have_ended(self) -> bool:
        """Return True if all copies enqueued so far have ended on the device. Always true without a driver."""
        with self._lock:
            try:
                if self._driver is not None and not all(self._driver.query(event) for event in self._behind.values()):
                    return False
            except DeviceError:
                # The device is failing. Every wait for this method has a time limit.
                return False
            self._behind.clear()
            return True


class _LentChunk(PagedChunk):
    """A chunk in blocks of a device that may be taken back."""

    def __init__(self, move: Move, kv: DeviceKvBlocks, transfer: BlockTransfer) -> None:
        super().__init__(kv.kv, transfer.blocks, chunk_blocks=transfer.chunk_blocks, skip=transfer.skip)
        self._move = move

    def gather(self, chunk: Tensor, stream: Stream) -> None:
        self._move.copy(lambda: super(_LentChunk, self).gather(chunk, stream), stream)

    def scatter(self, chunk: Tensor, stream: Stream) -> None:
        self._move.copy(lambda: super(_LentChunk, self).scatter(chunk, stream), stream)


class Mover:
    """Begins moves between one worker's KV blocks and its cache. The engine's thread calls all public methods."""

    def __init__(self, kvs: Sequence[KvBlocks | DeviceKvBlocks], windows: Iterable[int] = ()) -> None:
        """Take `kvs` by group, as numbered by `BlockTransfer.group`; their tensors may share memory.

        `windows` are the groups with a window: their chunks do not form a prefix, and the last ones are worth most.
        """
        self.kvs = kvs
        self.driver: Driver | None = getattr(kvs[0], "driver", None)
        """The driver of the device that the blocks lie in; None for host memory. The cache has to use the same."""
        self._windows = frozenset(windows)

    def put(
        self,
        thread: CacheThread,
        keys: Sequence[ChunkKey],
        transfers: Sequence[BlockTransfer],
        deadline_s: float,
    ) -> Move:
        """Store blocks as chunks. In device memory they are read after the work that the engine has enqueued by now."""
        move, cache = Move(self.driver, thread, len(transfers)), thread.cache
        chunks = [self._chunk(move, transfer) for transfer in transfers]

        def put_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            if self.driver is None:
                items = [(keys[one], self._payload_bytes(transfers[one]), chunks[one]) for one in positions]
                return cache.put_from(items, deadline_s=deadline_s, prefix=not window)
            return cache.put_many(
                [keys[one] for one in positions],
                [chunks[one] for one in positions],
                after=move.after,
                deadline_s=deadline_s,
                prefix=not window,
            )

        move.begin(lambda: self._by_group(transfers, put_group))
        return move

    def get(
        self,
        thread: CacheThread,
        keys: Sequence[ChunkKey],
        transfers: Sequence[BlockTransfer],
        deadline_s: float,
        held: Mapping[ChunkKey, Lease] | None = None,
    ) -> Move:
        """Load chunks into blocks. In device memory the writes come after the work that the engine has enqueued by now.

        `held` is as for `TierCache.get_to`. With several groups the result is the sum of their prefixes, which is of
        use only if it counts all chunks.
        """
        move, cache = Move(self.driver, thread, len(transfers)), thread.cache
        chunks = [self._chunk(move, transfer, load=True) for transfer in transfers]

        def get_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            # Name the last chunks of a window first: eviction keeps chunks named earlier rather than later ones.
            ordered = positions[::-1] if window else positions
            some_keys, some = [keys[one] for one in ordered], [chunks[one] for one in ordered]
            if self.driver is None:
                return cache.get_to(some_keys, some, deadline_s=deadline_s, held=held)
            return cache.get_into(some_keys, some, after=move.after, deadline_s=deadline_s, held=held)

        move.begin(lambda: self._by_group(transfers, get_group))
        return move

    def _payload_bytes(self, transfer: BlockTransfer) -> int:
        return transfer.chunk_blocks * self.kvs[transfer.group].bytes_per_block

    def _chunk(self, move: Move, transfer: BlockTransfer, *, load: bool = False) -> Any:
        """Return the cache's end of a copy: a source or a sink in host memory, or a chunk in device memory."""
        kv, blocks = self.kvs[transfer.group], transfer.blocks
        if isinstance(kv, DeviceKvBlocks):
            return _LentChunk(move, kv, transfer)
        if load:
            return lambda chunk: move.copy(lambda: kv.scatter(chunk, transfer.chunk_blocks, transfer.skip, blocks))
        return lambda slot: move.copy(lambda: kv.gather(blocks, slot))

    async def _by_group(
        self,
        transfers: Sequence[BlockTransfer],
        move: Callable[[Sequence[int], bool], Coroutine[Any, Any, int]],
    ) -> int:
        """Run `move` concurrently for each group, with the positions of its transfers and True if it has a window.

        Return the sum of the results. If one fails, cancel the others, and raise when they have ended.
        """
        groups: dict[int, list[int]] = {}
        for position, transfer in enumerate(transfers):
            groups.setdefault(transfer.group, []).append(position)
        if len(groups) == 1:
            ((group, positions),) = groups.items()
            return await move(positions, group in self._windows)
        async with asyncio.TaskGroup() as tasks:
            moves = [tasks.create_task(move(positions, group in self._windows)) for group, positions in groups.items()]
        return sum(one.result() for one in moves)


def make_mover(
    config: Config, tensors: Mapping[str, Any], blocks: int, groups: Sequence[KvGroup], parts: HeadParts | None = None
) -> Mover:
    """Return the mover for the engine's KV. `groups` are those of the geometry.

    Raises LayoutError for KV in unsupported memory or of unverified shape, and DeviceError without a driver.
    """
    driver = _driver_of(config, tensors)
    kvs: list[KvBlocks | DeviceKvBlocks] = []
    for group in groups:
        sizes: dict[str, Any] = {
            "blocks": blocks,
            "heads": group.spec.num_heads // (parts.here if parts else 1),
            "block_tokens": group.spec.block_size,
            "content_bytes": group.spec.state_content_size_bytes,
            "states": group.recurrent,
        }
        of_group = _tensors_of(group, tensors, parts)
        if driver is None:
            kvs.append(KvBlocks(of_group, **sizes, part=parts is not None))
        else:
            on_device = DeviceKvBlocks(driver, of_group, **sizes)
            on_device.kv.warm_up()
            kvs.append(on_device)
    return Mover(kvs, [position for position, group in enumerate(groups) if group.window_tokens is not None])


def _tensors_of(group: KvGroup, tensors: Mapping[str, Any], parts: HeadParts | None) -> Mapping[str, Any]:
    """Return the group's tensors, or views of its part of the heads."""
    if group.layers:
        tensors = {name: tensors[name] for name in group.layers if name in tensors}
    # A layer that reads the KV of another layer has the same tensor.
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}.values()
    tensors = {name: tensors[name] for name in names}
    if parts is None:
        return tensors
    heads = group.spec.num_kv_heads // parts.here
    return {name: tensor[:, group.part * heads : (group.part + 1) * heads] for name, tensor in tensors.items()}


def _driver_of(config: Config, tensors: Mapping[str, Any]) -> Driver | None:
    """Return the driver of the device that holds the KV; None for host memory."""
    devices = {str(tensor.device): tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise LayoutError(f"expected the KV of all layers on one device, found {', '.join(sorted(devices)) or 'no KV'}")
    ((name, device),) = devices.items()
    if device.type == "cpu":
        return make_cpu_driver() if config.device == "cpu" else None
    if device.type != "cuda":
        raise LayoutError(f"expected KV in host memory or on a CUDA GPU, found it on {name}")
    if config.device != "auto":
        raise LayoutError(
            f"the KV lies on {name}, and the configuration says device: {config.device}; use device: auto"
        )
    return CudaDriver(device.index or 0)
