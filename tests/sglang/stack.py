"""SGLang's own host pools and cache controllers on a CPU, with our back end below them. Called only in
the process with SGLang."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.sglang.pages import PAGE_TOKENS, page_hashes, read_pages, write_pages

WAIT_S = 20.0
LAYERS, HEADS, HEAD_SIZE = 3, 2, 32


class Engine:
    """A cache controller of SGLang's with its threads, as a scheduler has one."""

    def __init__(self, controller: Any, host: Any) -> None:
        self.controller = controller
        self.host = host

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def store(self, tokens: Sequence[int], pages: torch.Tensor) -> int:
        """Let the controller back up pages with these bytes, of these tokens; how many tokens it took for stored."""
        indices = self.host.alloc(len(tokens))
        write_pages(self.host, indices, pages)
        hashes = page_hashes(tokens)
        self.controller.write_storage(indices, list(tokens), hashes)
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        # What was copied may change.
        write_pages(self.host, indices, torch.zeros_like(pages))
        self.host.free(indices)
        return int(operation.completed_tokens)

    def load(self, tokens: Sequence[int]) -> torch.Tensor:
        """The bytes of the pages that the controller prefetches for `tokens`."""
        controller = self.controller
        operation = controller.prefetch("request", list(tokens))
        assert controller.prefetch_hit_queue.get(timeout=WAIT_S) is operation
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            completed = ack.completed_tokens
        pages = read_pages(self.host, operation.host_indices[:completed])
        self.host.free(operation.host_indices)
        return pages

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Block the cache's thread inside the block."""
        held, go_on = threading.Event(), threading.Event()
        self.storage._thread.loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait()))
        assert held.wait(10)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        self.controller.detach_storage_backend()


@contextmanager
def engine(directory: Path, host: Any = None, **options: Any) -> Iterator[Engine]:
    """A controller whose storage is tiercache with a disk tier in `directory`. `options`: of `parallel`, `model`, `metrics`,
    and the rest for the extra configuration."""
    from sglang.srt.managers.cache_controller import HiCacheController

    ranks = {name: options.pop(name) for name in tuple(options) if name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
    model, metrics = options.pop("model", "a-model"), options.pop("metrics", False)
    device, host = host or mha_pools()
    with parallel(**ranks):
        controller = HiCacheController(
            Allocator(device),
            host,
            PAGE_TOKENS,
            None,
            None,
            io_backend="direct",
            storage_backend="dynamic",
            model_name=model,
            storage_backend_extra_config=extra_config(directory, **options),
            enable_storage_metrics=metrics,
        )
        one = Engine(controller, host)
        try:
            yield one
        finally:
            one.close()


@contextmanager
def hybrid_engine(directory: Path, pools: Any = None, **ranks: int) -> Iterator[tuple[Any, Any, Any]]:
    """A hybrid controller, its pool of KV and its pool of recurrent states."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

    (device, kv), states = pools or mha_pools(), mamba_pool()
    entries = [
        PoolEntry(PoolName.KV, kv, device, lambda layer: layer, is_primary_index_anchor=True),
        PoolEntry(PoolName.MAMBA, states, None, lambda layer: layer),
    ]
    with parallel(**ranks):
        controller = HybridCacheController(
            Allocator(device),
            HostPoolGroup(entries),
            PAGE_TOKENS,
            None,
            None,
            io_backend="direct",
            storage_backend="dynamic",
            model_name="a-model",
            storage_backend_extra_config=extra_config(directory),
        )
        try:
            yield controller, kv, states
        finally:
            controller.detach_storage_backend()


def file_storage(directory: Path, kv: Any, states: Any) -> Any:
    """SGLang's own, over the same pools."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

    storage = HiCacheFile(storage_config(), file_path=str(directory))
    storage.register_mem_pool_host(kv)
    for name, pool in ((PoolName.KV, kv), (PoolName.MAMBA, states)):
        storage.register_mem_host_pool_v2(pool, name)
    return storage


def storage_config(**options: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    alone: dict[str, Any] = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    alone |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    alone |= {
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "a-model",
    }
    return HiCacheStorageConfig(**(alone | options))


def extra_config(directory: Path, **options: Any) -> dict[str, Any]:
    """As an operator says it, and SGLang hands it over."""
    return {
        "backend_name": "tiercache",
        "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage",
        "interface_v1": 1,
        "max_local_cpu_size": 0.02,
        "local_disk": str(directory),
        "max_local_disk_size": 0.1,
        **options,
    }


def in_another_process(work: Callable[[], None]) -> None:
    """Run `work` in a fork, and fail if it fails."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


class Allocator:
    """Of SGLang's the controller asks for the device pool only, as long as it moves nothing there."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def get_kvcache(self) -> Any:
        return self._device


@contextmanager
def parallel(tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1) -> Iterator[None]:
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(
        tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size, attn_dcp_size=1, attn_dcp_rank=0
    ):
        yield


def mha_pools(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> tuple[Any, Any]:
    """A device pool in host memory, and the host pool above it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(512, PAGE_TOKENS, dtype, heads, HEAD_SIZE, LAYERS, "cpu", False)
    return device, _above(device, MHATokenToKVPoolHost, layout)


def mla_pools(layout: str = "page_first") -> tuple[Any, Any]:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        512,
        PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return device, _above(device, MLATokenToKVPoolHost, layout, target_layer_num=LAYERS)


def _above(device: Any, kind: Any, layout: str, **more: Any) -> Any:
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=LAYERS,
        **more,
    )


def mamba_pool() -> Any:
    """Recurrent states, one index each."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 8, 4, 16, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 8, 24, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 8.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
