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
from tiercache.integrations.vllm.planning import BlockTransfer, HeadParts, KvGroup
from tiercache.memory.slots import Lease
from tiercache.payloads import Source

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATE_TOKENS = 2
"""The window that a recurrent state is like."""
_POLL_S = 0.0005
"""Between two looks at the events of a device."""


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
    """Return in words, for the log, which groups keep less than every token."""
    windows = [group.window_tokens for group in groups if group.window_tokens is not None and not group.recurrent]
    states = sum(group.recurrent for group in groups)
    sizes = ", ".join(map(str, sorted(set(windows))))
    said = f", {len(windows)} of which keep a window ({sizes} tokens)" if windows else ""
    said += f", {states} of which keep a recurrent state, so that chunks are single blocks" if states else ""
    return f"{said}: a hit loads from them what the next token needs" if said else ""


def block_sizes(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return what hits are multiples of, and how many tokens each of a request's block hashes stands for."""
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
    """Return how many consecutive ranks hold the same bytes of every layer, whose specifications are `specs`. 1: unknown, or
    each has its own.

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
    """Return the KV heads of each layer over all ranks; None if layers have unlike numbers, or a draft model has layers."""
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
    """The common part of KV in host memory and in device memory: one tensor a layer, all of one shape, strides and dtype.

    Expected of each tensor: shape (kernel blocks, heads, tokens, K and V of a token). `blocks` and `block_tokens` are those
    of the engine's block manager; a token has `content_bytes` in each of `heads`. Of recurrent states (`states`) there is
    one in the place of the tokens. Raises LayoutError for another shape, which was not verified.
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

    Blocks are whole and dense. With `part` the tensors are views of a part of the heads; behind these, and behind a
    recurrent state, there may be room before the next block.
    """

    def __init__(self, tensors: Mapping[str, Any], *, part: bool = False, states: bool = False, **sizes: int) -> None:
        super().__init__(tensors, states=states, **sizes)
        self._part = part
        size = next(iter(tensors.values())).element_size()
        dense = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(4))
        # How far the next one would be does not matter where there is only one, as with MLA's heads.
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
        """Return the byte format, for the layout's fingerprint. Of a part it does not say how far apart blocks lie."""
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


def _planes(tensors: list[Any], blocks: int, block_bytes: int, stride: int) -> list[np.ndarray]:
    """uint8 views (layers, blocks, block bytes) that together cover all layers: one where they lie at equal distances in
    one storage, else one a layer.
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


class DeviceKvBlocks(_LayerTensors):
    """KV in device memory, in any order. Raises LayoutError for a shape that was not verified, or blocks that overlap."""

    def __init__(self, driver: Driver, tensors: Mapping[str, Any], *, states: bool = False, **sizes: int) -> None:
        super().__init__(tensors, states=states, **sizes)
        self.driver = driver
        try:
            self.kv = PagedKv(driver, list(tensors.values()), self.blocks)
        except LayoutError as error:
            raise LayoutError(f"KV of layer {self.first_name}: {error}") from error
        self.bytes_per_block = self.kv.block_bytes

    def describe(self) -> str:
        """Return the byte format, for the layout's fingerprint. Where the blocks lie is no part of it."""
        return f"vllm-device-{self.kv.describe()}"


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")


class TakenBack(Exception):
    """The engine took its blocks back: they must not be touched any more."""


class Lending:
    """The engine's blocks, lent to copying threads for one transfer. A copy runs inside `with lending`; after `take_back`
    none begins, and it waits for those that run.

    Without it a copy that comes too late would write into a block that the engine has given to another request, or store
    that request's bytes under this one's key.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._copying = 0
        self._taken_back = False

    def __enter__(self) -> None:
        with self._condition:
            if self._taken_back:
                raise TakenBack
            self._copying += 1

    def __exit__(self, *raised: object) -> None:
        with self._condition:
            self._copying -= 1
            self._condition.notify_all()

    def reading(self, source: Source) -> Source:
        """Return `source`, which reads what is lent, as a source that raises TakenBack."""

        def fill(slot: np.ndarray) -> None:
            with self:
                source(slot)
                self.check()

        return fill

    def check(self) -> None:
        """Raise TakenBack when what was just read may have been overwritten meanwhile."""
        if self._taken_back:
            raise TakenBack

    def take_back(self, wait_s: float) -> bool:
        """Return False when a copy is still running after `wait_s` seconds."""
        with self._condition:
            self._taken_back = True
            return self._condition.wait_for(lambda: not self._copying, max(0.0, wait_s))


class Move:
    """Chunks on their way between the engine's blocks and the cache. Public methods are called by the engine's thread.

    Each copy runs on a thread of the cache, inside `lending`. In device memory that only enqueues it, behind what the engine
    had enqueued when the move began (`after`), and an event behind it says when it has ended. So a save lets go of the
    engine's blocks as soon as they are gathered, long before the chunks have come to the host or a file.
    """

    future: concurrent.futures.Future[int]
    """Ends with the number of chunks that are in the cache, or (of the contiguous prefix) in the blocks."""

    def __init__(self, driver: Driver | None, thread: CacheThread, copies: int) -> None:
        self._driver = driver
        self._thread = thread
        self._lending = Lending()
        self._task: asyncio.Task[int] | None = None
        self._lock = threading.Lock()
        self._to_come = copies
        """Copies that have not run, or have failed."""
        self._last_has_run = threading.Event()
        """Set when no further copy will run: all have, the cache is done, or the blocks were taken back."""
        self._behind: dict[Stream, Event] = {}
        """The last event of each stream, as long as it may not have happened."""
        self.after = driver.record(driver.current_stream()) if driver is not None else None

    def begin(self, operation: Callable[[], Coroutine[Any, Any, int]]) -> None:
        """Run the cache's part. Raises CacheClosed."""
        self.future = self._thread.submit(self._run(operation))

    def is_off_blocks(self) -> bool:
        """Return True if the blocks are not touched any more. May be true long before `future` is done."""
        return self._last_has_run.is_set() and self._have_ended()

    def wait(self, timeout_s: float) -> bool:
        """Return `is_off_blocks`, after waiting for that."""
        until_s = time.monotonic() + timeout_s
        if not self._last_has_run.wait(timeout_s):
            return False
        while not self._have_ended():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def take_back(self, wait_s: float) -> bool:
        """Let no further copy begin, and wait for those that run. Return False when one still runs after `wait_s`
        seconds.
        """
        returned = self._lending.take_back(wait_s)
        self._last_has_run.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._cancel)
        if returned and self.wait(wait_s):
            return True
        with self._lock, contextlib.suppress(DeviceError):
            # At least whatever the engine enqueues from now on comes after them.
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
                    # Also a copy that failed may have been enqueued in part.
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
        """Called on the cache's loop. `future` ends with the operation, which may still be at work on a slot."""
        if self._task is not None:
            self._task.cancel()

    def _have_ended(self) -> bool:
        """Return True if all copies that have run by now have ended: in device memory they run on."""
        with self._lock:
            try:
                if self._driver is not None and not all(self._driver.query(event) for event in self._behind.values()):
                    return False
            except DeviceError:
                # The device is lost, or about to be. Every wait for this has a time limit.
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
    """Begins moves between one worker's KV blocks and its cache. All methods are called by the engine's thread."""

    def __init__(self, kvs: Sequence[KvBlocks | DeviceKvBlocks], windows: Iterable[int] = ()) -> None:
        """`kvs` by group, as `BlockTransfer.group` counts them; their tensors may share memory. `windows`: groups with a
        window, whose chunks do not follow one another in a prefix: the last are worth most.
        """
        self.kvs = kvs
        self.driver: Driver | None = getattr(kvs[0], "driver", None)
        """The driver of the device that the blocks lie in; None for host memory. The cache has to use the same."""
        self._windows = frozenset(windows)

    def put(
        self, thread: CacheThread, keys: Sequence[ChunkKey], transfers: Sequence[BlockTransfer], deadline_s: float
    ) -> Move:
        """Store blocks as chunks. They are read when all that the engine has begun by now is done."""
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
        """Load chunks into blocks. They are written when all that the engine has begun by now is done. `held` as for
        `TierCache.get_to`.

        Chunks of several groups: all of them are needed, so what one lacks leaves the others uncounted.
        """
        move, cache = Move(self.driver, thread, len(transfers)), thread.cache
        chunks = [self._chunk(move, transfer, load=True) for transfer in transfers]

        def get_group(positions: Sequence[int], window: bool) -> Coroutine[Any, Any, int]:
            # Of a window the last first: eviction keeps what is named before rather than what follows.
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
        """Return what the cache copies to or from: a source or a sink of host memory, or a chunk of a device's."""
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
        """Run `move` for the positions of each group's transfers, side by side, saying whether it has a window. Return the
        sum of what they return; where one fails, the others are ended first.
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
    """`groups` as the geometry has them. Raises LayoutError for KV that cannot be moved from where it lies
    or was not verified; DeviceError without driver.
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
    """Return the group's tensors; of its part of the heads, views."""
    if group.layers:
        tensors = {name: tensors[name] for name in group.layers if name in tensors}
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
