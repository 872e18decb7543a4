"""TierCacheTier: what lies below vLLM's CPU tier, as vLLM's `SecondaryTierManager` (0.32).

All methods run in the scheduler's thread and do not wait, but for `drain_jobs` and `shutdown`, which are there for that. The
cache lives on a loop thread of its own. Whatever goes wrong is a miss, or a chunk that is not stored.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.breaker import BreakerState
from tiercache.core.keys import ChunkKey, keys_from_hashes, tenant_tag
from tiercache.errors import TierCacheError
from tiercache.integrations.unread import warn_of_unread
from tiercache.integrations.vllm.events import MEDIA, MOST_CHUNKS, ChunkWatch
from tiercache.integrations.vllm.hints import (
    EXPECT_TOKENS,
    RequestBegan,
    RequestEnded,
    SessionTurns,
    said_by,
    wishes_of,
)
from tiercache.integrations.vllm.identity import beside_others
from tiercache.integrations.vllm.logs import show_our_log, survives
from tiercache.integrations.vllm.metrics import WorkerFigures
from tiercache.integrations.vllm.versions import TESTED_OFFLOADING, check_version
from tiercache.integrations.vllm_offloading.identity import check_hashes, engine_config, make_layout, say_whose_quotas
from tiercache.integrations.vllm_offloading.metrics import as_offloading_stats, definitions
from tiercache.integrations.vllm_offloading.questions import Questions
from tiercache.integrations.vllm_offloading.requests import TieredRequests
from tiercache.integrations.vllm_offloading.transfers import Ended, EndedTransfers, Transfer, load, store

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger("tiercache.vllm")

_MARGIN_S = 30.0
"""What a transfer takes beyond its deadline at the longest, unless the machine hangs."""


_Move = Callable[[TierCache, Transfer], Coroutine[Any, Any, Ended]]


@dataclass(frozen=True)
class _Job:
    """What is known of a transfer that vLLM waits for."""

    request_id: str
    names: list[bytes]
    ends: dict[bytes, int]
    """Where the chunks end in the prompt."""
    is_load: bool
    is_prefix: bool


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """Loaded by `"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm_offloading"` in `secondary_tiers`.

    Configuration comes from `config_file` there (by default `TIERCACHE_CONFIG_FILE` / `LMCACHE_CONFIG_FILE`), the
    environment, and the other keys beside it. Raises ConfigError at start for what cannot work.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        config_file: str | None = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        show_our_log()
        check_version(vllm.__version__, TESTED_OFFLOADING)
        offloading = offloading_spec.config
        engine = engine_config(offloading.engine_id)
        check_hashes(engine)
        config = Config.load(config_file, overrides=settings)
        parallel = offloading.parallel
        config = beside_others(config, parallel.data_parallel_index, parallel.data_parallel_size)
        warn_of_unread(config, logger, "vLLM's offloading")
        layout = make_layout(offloading, self.block_size_bytes, engine, config.model_id)
        say_whose_quotas(config)
        self._config = config
        wanted = Locality(locality) if locality is not None else None
        self.thread = CacheThread(config, layout)
        # Not before: who holds a view when this raises keeps vLLM from giving its memory back.
        self._rows: np.ndarray | None = np.asarray(primary_kv_view).view(np.uint8)
        self._namespace = self.thread.cache.namespace
        self._tag = tenant_tag(config.tenant_salt)
        cache = self.thread.cache
        # Of what is behind a server nobody knows how far away it is.
        is_local = all(tier.name in MEDIA for tier in cache.tiers)
        self.locality = wanted or (Locality.LOCAL if is_local else None)
        self._at_hand = [reader for reader in cache.parts.reader.tiers if reader.tier.name in MEDIA]
        self._requests = TieredRequests(self._is_known)
        self._questions = Questions(self.thread)
        self._jobs: dict[int, _Job] = {}
        self._ended = EndedTransfers()
        self._storing: dict[concurrent.futures.Future[Any], str] = {}
        self._turns = SessionTurns(self.thread, self._keys)
        self._warned: set[str] = set()
        self._closed = False
        self._figures = WorkerFigures(self.thread, f"{offloading.engine_id}/offloading")
        tells = offloading_spec.kv_events_config.enable_kv_cache_events
        self._watch = ChunkWatch(self.thread, lambda tier: "", MOST_CHUNKS) if tells else None
        # An engine that just exits would leave its last chunks unwritten.
        atexit.register(self.shutdown)
        logger.info("chunks of %.2f MiB below vLLM's CPU tier; %s", self.block_size_bytes / 2**20, cache.describe())

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wishes = wishes_of(said_by(req_context), self._warned)
        if wishes.expect_tokens and EXPECT_TOKENS not in self._warned:
            self._warned.add(EXPECT_TOKENS)
            logger.warning("what a request says: %s is not honoured below vLLM's offloading", EXPECT_TOKENS)
        self._requests.begin(req_context.req_id, wishes)
        return RequestOffloadingContext()

    @survives(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._closed:
            return LookupResult.MISS
        there = self._requests.look_up(req_context.req_id, key, req_context.get_offload_key_position(key))
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    @survives(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request uses these: they stay longest, and come from the tiers below into the hot cache."""
        self.thread.loop.call_soon_threadsafe(self._use, self._keys(list(keys)))

    def _use(self, keys: list[ChunkKey]) -> None:
        cache = self.thread.cache
        cache.parts.fan_out.used(keys, cache.cpu)
        cache.warm_soon(keys)

    @survives(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.end(req_context.req_id)
        if request is not None and request.wishes.at_the_end:
            # What it was told before a reset has no names any more.
            names = [] if request.stale else request.names
            self._turns.follow([RequestEnded(req_context.req_id, request.wishes, names)], self._storing)

    @survives(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for answer in self._questions.answers():
            self._requests.answer(answer)
        self._questions.ask(
            [(question, [self._keys(run) for run in question.runs]) for question in self._requests.questions()]
        )
        for request in self._requests.begun():
            began = RequestBegan(request.wishes.session, request.names)
            self._turns.follow([began], {})

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = _job(job_metadata)
        if self._requests.is_stale(job.request_id):
            self._end(job_metadata.job_id, job)
            return
        self._requests.stores(job.request_id, job.ends)
        if self._requests.forgets(job.request_id):
            self._turns.stores(job.request_id, self._keys(job.names))
        future = self._begin(job_metadata, job, store)
        if future is not None:
            self._storing[future] = job.request_id
            future.add_done_callback(lambda done: self._storing.pop(done, None))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, _job(job_metadata), load)

    def _begin(self, metadata: TransferJob, job: _Job, move: _Move) -> concurrent.futures.Future[Ended] | None:
        """`move` the chunks on the cache's loop. Whatever happens, the job ends."""
        rows = dict(zip(metadata.keys, metadata.chunk_ids.tolist(), strict=True))
        try:
            assert self._rows is not None
            places = [self._rows[rows[name]] for name in job.names]
            transfer = Transfer(metadata.job_id, self._keys(job.names), places, job.is_prefix)
            future = self.thread.submit(move(self.thread.cache, transfer))
        except Exception as error:
            logger.warning("a transfer of %d chunks could not be begun: %r", len(job.names), error)
            self._end(metadata.job_id, job)
            return None
        self._jobs[metadata.job_id] = job
        self._ended.begin()

        def ended(done: concurrent.futures.Future[Ended]) -> None:
            failed = done.cancelled() or done.exception() is not None
            self._ended.end(_nothing(metadata.job_id, job) if failed else done.result())

        future.add_done_callback(ended)
        return future

    def _end(self, job_id: int, job: _Job) -> None:
        """Without having done anything."""
        self._jobs[job_id] = job
        self._ended.begin()
        self._ended.end(_nothing(job_id, job))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._jobs:
            # vLLM's `LLM` steps again and again when it has nothing to compute (its server lets others run). The cache's
            # threads, which wait for Python's lock in turn, would get it after 5 ms each time.
            time.sleep(0)
        return [self._result(ended) for ended in self._ended.take()]

    def _result(self, ended: Ended) -> JobResult:
        job = self._jobs.pop(ended.job_id)
        done = [name for name, is_done in zip(job.names, ended.done, strict=True) if is_done]
        if job.is_load:
            self._requests.could_not_load(job.request_id, set(job.names).difference(done))
        if self._watch is not None and done:
            self._watch.watch(dict(zip(self._keys(done), done, strict=True)))
        return JobResult(
            ended.job_id,
            success=len(done) == len(job.names),
            successful_keys=tuple(done) or None,
            transfer_time=ended.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Until nothing touches vLLM's memory any more. vLLM calls it when it resets its caches, as it does when weights are
        replaced; it does not say which. So from here on nothing is found that was stored before.

        Raises TierCacheError where the machine hangs in a copy: vLLM must not give that memory to anybody.
        """
        self._wait()
        self._namespace = self.thread.cache.namespace + os.urandom(16)
        self._requests.forget_everything()
        if self._watch is not None:
            self._watch.forget_everything()
        if self._closed:
            return
        self.thread.loop.call_soon_threadsafe(self.thread.cache.clear_hot)
        logger.info("vLLM reset its caches: what was stored before is not found any more by this engine")

    def _wait(self) -> None:
        limit_s = max(self._config.blocking_timeout_secs, self._config.queue_wait_s) + _MARGIN_S
        if not self._ended.wait(limit_s):
            raise TierCacheError(f"a copy between vLLM's CPU tier and the cache has not ended within {limit_s:.0f} s")

    # What vLLM asks of it besides

    def has_pending_work(self) -> bool:
        """True: one more step is wanted, with which routers are told what has come and gone."""
        return self._watch is not None and self._watch.has_news

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._watch is None or not self._watch.has_news:
            return
        changes = self._watch.take()
        for removed in (True, False):
            if keys := [OffloadKey(name) for (name, _), there in changes.items() if there is not removed]:
                yield OffloadingEvent(
                    keys,
                    self.medium,
                    removed,
                    locality=Locality.LOCAL,
                    ownership=self.tier_type,
                    removal_expected=not removed,
                )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        new = self._figures.take()
        return as_offloading_stats(new) if new is not None else None

    def shutdown(self) -> None:
        """Write what is queued, for up to `close_timeout_s`. Idempotent.

        Raises TierCacheError where the machine hangs in a copy: vLLM keeps its memory mapped then.
        """
        atexit.unregister(self.shutdown)
        self._closed = True
        report = self.thread.close(self._config.close_timeout_s)
        left = ", ".join(f"{tier}: {chunks}" for tier, chunks in report.pending.items() if chunks)
        logger.info("closed; %s", f"chunks that were not written: {left}" if left else "every chunk was written")
        self._wait()
        # A view of ours would keep vLLM from giving its memory back.
        self._rows = None

    def _keys(self, names: list[bytes]) -> list[ChunkKey]:
        return keys_from_hashes(self._namespace, names, self._tag)

    def _is_known(self, name: bytes) -> bool:
        """Whether memory knows that the chunk is in a tier of this host that is well. Looks into dictionaries of the cache's
        loop, which another thread may do; what it sees is a hint, as it is on the loop."""
        (key,) = self._keys([name])
        if self.thread.cache.cpu.contains(key):
            return True
        return any(one.breaker.state is BreakerState.CLOSED and one.tier.offers(key) for one in self._at_hand)


def _job(metadata: TransferJob) -> _Job:
    context = metadata.req_context
    ends = {name: context.get_offload_key_position(name) or 0 for name in metadata.keys}
    # In the order of the prompt, which vLLM's sets do not have.
    names = sorted(ends, key=lambda name: (get_offload_group_idx(name), ends[name]))
    groups = {get_offload_group_idx(name) for name in names}
    return _Job(context.req_id, names, ends, metadata.is_promotion, len(groups) == 1)


def _nothing(job_id: int, job: _Job) -> Ended:
    return Ended(job_id, [False] * len(job.names), 0.0)
