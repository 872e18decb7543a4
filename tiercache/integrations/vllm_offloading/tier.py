"""A tier below vLLM's CPU tier, as a `SecondaryTierManager` of vLLM 0.32.

vLLM calls one method at a time, from the scheduler's thread, and vLLM 0.33 beside a peer-to-peer tier also from another
one. They do not wait, except `drain_jobs` and `shutdown`. The cache runs on a loop thread of its own. A failure is a miss,
or a chunk that is not stored.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
from tiercache.errors import CacheClosed, TierCacheError
from tiercache.integrations.needed import TESTED_OFFLOADING, check_version
from tiercache.integrations.settings import warn_of_unread
from tiercache.integrations.vllm.events import MEDIA, ChunkWatch
from tiercache.integrations.vllm.hints import (
    RequestBegan,
    RequestEnded,
    SessionTurns,
    wishes_of,
)
from tiercache.integrations.vllm.identity import beside_others
from tiercache.integrations.vllm.logs import show_our_log, survives
from tiercache.integrations.vllm.metrics import WorkerFigures
from tiercache.integrations.vllm.names import check_hashes
from tiercache.integrations.vllm_offloading.identity import engine_config, make_layout
from tiercache.integrations.vllm_offloading.metrics import as_offloading_stats, definitions
from tiercache.integrations.vllm_offloading.requests import Name, TieredRequest
from tiercache.integrations.vllm_offloading.transfers import Ended, load, look_up, store

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger("tiercache.vllm")

T = TypeVar("T")

_MARGIN_S = 30.0
"""Longest time of a transfer beyond its deadline, unless the machine hangs."""


_Move = Callable[[TierCache, list[ChunkKey], list[np.ndarray]], Coroutine[Any, Any, Ended]]


@dataclass(frozen=True)
class _Job:
    """A transfer that vLLM waits for."""

    job_id: int
    request_id: str
    request: TieredRequest
    ends: dict[Name, int]
    """The chunks in the order of the prompt, with their ends in it."""
    is_load: bool


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """Loaded by `"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm_offloading"` in
    `secondary_tiers`.

    Configuration comes from the file in that entry's `config_file` (by default `TIERCACHE_CONFIG_FILE` /
    `LMCACHE_CONFIG_FILE`), the environment, and the entry's other keys. Raises ConfigError at start if it is invalid.
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
        if engine is not None:
            check_hashes(engine)
        config = Config.load(config_file, overrides=settings)
        config = beside_others(config, offloading.parallel)
        warn_of_unread(config, logger, "vLLM's offloading")
        layout = make_layout(offloading, self.block_size_bytes, engine, config.model_id)
        self._config = config
        if locality is not None:
            self.locality = Locality(locality)
        self.thread = CacheThread(config, layout)
        # Assigned last: a view held by a failed instance would prevent vLLM from freeing its memory.
        self._rows: np.ndarray | None = np.asarray(primary_kv_view).view(np.uint8)
        self._namespace = self.thread.cache.namespace
        self._tag = tenant_tag(config.tenant_salt)
        cache = self.thread.cache
        # The distance of a server's storage is unknown.
        if locality is None and all(tier.name in MEDIA for tier in cache.tiers):
            self.locality = Locality.LOCAL
        self._at_hand = [reader for reader in cache.parts.reader.tiers if reader.tier.name in MEDIA]
        self._requests: dict[str, TieredRequest] = {}
        self._lookups: dict[
            concurrent.futures.Future[tuple[list[int], float]], tuple[TieredRequest, list[list[Name]]]
        ] = {}
        self._jobs: dict[concurrent.futures.Future[Any], _Job] = {}
        self._turns = SessionTurns(self.thread, self._keys)
        self._warned: set[str] = set()
        self._closed = False
        self._figures = WorkerFigures(self.thread, f"{offloading.engine_id}/offloading")
        tells = offloading_spec.kv_events_config.enable_kv_cache_events
        self._watch = ChunkWatch(self.thread, lambda tier: "") if tells else None
        # An engine that exits without `shutdown` would not write its last chunks.
        atexit.register(self.shutdown)
        logger.info("chunks of %.2f MiB below vLLM's CPU tier; %s", self.block_size_bytes / 2**20, cache.describe())

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wishes = wishes_of(req_context, self._warned)
        self._requests[req_context.req_id] = TieredRequest(wishes)
        return RequestOffloadingContext()

    @survives(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self._requests.get(req_context.req_id)
        if self._closed or request is None:
            return LookupResult.MISS
        there = request.look_up(key, req_context.get_offload_key_position(key), self._is_known)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    @survives(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Record an access by a request: these chunks are evicted last, and are promoted into the hot cache."""
        self.thread.call_soon(self._use, self._keys(list(keys)))

    def _use(self, keys: list[ChunkKey]) -> None:
        cache = self.thread.cache
        cache.parts.fan_out.used(keys, cache.cpu)
        cache.warm_soon(keys)

    @survives(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and request.wishes.at_the_end:
            # Chunks from before a reset no longer have names.
            names = [] if request.stale else request.names
            storing = {future: job.request_id for future, job in self._jobs.items() if not job.is_load}
            self._turns.follow([RequestEnded(req_context.req_id, request.wishes, names)], storing)

    @survives(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for lookup in [lookup for lookup in self._lookups if lookup.done()]:
            request, runs = self._lookups.pop(lookup)
            found, took_s = _result(lookup, "a lookup failed") or ([0] * len(runs), 0.0)
            request.answered(runs, found, took_s)
        for request in self._requests.values():
            if request.unasked:
                self._look_up(request, request.take_unasked())
            if request.began:
                request.began = False
                self._turns.follow([RequestBegan(request.wishes.session, request.names)], {})

    def _look_up(self, request: TieredRequest, runs: list[list[Name]]) -> None:
        cache, keys = self.thread.cache, [self._keys(run) for run in runs]
        try:
            self._lookups[self.thread.submit(look_up(cache, keys, request.waited_s))] = request, runs
        except CacheClosed:
            request.answered(runs, [0] * len(runs), 0.0)

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._job(job_metadata)
        if job.request.stale:
            self._jobs[_nothing()] = job
            return
        job.request.stores(job.ends)
        if job.request.wishes.forget:
            self._turns.stores(job.request_id, self._keys(list(job.ends)))
        is_prefix = len({get_offload_group_idx(name) for name in job.ends}) == 1
        self._begin(job_metadata, job, partial(store, is_prefix=is_prefix))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(job_metadata, self._job(job_metadata), load)

    def _job(self, metadata: TransferJob) -> _Job:
        context = metadata.req_context
        ends = {name: context.get_offload_key_position(name) or 0 for name in metadata.keys}
        # Restore the order of the prompt, which vLLM's sets lack.
        ordered = sorted(ends.items(), key=lambda chunk: (get_offload_group_idx(chunk[0]), chunk[1]))
        request = self._requests.get(context.req_id) or TieredRequest()
        return _Job(metadata.job_id, context.req_id, request, dict(ordered), metadata.is_promotion)

    def _begin(self, metadata: TransferJob, job: _Job, move: _Move) -> None:
        """Run `move` on the cache's loop. The job ends in any case."""
        chunks = dict(zip(metadata.keys, metadata.chunk_ids.tolist(), strict=True))
        try:
            assert self._rows is not None
            rows = [self._rows[chunks[name]] for name in job.ends]
            future = self.thread.submit(move(self.thread.cache, self._keys(list(job.ends)), rows))
        except Exception as error:
            logger.warning("a transfer of %d chunks could not be begun: %r", len(job.ends), error)
            future = _nothing()
        self._jobs[future] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._jobs:
            # vLLM's `LLM` steps in a busy loop when it has nothing to compute (its server yields), so release the GIL
            # here: the cache's threads would otherwise wait 5 ms each for it.
            time.sleep(0)
        ended = [future for future in self._jobs if future.done()]
        return [self._job_result(future, self._jobs.pop(future)) for future in ended]

    def _job_result(self, future: concurrent.futures.Future[Any], job: _Job) -> JobResult:
        ended = _result(future, "a transfer failed") or Ended([False] * len(job.ends), 0.0)
        done = [name for name, is_done in zip(job.ends, ended.done, strict=True) if is_done]
        if job.is_load:
            job.request.could_not_load(job.ends.keys() - done)
        if self._watch is not None and done:
            self._watch.watch(dict(zip(self._keys(done), done, strict=True)))
        return JobResult(
            job.job_id,
            success=len(done) == len(job.ends),
            successful_keys=tuple(done) or None,
            transfer_time=ended.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until no copy uses vLLM's memory. Chunks stored before are not found afterwards.

        vLLM calls this when it resets its caches, for instance after weights were replaced, without giving the reason.
        Raises TierCacheError if the machine hangs in a copy: vLLM must not reuse that memory.
        """
        self._wait()
        self._namespace = self.thread.cache.namespace + os.urandom(16)
        self._lookups.clear()
        for request in self._requests.values():
            request.reset()
        if self._watch is not None:
            self._watch.forget_everything()
        self.thread.call_soon(self.thread.cache.clear_hot)
        logger.info("vLLM reset its caches: what was stored before is not found any more by this engine")

    def _wait(self) -> None:
        limit_s = max(self._config.blocking_timeout_secs, self._config.queue_wait_s) + _MARGIN_S
        if concurrent.futures.wait(self._jobs, limit_s).not_done:
            raise TierCacheError(f"a copy between vLLM's CPU tier and the cache has not ended within {limit_s:.0f} s")

    # Other calls of vLLM

    def has_pending_work(self) -> bool:
        """Return True if another step is needed to report stored and removed chunks to routers."""
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
        """Write the queued chunks, for up to `close_timeout_s`. Idempotent.

        Raises TierCacheError if the machine hangs in a copy, in which case vLLM keeps its memory mapped.
        """
        atexit.unregister(self.shutdown)
        self._closed = True
        report = self.thread.close(self._config.close_timeout_s)
        logger.info("closed; %s", report.describe())
        self._wait()
        # A remaining view would prevent vLLM from freeing its memory.
        self._rows = None

    def _keys(self, names: list[bytes]) -> list[ChunkKey]:
        return keys_from_hashes(self._namespace, names, self._tag)

    def _is_known(self, name: bytes) -> bool:
        """Return True if memory knows that the chunk is in a healthy tier of this host.

        Reads dictionaries of the cache's loop from another thread, so the answer is a hint.
        """
        (key,) = self._keys([name])
        if self.thread.cache.cpu.contains(key):
            return True
        return any(one.breaker.state is BreakerState.CLOSED and one.tier.offers(key) for one in self._at_hand)


def _result(future: concurrent.futures.Future[T], problem: str) -> T | None:
    """Return the result of an ended future, or None with a warning if it failed."""
    if future.cancelled():
        return None
    if (error := future.exception()) is not None:
        logger.warning("%s: %r", problem, error)
        return None
    return future.result()


def _nothing() -> concurrent.futures.Future[Any]:
    """Return an ended future for a job without a transfer."""
    ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
    ended.set_result(None)
    return ended
