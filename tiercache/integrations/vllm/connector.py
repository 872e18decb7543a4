"""TierCacheConnector: vLLM's KV connector interface (0.32), passed on to the two halves.

Whatever goes wrong in here is a miss or a chunk that is not stored, never an engine that stops: each method that vLLM calls
in service catches what it can survive, and says so once per kind.
"""

from __future__ import annotations

import functools
import logging
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.lookup import LookupClient
from tiercache.integrations.vllm.messages import SavesEnded, StepWork
from tiercache.integrations.vllm.planning import Geometry
from tiercache.integrations.vllm.scheduler_side import SchedulerSide
from tiercache.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")

R = TypeVar("R")

_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
_complained: set[str] = set()


def _survives(instead: Callable[[], R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """An exception becomes `instead()`, and one log line per method and kind."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> R:
            try:
                return method(*arguments, **named)
            except Exception as error:
                kind = f"{method.__name__}:{type(error).__name__}"
                if kind not in _complained:
                    _complained.add(kind)
                    logger.exception("the cache is of no use for a moment (said once): %s", kind)
                return instead()

        return call

    return decorate


class TierCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loaded by `kv_connector_module_path: tiercache.integrations.vllm`.

    Configuration comes from `TIERCACHE_CONFIG_FILE` / `LMCACHE_CONFIG_FILE`, the environment, and
    `kv_connector_extra_config` (same keys). Raises ConfigError or LayoutError at start for what cannot work.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_our_log()
        transfer = vllm_config.kv_transfer_config
        self._config = Config.load(overrides=dict(transfer.kv_connector_extra_config or {}))
        self._engine = str(transfer.engine_id)
        self._block_tokens = _block_tokens(kv_cache_config)
        self._geometry = Geometry.for_chunk_size(
            self._config.chunk_size, self._block_tokens, self._config.save_unfull_chunk
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if algorithm not in _CRYPTOGRAPHIC:
            raise LayoutError(
                f"--prefix-caching-hash-algo {algorithm}: chunk keys come from the engine's block hashes, which must be "
                f"cryptographic; use one of {', '.join(_CRYPTOGRAPHIC)}"
            )
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler_side(transfer)

    def _start_scheduler_side(self, transfer: Any) -> None:
        if self._geometry.chunk_tokens != self._config.chunk_size:
            logger.info(
                "chunk_size %d is rounded to %d: chunks are whole blocks of %d tokens",
                self._config.chunk_size,
                self._geometry.chunk_tokens,
                self._block_tokens,
            )
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads this after it has made the connector. "fail" would end a request for a chunk that went missing.
            logger.info("kv_load_failure_policy is set to recompute: a chunk that cannot be loaded is computed instead")
            transfer.kv_load_failure_policy = "recompute"
        workers = self._vllm_config.parallel_config.world_size
        client = LookupClient(self._engine, workers, self._geometry, self._config.lookup_timeout_ms / 1000)
        self._scheduler = SchedulerSide(self._config, self._geometry, client, workers)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a chunk that is not stored is a later miss, not an error."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        kv = KvBlocks(kv_caches, self._block_tokens)
        layout = _layout(self._vllm_config, kv, self._geometry)
        self._worker = WorkerSide(self._config, self._geometry, layout, kv, self._engine)
        logger.info(
            "rank %d: chunks of %d tokens, %.2f MiB each; %s",
            layout.rank,
            layout.chunk_tokens,
            layout.chunk_bytes / 2**20,
            self._worker.thread.cache.describe(),
        )

    @_survives(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepWork) and kv_connector_metadata.preempted:
            self._worker.before_blocks_are_given_away(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step_work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved after the step, all layers at once."""

    @_survives(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step_work())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        sent, received = self._worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended = self._worker.take_ended() if self._worker is not None else {}
        return SavesEnded(ended) if ended else None

    def _step_work(self) -> StepWork:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        return work

    # Scheduler

    @_survives(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_survives(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self._scheduler.after_allocation(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.step_work(scheduler_output)

    @_survives(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        if isinstance(connector_output.kv_connector_worker_meta, SavesEnded):
            self._scheduler.saves_ended(connector_output.kv_connector_worker_meta)
        if connector_output.invalid_block_ids:
            self._scheduler.loads_failed()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request), None

    def reset_cache(self) -> bool | None:
        """Empty the hot cache with the next step; chunks on other tiers stay."""
        if self._scheduler is not None:
            self._scheduler.forget_hot()
        return True

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.client.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of a block. Refuses models whose layers do not all keep the KV of every token."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise LayoutError(
            f"expected one group of full-attention layers, found {len(groups)} ({kinds}); sliding-window, Mamba and MLA "
            "models were not verified with this connector"
        )
    return int(groups[0].kv_cache_spec.block_size)


def _layout(config: VllmConfig, kv: KvBlocks, geometry: Geometry) -> Layout:
    """Everything that changes the bytes. LoRA, multimodal inputs and cache salts are in the block hashes."""
    model, parallel = config.model_config, config.parallel_config
    return Layout(
        model=str(model.model),
        revision=f"{model.revision or ''}/{_weights_identity(str(model.model))}",
        chunk_tokens=geometry.chunk_tokens,
        bytes_per_token=kv.bytes_per_block // geometry.block_tokens,
        kv_dtype=kv.dtype,
        layers=kv.layers,
        kv_heads=kv.shape[1],
        head_size=kv.shape[3] // 2,
        block_tokens=geometry.block_tokens,
        byte_format=kv.describe(),
        engine=f"vllm {vllm.__version__}",
        rank=parallel.rank,
        world_size=parallel.world_size,
        extra=(
            ("cache_dtype", str(config.cache_config.cache_dtype)),
            ("compute_dtype", str(model.dtype)),
            ("machine", platform.machine()),
            ("hash", f"{config.cache_config.prefix_caching_hash_algo} python {sys.version_info[0]}.{sys.version_info[1]}"),
            ("parallel", f"tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}"),
            ("quantization", str(model.quantization)),
            ("rope", str(getattr(model.hf_config, "rope_parameters", getattr(model.hf_config, "rope_scaling", None)))),
        ),
    )


def _weights_identity(model: str) -> str:
    """For a local directory: names, sizes and times of the weights, since other weights may come to lie under one path."""
    from pathlib import Path

    directory = Path(model)
    if not directory.is_dir():
        return ""
    parts = []
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".gguf", ".pt") or path.name == "config.json":
            status = path.stat()
            parts.append(f"{path.name}:{status.st_size}:{status.st_mtime_ns}")
    return ",".join(parts)


def _show_our_log() -> None:
    """vLLM sets up its own loggers only; without a handler of ours INFO lines would vanish in its processes."""
    ours = logging.getLogger("tiercache")
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
