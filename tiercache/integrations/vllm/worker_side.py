"""The worker's half: moves blocks between the engine's KV and the cache, beside the engine's steps.

On the CPU platform a step's KV is in memory when the forward returns, so `save` (called by vLLM's `wait_for_save`, after
the forward) may read it at once. A device with streams has to record an event here and wait for it before the copies.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.keys import keys_from_hashes
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.lookup import LookupServer
from tiercache.integrations.vllm.messages import Load, Save, StepWork
from tiercache.integrations.vllm.planning import Geometry, Transfer

logger = logging.getLogger("tiercache.vllm")

_MARGIN_S = 2.0
"""What a wait for the cache's thread may take beyond the cache's own deadline."""
_PREEMPTION_WAIT_S = 5.0


class _Abandoned(Exception):
    """The engine took its blocks back: they must not be touched any more."""


@dataclass
class _Saving:
    """One `Save` under way. `copied` is set when no source will read the engine's blocks any more."""

    request_id: str
    remaining: int
    copied: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False

    def source(self, kv: KvBlocks, transfer: Transfer) -> Callable[[np.ndarray], None]:
        def fill(payload: np.ndarray) -> None:
            if self.abandoned:
                raise _Abandoned
            kv.gather(transfer.blocks, payload)
            self.remaining -= 1
            if not self.remaining:
                self.copied.set()

        return fill


@dataclass
class _Loading:
    load: Load
    future: concurrent.futures.Future[int]
    abandoned: bool = False


class WorkerSide:
    """All methods are called by the engine's thread."""

    def __init__(self, config: Config, geometry: Geometry, layout: Layout, kv: KvBlocks, engine: str) -> None:
        self.config = config
        self.geometry = geometry
        self.kv = kv
        self.thread = CacheThread(config, layout)
        self._namespace = self.thread.cache.namespace
        self._lookups = LookupServer(engine, layout.rank, self.thread, geometry)
        self._receiving: dict[str, _Loading] = {}
        self._saving: list[_Saving] = []
        self._ended: Counter[str] = Counter()
        self._held: set[str] = set()
        self._bad_blocks: set[int] = set()

    def load(self, work: StepWork) -> None:
        """Begin the step's loads; wait for the synchronous ones, until `blocking_timeout_secs` at the longest."""
        if work.forget_hot:
            self.thread.loop.call_soon_threadsafe(self.thread.cache.clear_hot)
        begun = [self._begin_load(load) for load in work.loads]
        for loading in begun:
            if loading.load.asynchronous:
                self._receiving[loading.load.request_id] = loading
            else:
                self._end_load(loading, self.config.blocking_timeout_secs + _MARGIN_S)

    def save(self, work: StepWork) -> None:
        """Begin the step's saves. Returns at once; the blocks are read by copying threads."""
        self._held |= work.held
        for save in work.saves:
            try:
                self._begin_save(save)
            except Exception as error:
                logger.warning("tokens of request %s could not be stored: %r", save.request_id, error)
                self._ended[save.request_id] += 1

    def before_blocks_are_given_away(self, request_ids: Iterable[str]) -> None:
        """Wait until no save reads the blocks of preempted requests."""
        wanted = set(request_ids)
        until_s = time.monotonic() + _PREEMPTION_WAIT_S
        for saving in self._saving:
            if saving.request_id in wanted and not saving.copied.wait(max(0.0, until_s - time.monotonic())):
                saving.abandoned = True
                logger.warning("saving request %s was cut short by its preemption", saving.request_id)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed since they are saved, and requests whose load has ended, well or not."""
        self._saving = [saving for saving in self._saving if not self._has_ended(saving)]
        busy = {saving.request_id for saving in self._saving}
        sent = self._held - busy
        self._held &= busy
        received = {request_id for request_id, loading in self._receiving.items() if loading.future.done()}
        for request_id in received:
            self._end_load(self._receiving.pop(request_id), 0.0)
        return sent, received

    def take_bad_blocks(self) -> set[int]:
        """Blocks that could not be loaded since the last call: the engine recomputes them."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_ended(self) -> dict[str, int]:
        ended, self._ended = self._ended, Counter()
        return dict(ended)

    def close(self) -> None:
        self._lookups.close()
        report = self.thread.close(self.config.close_timeout_s)
        logger.info("closed; chunks not written: %s", report.pending or 0)

    def _begin_load(self, load: Load) -> _Loading:
        loading = _Loading(load, concurrent.futures.Future())
        try:
            keys = keys_from_hashes(self._namespace, [transfer.key for transfer in load.transfers])
            sinks = [self._sink(loading, transfer) for transfer in load.transfers]
            loading.future = self.thread.submit(
                self.thread.cache.get_to(keys, sinks, deadline_s=self.config.blocking_timeout_secs)
            )
        except Exception as error:
            loading.future.set_exception(error)
        return loading

    def _sink(self, loading: _Loading, transfer: Transfer) -> Callable[[np.ndarray], None]:
        def scatter(payload: np.ndarray) -> None:
            if loading.abandoned:
                raise _Abandoned
            self.kv.scatter(payload, transfer.chunk_blocks, transfer.skip, transfer.blocks)

        return scatter

    def _end_load(self, loading: _Loading, wait_s: float) -> None:
        """Note the blocks of every chunk that did not arrive."""
        try:
            arrived = loading.future.result(wait_s)
        except (Exception, concurrent.futures.CancelledError) as error:
            loading.abandoned = True
            loading.future.cancel()
            logger.warning("loading for request %s failed, it is computed instead: %r", loading.load.request_id, error)
            arrived = 0
        missing = loading.load.transfers[arrived:]
        if missing:
            logger.warning(
                "request %s: %d of %d chunks did not arrive; their tokens are computed instead",
                loading.load.request_id,
                len(missing),
                len(loading.load.transfers),
            )
        for transfer in missing:
            self._bad_blocks.update(transfer.blocks)

    def _begin_save(self, save: Save) -> None:
        saving = _Saving(save.request_id, len(save.transfers))
        keys = keys_from_hashes(self._namespace, [transfer.key for transfer in save.transfers])
        items = [
            (key, transfer.chunk_blocks * self.kv.bytes_per_block, saving.source(self.kv, transfer))
            for key, transfer in zip(keys, save.transfers, strict=True)
        ]
        future = self.thread.submit(self.thread.cache.put_from(items))
        self._saving.append(saving)
        tokens = sum(transfer.chunk_blocks for transfer in save.transfers) * self.geometry.block_tokens

        def ended(done: concurrent.futures.Future[int]) -> None:
            saving.copied.set()
            error = done.exception() if not done.cancelled() else None
            if error is not None:
                logger.warning("storing tokens of request %s failed: %r", save.request_id, error)
                return
            stored = 0 if done.cancelled() else done.result()
            part = tokens if stored == len(items) else tokens * stored // len(items)
            logger.info(
                "Stored %d out of total %d tokens for request %s", part, save.request_tokens, save.request_id
            )

        future.add_done_callback(ended)

    def _has_ended(self, saving: _Saving) -> bool:
        if saving.copied.is_set() or saving.abandoned:
            self._ended[saving.request_id] += 1
            return True
        return False
