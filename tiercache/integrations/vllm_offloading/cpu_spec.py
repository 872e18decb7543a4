"""vLLM's tiered offloading on its CPU platform, where vLLM's own copies need a GPU."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiercache.errors import ConfigError, TierCacheError

logger = logging.getLogger("tiercache.vllm")

_COPY_S = 60.0
"""Longest wait for copies in memory. An engine that continued would overwrite blocks that are still read."""


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Loaded by `"spec_name": "CpuTieringSpec", "spec_module_path": "tiercache.integrations.vllm_offloading"`.

    vLLM's `TieringOffloadingSpec` with copies by a thread; identical to vLLM's on other platforms. Raises ConfigError
    for `canonical_layout`, which the copies do not support.
    """

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ConfigError("canonical_layout: expected false on the CPU platform; leave it out")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _Piece(NamedTuple):
    """A block of one group in consecutive layers: `engine[block]` and `rows[chunk, place]` have the same shape."""

    engine: np.ndarray
    """uint8 array of shape (blocks, layers, bytes)."""
    rows: np.ndarray
    """uint8 array of shape (chunks, blocks of a chunk, layers, bytes)."""


class _Job(NamedTuple):
    number: int
    copies: list[tuple[np.ndarray, np.ndarray]]
    """Pairs of destination and source."""


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's blocks and rows of the CPU tier, in memory, by one thread and in order.

    A block's layers are copied in one call if they lie at equal distances, as on the CPU platform.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        engine = [_bytes_of(one.tensor, one.page_size_bytes) for one in kv_caches.tensors]
        views = [region.create_next_worker_view(page * blocks_per_chunk) for page in pages]
        rows = [view.numpy().view(np.uint8) for view in views]
        self._groups = [_pieces(refs, engine, rows, pages, blocks_per_chunk) for refs in kv_caches.group_data_refs]
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._ended: list[TransferResult] = []
        self._thread = threading.Thread(target=self._run, name="tiercache-offloading", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, [(row, block) for block, row in self._pairs(src_spec, dst_spec)])

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, self._pairs(dst_spec, src_spec))

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids), _COPY_S):
                raise TierCacheError(f"copies in memory have not ended within {_COPY_S:.0f} s")

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join(_COPY_S)
        if self._thread.is_alive():
            return  # the thread may still use this memory
        self._groups = []
        self._region.cleanup()

    def _submit(self, job_id: int, copies: list[tuple[np.ndarray, np.ndarray]]) -> bool:
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put(_Job(job_id, copies))
        return True

    def _pairs(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return pairs of views into the engine's blocks and into the rows.

        A group's first block may be in the middle of its first chunk.
        """
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        block_ids, chunk_ids, per_chunk = blocks.block_ids.tolist(), chunks.block_ids.tolist(), self._blocks_per_chunk
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        first_block = first_chunk = 0
        for pieces, size, index in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = index % per_chunk if size else 0
            for number in range(size):
                chunk, place = divmod(skipped + number, per_chunk)
                block, row = block_ids[first_block + number], chunk_ids[first_chunk + chunk]
                pairs += [(piece.engine[block], piece.rows[row, place]) for piece in pieces]
            first_block += size
            first_chunk += -(-(skipped + size) // per_chunk)
        return pairs

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began_s = time.perf_counter()
            for into, source in job.copies:
                np.copyto(into, source)
            moved_bytes = sum(source.nbytes for _, source in job.copies)
            with self._changed:
                self._pending.discard(job.number)
                self._ended.append(TransferResult(job.number, True, moved_bytes, time.perf_counter() - began_s))
                self._changed.notify_all()


def _bytes_of(tensor: Any, page_bytes: int) -> np.ndarray:
    """Return a view of shape (blocks, page bytes) for any distance between blocks."""
    import torch

    found: np.ndarray = tensor.view(torch.uint8).view(-1, page_bytes).numpy()
    return found


def _pieces(
    refs: list[CanonicalKVCacheRef], engine: list[np.ndarray], rows: list[np.ndarray], pages: list[int], per_chunk: int
) -> list[_Piece]:
    """Return a single piece for all layers if they lie at equal distances on both sides, else a piece for each layer."""
    return [
        _piece([engine[ref.tensor_idx] for ref in run], [rows[ref.tensor_idx] for ref in run], run, pages, per_chunk)
        for run in _evenly_spaced(refs, engine, rows, pages)
    ]


def _evenly_spaced(
    refs: list[CanonicalKVCacheRef], engine: list[np.ndarray], rows: list[np.ndarray], pages: list[int]
) -> list[list[CanonicalKVCacheRef]]:
    runs: list[list[CanonicalKVCacheRef]] = []

    def continues(run: list[CanonicalKVCacheRef], ref: CanonicalKVCacheRef) -> bool:
        last = run[-1]
        if (ref.page_size_bytes, pages[ref.tensor_idx]) != (last.page_size_bytes, pages[last.tensor_idx]):
            return False
        if engine[ref.tensor_idx].strides != engine[last.tensor_idx].strides:
            return False
        steps = _step(engine, last, ref), _step(rows, last, ref)
        return len(run) == 1 or steps == (_step(engine, run[0], run[1]), _step(rows, run[0], run[1]))

    for ref in refs:
        if runs and continues(runs[-1], ref):
            runs[-1].append(ref)
        else:
            runs.append([ref])
    return runs


def _step(arrays: list[np.ndarray], one: CanonicalKVCacheRef, other: CanonicalKVCacheRef) -> int:
    return _address(arrays[other.tensor_idx]) - _address(arrays[one.tensor_idx])


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _piece(
    engine: list[np.ndarray], rows: list[np.ndarray], refs: list[CanonicalKVCacheRef], pages: list[int], per_chunk: int
) -> _Piece:
    layers, page, used = len(refs), pages[refs[0].tensor_idx], refs[0].page_size_bytes
    engine_step = _address(engine[1]) - _address(engine[0]) if layers > 1 else 0
    row_step = _address(rows[1]) - _address(rows[0]) if layers > 1 else 0
    strided = np.lib.stride_tricks.as_strided
    return _Piece(
        strided(engine[0], (len(engine[0]), layers, used), (engine[0].strides[0], engine_step, 1)),
        strided(rows[0], (len(rows[0]), per_chunk, layers, used), (rows[0].strides[0], page, row_step, 1)),
    )
