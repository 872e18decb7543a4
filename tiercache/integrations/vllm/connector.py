"""TierCacheConnector: passes the calls of vLLM's KV connector interface (0.30 to 0.32) on to the two halves.

A failure in this package is a miss or a chunk that is not stored, and does not stop the engine: methods that vLLM calls
in service catch the errors that they can survive, and log them once per kind.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tiercache.config import Config
from tiercache.integrations.needed import check_version
from tiercache.integrations.vllm.blocks import block_sizes, find_groups, head_parts, make_mover
from tiercache.integrations.vllm.events import KvEvents
from tiercache.integrations.vllm.identity import beside_others, make_layout
from tiercache.integrations.vllm.logs import show_our_log, survives
from tiercache.integrations.vllm.lookup import LookupClient
from tiercache.integrations.vllm.metadata import StepReport, StepWork
from tiercache.integrations.vllm.metrics import TierCachePromMetrics, TierCacheStats
from tiercache.integrations.vllm.names import BlockNames, check_hashes
from tiercache.integrations.vllm.planning import BlockGeometry, in_parts
from tiercache.integrations.vllm.scheduler import SchedulerSide
from tiercache.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")


class TierCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loaded by `kv_connector_module_path: tiercache.integrations.vllm`.

    Configuration comes from `TIERCACHE_CONFIG_FILE` / `LMCACHE_CONFIG_FILE`, the environment, and
    `kv_connector_extra_config` (same keys). Raises ConfigError or LayoutError at start if they cannot work.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        show_our_log()
        check_version(vllm.__version__)
        check_hashes(vllm_config)
        transfer = vllm_config.kv_transfer_config
        # Only the scheduler's half warns of settings without effect; every worker would repeat it.
        quiet = role != KVConnectorRole.SCHEDULER
        self._config = Config.load(overrides=dict(transfer.kv_connector_extra_config or {}), quiet=quiet)
        self._config = beside_others(self._config, vllm_config.parallel_config)
        self._engine = str(transfer.engine_id)
        self._groups = find_groups(vllm_config, kv_cache_config)
        block_tokens, self._hash_tokens = block_sizes(vllm_config, kv_cache_config)
        saves_tails = self._config.save_unfull_chunk is not False
        self._geometry = BlockGeometry.for_chunk_size(self._config.chunk_size, block_tokens, saves_tails, self._groups)
        if (parts := head_parts(vllm_config, self._groups, self._config.kv_head_parts)) is not None:
            self._geometry = in_parts(self._geometry, self._groups, parts)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._raised_before: BaseException | None = None
        """The exception that was being handled when the step began."""
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(transfer)

    def _scheduler_side(self, transfer: Any) -> SchedulerSide:
        if self._geometry.chunk_tokens != self._config.chunk_size:
            logger.info(
                "chunk_size %d is rounded to %d: chunks are whole blocks of %d tokens%s",
                self._config.chunk_size,
                self._geometry.chunk_tokens,
                self._geometry.block_tokens,
                ", no longer than the shortest window needs" if not self._geometry.plain else "",
            )
        if not self._geometry.plain:
            parts, states = self._geometry.parts, sum(group.recurrent for group in self._groups)
            logger.info(
                "%d groups of layers%s%s: hits are whole chunks%s",
                len(self._groups),
                f", {states} of which keep a recurrent state, so that chunks are single blocks" if states else "",
                f", KV heads in {parts.all} parts" if parts is not None else "",
                ", and save_unfull_chunk is off" if self._config.save_unfull_chunk else "",
            )
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads this after it has made the connector. "fail" would end a request if a chunk is missing.
            logger.info(
                "kv_load_failure_policy is set to recompute: a chunk that cannot be loaded is computed instead (below a "
                "MultiConnector, set it beside that: vLLM reads it there)"
            )
            transfer.kv_load_failure_policy = "recompute"
        workers = self._vllm_config.parallel_config.world_size
        client = LookupClient(self._engine, workers, self._geometry)
        events = KvEvents(self._geometry, self._hash_tokens) if self._tells_routers else None
        return SchedulerSide(self._config, self._geometry, self._names(), client, workers, events, transfer.kv_role)

    @property
    def _tells_routers(self) -> bool:
        config = self._vllm_config.kv_events_config
        return config is not None and config.enable_kv_cache_events

    def _names(self) -> BlockNames:
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        return BlockNames(algorithm, self._geometry.block_tokens, self._hash_tokens, self._config.tenant_salt)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a chunk that is not stored is a later miss, not an error."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        geometry, blocks = self._geometry, self._kv_cache_config.num_blocks
        mover = make_mover(self._config, kv_caches, blocks, geometry.groups, geometry.parts)
        layout = make_layout(
            self._vllm_config, self._groups, mover.kvs, self._geometry, kv_caches, self._config.model_id
        )
        self._worker = WorkerSide(
            self._config,
            self._geometry,
            layout,
            mover,
            self._engine,
            self._names(),
            kv_events=self._tells_routers,
        )
        logger.info(
            "rank %d: chunks of %d tokens, %.2f MiB each; %s",
            layout.rank,
            layout.chunk_tokens,
            layout.chunk_bytes / 2**20,
            self._worker.thread.cache.describe(),
        )

    @survives(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepWork):
            self._worker.before_blocks_are_given_away(kv_connector_metadata.preempted, kv_connector_metadata.given_away)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._raised_before = sys.exception()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step_work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads have ended before the forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved after the step, all layers at once."""

    def wait_for_save(self) -> None:
        if self._worker is None:
            return
        if sys.exception() is not self._raised_before:
            # vLLM's V1 model runner calls this on its way out of a forward pass that raised an error, too.
            self._worker.stop_storing()
        self._worker.save(self._step_work())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        sent, received = self._worker.finished()
        return KVConnectorTransferResults(sent, received, self._worker.take_failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_progress() if self._worker is not None else None

    def _step_work(self) -> StepWork:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        return work

    # Scheduler

    @survives(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @survives(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        tables = blocks.get_block_ids() if num_external_tokens or not self._geometry.plain else ()
        self._scheduler.after_allocation(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.step_work(scheduler_output)

    @survives(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        if connector_output.invalid_block_ids or connector_output.failed_recving:
            self._scheduler.loads_failed(connector_output.invalid_block_ids, connector_output.failed_recving or ())
        if isinstance(connector_output.kv_connector_worker_meta, StepReport):
            self._scheduler.progress(connector_output.kv_connector_worker_meta)

    @survives(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the BlockStored and BlockRemoved events of this host's tiers since the last call."""
        if self._scheduler is None or self._scheduler.kv_events is None:
            return ()
        return self._scheduler.kv_events.take()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return True if the blocks must stay, and fields of a producer's answer.

        The fields tell how much of the prompt other engines will find; a request sent to them repeats the fields.
        """
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Return True if blocks come free soon, when their saves end: waiting is then cheaper than a preemption."""
        return self._scheduler is not None and self._scheduler.holds_blocks

    def has_pending_push_work(self) -> bool:
        """Return True if another step is needed to pass hints or a reset to the workers."""
        return self._scheduler is not None and self._scheduler.has_news

    # Figures

    @survives(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return this half's new figures since the last call; None if there are none."""
        half = self._worker or self._scheduler
        return half.figures.take() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TierCacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierCachePromMetrics:
        return TierCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Make all chunks stored so far unreachable for this engine. vLLM calls this when the weights have changed."""
        if self._scheduler is not None:
            self._scheduler.reset()
            logger.info("the cache was reset: what was stored before is not used any more by this engine")
        return True

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.client.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


# Inside a MultiConnector, vLLM looks up the class of the figures by its name alone.
with contextlib.suppress(ValueError):  # registered already
    KVConnectorFactory.register_connector(TierCacheConnector.__name__, __name__, TierCacheConnector.__name__)
