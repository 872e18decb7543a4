"""vLLM's tiered offloading on its CPU platform, where vLLM's own copies need a GPU. Tests and benchmarks use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiercache.errors import ConfigError, TierCacheError

_COPY_S = 60.0
"""Longest wait for copies in memory. An engine that continued would overwrite blocks that are still read."""
_AT_ONCE_BYTES = 32 << 20
"""Limit of a copy in bytes, since NumPy makes a temporary copy of the same size."""


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Loaded by `"spec_name": "CpuTieringSpec", "spec_module_path": "tests.vllm.cpu_spec"`.

    Copies blocks in a thread on the CPU platform, and is identical to vLLM's `TieringOffloadingSpec` on others. Raises
    ConfigError for `canonical_layout` and chunks of several blocks on the CPU platform: the copies do not support them.
    """

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ConfigError("canonical_layout: expected false on the CPU platform; leave it out")
        if self.blocks_per_chunk != 1:
            raise ConfigError(f"expected chunks of one block on the CPU platform, found {self.blocks_per_chunk}")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, region)
        return self._worker


_Place = tuple[np.ndarray, Any]
"""An int8 array of the engine (blocks, bytes) or the CPU tier (rows, bytes), and an index of blocks or rows."""


def _copy(source: _Place, target: _Place) -> int:
    """Return the bytes copied."""
    array, blocks = source
    copied = array[blocks]
    array, blocks = target
    array[blocks] = copied
    return copied.nbytes


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's blocks and rows of the CPU tier, in memory, in one thread and in order.

    A job copies many blocks of a layer in one call of NumPy, which releases the GIL. vLLM 0.33 expedites loads that it waits
    for within a step; these keep their place.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        engine = [one.tensor.view(-1, page).numpy() for one, page in zip(kv_caches.tensors, pages, strict=True)]
        rows = [region.create_next_worker_view(page).view(-1, page).numpy() for page in pages]
        self._groups = [
            [
                (engine[ref.tensor_idx][:, : ref.page_size_bytes], rows[ref.tensor_idx][:, : ref.page_size_bytes])
                for ref in refs
            ]
            for refs in kv_caches.group_data_refs
        ]
        """The layers of each group."""
        self._jobs: SimpleQueue[tuple[int, list[Callable[[], int]]] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._ended: list[TransferResult] = []
        self._thread = threading.Thread(target=self._run, name="tiercache-offloading", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, [partial(_copy, engine, rows) for engine, rows in self._parts(src_spec, dst_spec)])

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, [partial(_copy, rows, engine) for engine, rows in self._parts(dst_spec, src_spec)])

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

    def _submit(self, job_id: int, copies: list[Callable[[], int]]) -> bool:
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, copies))
        return True

    def _parts(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> Iterator[tuple[_Place, _Place]]:
        """Yield each layer's blocks in the engine with their rows, in parts."""
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        block_ids, row_ids = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        first = 0
        for layers, size in zip(self._groups, blocks.group_sizes, strict=True):
            for engine, rows in layers:
                step = max(1, _AT_ONCE_BYTES // engine.shape[1])
                for start in range(first, first + size, step):
                    some = slice(start, min(start + step, first + size))
                    yield (engine, block_ids[some]), (rows, row_ids[some])
            first += size

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, copies = job
            began_s = time.perf_counter()
            copied_bytes = sum(copy() for copy in copies)
            with self._changed:
                self._pending.discard(job_id)
                self._ended.append(TransferResult(job_id, True, copied_bytes, time.perf_counter() - began_s))
                self._changed.notify_all()
