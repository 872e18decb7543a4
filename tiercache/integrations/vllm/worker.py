"""The worker's half: owns the cache, moves blocks, and reports which saves and loads have ended.

Saves read the engine's blocks while the next steps run, on copying threads or streams of the device. That is safe because
blocks that a save reads are not given away before its copies have ended: the scheduler holds finished requests, and
`before_blocks_are_given_away` waits for preempted ones. `Mover` (`blocks.py`) moves the blocks, and orders the copies
after the engine's own work.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import Move, Mover
from tiercache.integrations.vllm.events import Residency
from tiercache.integrations.vllm.hints import SessionTurns
from tiercache.integrations.vllm.logs import add_span
from tiercache.integrations.vllm.lookup import AnnouncedPrompts, LookupServer
from tiercache.integrations.vllm.metadata import Load, Save, StepReport, StepWork
from tiercache.integrations.vllm.metrics import WorkerFigures
from tiercache.integrations.vllm.names import BlockNames
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, keys_of

logger = logging.getLogger("tiercache.vllm")

_MARGIN_S = 2.0
"""Seconds for the cache's thread to answer, in addition to the cache's own deadline."""
_PREEMPTION_WAIT_S = 1.0
"""Longest wait for copies that have not begun. Running copies, which take as long as a memcpy, get more time."""
_COPY_WAIT_S = 10.0


@dataclass
class _Saving:
    save: Save
    until_s: float
    move: Move
    blocks: frozenset[int]


@dataclass
class _Loading:
    """A load. `move` is None if the load failed before it began."""

    load: Load
    began_s: float
    until_s: float
    move: Move | None = None

    @property
    def is_over(self) -> bool:
        return self.move is None or self.move.future.done() or time.monotonic() > self.until_s


class WorkerSide:
    """The worker's half of the connector. All methods are called by the engine's thread."""

    def __init__(
        self,
        config: Config,
        geometry: BlockGeometry,
        layout: Layout,
        mover: Mover,
        engine: str,
        names: BlockNames,
        *,
        kv_events: bool = False,
    ) -> None:
        """Open the cache. With `kv_events` rank 0 reports the tiers of chunks for routers."""
        self.config = config
        self.geometry = geometry
        self.mover = mover
        self._names = names
        self._rank = layout.rank
        self.thread = CacheThread(config, layout, device=mover.driver, naming=AnnouncedPrompts(names, geometry))
        self._namespace = self.thread.cache.namespace
        try:
            self._lookups = LookupServer(engine, layout.rank, self.thread, geometry)
        except BaseException:
            self.thread.close(0.0)
            raise
        self.figures = WorkerFigures(self.thread, f"{engine}/{layout.rank}")
        self.residency = Residency(self.thread, geometry) if kv_events and layout.rank == 0 else None
        self._receiving: dict[str, _Loading] = {}
        self._saving: list[_Saving] = []
        self._turns = SessionTurns(self.thread, lambda names: keys_of(self._namespace, names, geometry))
        self._storing: dict[concurrent.futures.Future[int], str] = {}
        """Saves that are not in the cache yet, with their requests. They may no longer use the engine's blocks."""
        self._saves_ended: Counter[str] = Counter()
        self._loads_ended: set[str] = set()
        self._held: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._stores = True
        # An engine that exits without `shutdown` would not write its last chunks.
        atexit.register(self.close)

    def load(self, work: StepWork) -> None:
        """Begin the step's loads, and wait for the synchronous ones until their time limit."""
        if work.generation:
            self._names.follow(work.generation)
            self.thread.call_soon(self.thread.cache.clear_hot)
        if work.token_s is not None:
            # Groups with a window or a state need few chunks for a whole prefix, so each is worth at least as much.
            whole = sum(group.window_tokens is None for group in self.geometry.groups)
            chunk_s = work.token_s * self.geometry.chunk_tokens / max(1, whole)
            self.thread.call_soon(self.thread.cache.computing_takes, chunk_s)
        if self.residency is not None:
            self.residency.watch(work.watching)
        for loading in [self._begin_load(load) for load in work.loads]:
            if loading.load.asynchronous:
                self._receiving[loading.load.request_id] = loading
            else:
                self._end_load(loading)
                self._loads_ended.add(loading.load.request_id)

    def save(self, work: StepWork) -> None:
        """Begin the step's saves. Returns at once; the blocks are read in the background."""
        self._held |= work.held
        for save in work.saves:
            if not self._stores:
                self._saves_ended[save.request_id] += 1
                continue
            try:
                self._begin_save(save)
            except Exception as error:
                logger.warning("tokens of request %s could not be stored: %r", save.request_id, error)
                self._saves_ended[save.request_id] += 1
        if work.turns:
            self._turns.follow(work.turns, self._storing)

    def stop_storing(self) -> None:
        """Store nothing from now on, since a forward pass failed: requests may go on behind blocks that it did not fill."""
        if self._stores:
            self._stores = False
            logger.error("a forward pass failed: this engine stores nothing any more")

    def before_blocks_are_given_away(self, request_ids: Iterable[str], blocks: Collection[int] = ()) -> None:
        """Wait until no save reads the blocks of preempted requests, nor `blocks`. Slow saves are cut short."""
        wanted = set(request_ids)
        until_s = time.monotonic() + _PREEMPTION_WAIT_S
        for saving in self._saving:
            gone = saving.save.request_id in wanted or not saving.blocks.isdisjoint(blocks)
            if gone and not saving.move.wait(max(0.0, until_s - time.monotonic())):
                self._take_back(saving.move)
                logger.info("saving request %s was cut short: its blocks are given away", saving.save.request_id)

    def finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are saved and may be freed, and those whose load has ended or failed."""
        if self._saving:
            self._saving = [saving for saving in self._saving if not self._has_ended(saving)]
        sent: set[str] = set()
        if self._held:
            busy = {saving.save.request_id for saving in self._saving}
            sent = self._held - busy
            self._held &= busy
        received = {request_id for request_id, loading in self._receiving.items() if loading.is_over}
        for request_id in received:
            self._end_load(self._receiving.pop(request_id))
        return sent, received

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call. The engine recomputes them."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_failed(self) -> set[str]:
        """Return the requests whose load has failed since the last call, if the geometry is not plain."""
        failed, self._failed = self._failed, set()
        return failed

    def take_progress(self) -> StepReport | None:
        """Return what has ended since the last call, and which chunks have come to tiers or left them; None if nothing."""
        residency = self.residency.take() if self.residency is not None else None
        if not self._saves_ended and not self._loads_ended and residency is None:
            return None
        progress = StepReport(dict(self._saves_ended), self._loads_ended, residency)
        self._saves_ended, self._loads_ended = Counter(), set()
        return progress

    def close(self) -> None:
        """Write the running and queued saves, for up to `close_timeout_s`, and close the cache. Idempotent."""
        atexit.unregister(self.close)
        until_s = time.monotonic() + self.config.close_timeout_s
        self._lookups.close()
        # The engine may free its memory after this call.
        for loading in self._receiving.values():
            if loading.move is not None:
                self._take_back(loading.move)
        for saving in self._saving:
            if not saving.move.wait(max(0.0, until_s - time.monotonic())):
                self._take_back(saving.move)
        self._saving, self._receiving = [], {}
        concurrent.futures.wait(list(self._storing), max(0.0, until_s - time.monotonic()))
        report = self.thread.close(max(0.0, until_s - time.monotonic()))
        logger.info("closed; %s", report.describe())

    # Loading

    def _begin_load(self, load: Load) -> _Loading:
        limit_s, began_s = float(self.config.blocking_timeout_secs), time.monotonic()
        if not load.asynchronous:
            limit_s = max(limit_s, _COPY_WAIT_S)  # held chunks only need to be copied, and this must not fail
        loading = _Loading(load, began_s, began_s + limit_s + _MARGIN_S)
        try:
            keys = keys_of(self._namespace, [transfer.name for transfer in load.transfers], self.geometry)
            held = None if load.asynchronous else self._lookups.claims.leases
            loading.move = self.mover.get(self.thread, keys, load.transfers, limit_s, held)
        except Exception as error:
            logger.warning("loading for request %s could not be begun: %r", load.request_id, error)
        return loading

    def _end_load(self, loading: _Loading) -> None:
        """Wait for the load until its time limit, and note the blocks of every chunk that did not arrive."""
        load, move = loading.load, loading.move
        arrived = 0
        try:
            if move is not None:
                arrived = move.future.result(max(0.0, loading.until_s - time.monotonic()))
        except (Exception, concurrent.futures.CancelledError) as error:
            assert move is not None
            self._take_back(move)
            logger.warning("loading for request %s failed, it is computed instead: %r", load.request_id, error)
        took_s = time.monotonic() - loading.began_s
        self._lookups.release(load.claim)
        whole = arrived == len(load.transfers) and not load.impossible
        outcome = "whole" if whole else "part" if arrived else "failed"
        payload_bytes = self._bytes_of(load.transfers[:arrived])
        self.figures.loaded(payload_bytes, took_s, outcome)
        add_span("load", load.trace, loading.began_s, bytes=payload_bytes, outcome=outcome, rank=self._rank)
        logger.log(
            logging.INFO if whole else logging.WARNING,
            "Loaded %d out of %d tokens for request %s in %.1f ms (chunks: %d, groups: %d, MiB: %.1f)%s",
            self._tokens_of(load.transfers[:arrived]),
            self._tokens_of(load.transfers),
            load.request_id,
            1000 * took_s,
            arrived,
            len(self.geometry.groups),
            payload_bytes / 2**20,
            "" if whole else "; the rest is computed instead",
        )
        if self.geometry.plain:
            self._bad_blocks.update(load.impossible)
            for transfer in load.transfers[arrived:]:
                self._bad_blocks.update(transfer.blocks)
        elif not whole:
            # With several groups single bad blocks cannot be reported to the engine, so the whole load fails.
            self._failed.add(load.request_id)

    # Saving

    def _begin_save(self, save: Save) -> None:
        # Waiting longer for a free slot is not worth holding the engine's blocks.
        wait_s = self.config.queue_wait_s
        began_s = time.monotonic()
        until_s = began_s + self.config.blocking_timeout_secs + _MARGIN_S
        keys = keys_of(self._namespace, [transfer.name for transfer in save.transfers], self.geometry)
        if save.to_be_forgotten:
            self._turns.stores(save.request_id, keys)
        move = self.mover.put(self.thread, keys, save.transfers, wait_s)
        blocks = frozenset(block for transfer in save.transfers for block in transfer.blocks)
        self._saving.append(_Saving(save, until_s, move, blocks))
        tokens = self._tokens_of(save.transfers)

        def ended(done: concurrent.futures.Future[int]) -> None:
            self._storing.pop(done, None)
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                logger.warning("storing tokens of request %s failed: %r", save.request_id, error)
                return
            chunks = done.result()
            if save.previous and chunks:  # else the head of a prompt that several steps store would be evicted first
                linked = [*keys_of(self._namespace, [save.previous], self.geometry), *keys]
                self.thread.call_soon(self.thread.cache.cpu.link, linked)
            if save.replaced and chunks:
                replaced = keys_of(self._namespace, [save.replaced], self.geometry)
                self.thread.call_soon(self.thread.cache.clear_hot, replaced)
            payload_bytes = self._bytes_of(save.transfers[:chunks])
            self.figures.stored(payload_bytes, time.monotonic() - began_s)
            add_span("save", save.trace, began_s, bytes=payload_bytes, rank=self._rank)
            stored = tokens * chunks // len(keys)
            logger.info("Stored %d out of total %d tokens for request %s", stored, save.request_tokens, save.request_id)

        self._storing[move.future] = save.request_id
        move.future.add_done_callback(ended)

    def _tokens_of(self, transfers: Sequence[BlockTransfer]) -> int:
        """Return the number of tokens whose KV moves, in the group with the most."""
        tokens = [0] * len(self.geometry.groups)
        for transfer in transfers:
            tokens[transfer.group] += len(transfer.blocks) * self.geometry.groups[transfer.group].block_tokens
        return max(tokens)

    def _bytes_of(self, transfers: Sequence[BlockTransfer]) -> int:
        """Return the bytes that move to or from the engine's blocks."""
        return sum(len(transfer.blocks) * self.mover.kvs[transfer.group].bytes_per_block for transfer in transfers)

    def _has_ended(self, saving: _Saving) -> bool:
        if not saving.move.is_off_blocks():
            if time.monotonic() < saving.until_s:
                return False
            logger.warning("saving request %s takes too long and is cut short", saving.save.request_id)
            self._take_back(saving.move)
        self._saves_ended[saving.save.request_id] += 1
        return True

    def _take_back(self, move: Move) -> None:
        if not move.take_back(_COPY_WAIT_S):
            logger.error(
                "a copy of %s seconds and more: the machine or its device hangs, or memory is swapped out", _COPY_WAIT_S
            )
