"""The scheduler's half: what to load when a request is admitted, what to save after each step. It never waits."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.integrations.vllm.block_names import BlockNames
from tiercache.integrations.vllm.figures import SchedulerFigures
from tiercache.integrations.vllm.lookup import LookupClient
from tiercache.integrations.vllm.messages import Load, Save, StepReport, StepWork
from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    Match,
    chunk_ends,
    loadable_tokens,
    plan_load,
    plan_save,
    stored_ends,
    wants_save,
)
from tiercache.integrations.vllm.turns import RequestBegan, RequestEnded, Wishes, wishes_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")


@dataclass
class _Tracked:
    """A request that the engine knows and has not finished."""

    request: Request
    names: list[bytes] = field(default_factory=list)
    lookup: concurrent.futures.Future[Match] | None = None
    asked_at_s: float = 0.0
    put_off_at_s: float | None = None
    """When the engine was first told to come again for the answer."""
    match: Match | None = None
    admitted: bool = False
    logged: bool = False
    load_from: int = 0
    loaded_blocks: frozenset[int] = frozenset()
    load_failed: bool = False
    receiving: bool = False
    """An asynchronous load is under way: the engine holds the blocks until it has ended."""
    saved_blocks: int = 0
    """This many blocks from the start need no save: they are saved, or came out of the cache."""
    tail_saved: bool = False
    saves_begun: int = 0
    saves_ended: int = 0
    wishes: Wishes = field(default_factory=Wishes)
    stored: list[bytes] = field(default_factory=list)
    """Names of the chunks that it stored, where it wishes to have them forgotten."""
    stale: bool = False
    """Its KV was computed before the cache was reset, perhaps with other weights."""


class SchedulerSide:
    """All methods are called by the engine's scheduler thread."""

    def __init__(
        self, config: Config, geometry: BlockGeometry, names: BlockNames, client: LookupClient, workers: int
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.names = names
        self.client = client
        self._workers = workers
        self.figures = SchedulerFigures(geometry.chunk_tokens)
        self._requests: dict[str, _Tracked] = {}
        self._finishing: dict[str, _Tracked] = {}
        self._unconfirmed: set[str] = set()
        self._work = StepWork()
        self._warned: set[str] = set()

    # Loading

    def on_new_request(self, request: Request) -> None:
        """Ask at once: by the time the request is scheduled the answer is often there."""
        tracked = self._track(request)
        if request.skip_reading_prefix_cache:
            tracked.match = Match()
        else:
            self._begin_lookup(tracked)
        self._say_beginning(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        if tracked.admitted:
            # Preempted or rolled back: what was found then may be gone.
            tracked.admitted = False
            tracked.lookup = tracked.match = None
        if tracked.load_failed:
            # Once is enough: the same chunk may fail again, each time for a whole deadline.
            return 0, False
        if tracked.match is None:
            if tracked.lookup is None:
                self._begin_lookup(tracked)
            tracked.match = self._answer(tracked)
            if tracked.match is None:
                tracked.put_off_at_s = tracked.put_off_at_s or time.monotonic()
                return None, False
        tokens = loadable_tokens(
            tracked.match, request.num_tokens, computed_tokens, self.config.min_retrieve_tokens, self.geometry
        )
        tracked.load_from = computed_tokens
        self._note_once(tracked, computed_tokens, tokens)
        return tokens, self.config.enable_async_loading and tokens > 0

    def after_allocation(self, request: Request, blocks: list[int], external_tokens: int) -> None:
        """`blocks` are all block ids of the request where `external_tokens` are to be loaded."""
        tracked = self._track(request)
        tracked.admitted = True
        match = tracked.match or Match()
        if not tracked.load_failed and not tracked.saved_blocks:
            tracked.saved_blocks = (
                match.blocks if self.geometry.save_tails else self.geometry.whole_chunks(match.blocks)
            )
        if external_tokens <= 0:
            return
        end = tracked.load_from + external_tokens
        wanted = tuple(blocks[tracked.load_from // self.geometry.block_tokens : end // self.geometry.block_tokens])
        load = Load(request.request_id, [], self.config.enable_async_loading)
        try:
            load.transfers = plan_load(
                self._names(tracked), match.blocks, tracked.load_from, end, blocks, self.geometry
            )
            planned = tuple(block for transfer in load.transfers for block in transfer.blocks)
            if planned != wanted or len(wanted) * self.geometry.block_tokens != external_tokens:
                raise RuntimeError(
                    f"{external_tokens} tokens in blocks {wanted} were to be loaded, {planned} were planned"
                )
        except Exception:
            # The engine counts on these blocks now, so it has to be told that they are not filled.
            logger.exception("request %s: the load could not be planned, it is computed instead", request.request_id)
            load.transfers, load.impossible = [], wanted
        tracked.loaded_blocks = frozenset(wanted)
        if load.asynchronous:
            tracked.receiving = True
        else:
            self._unconfirmed.add(request.request_id)
        self._work.loads.append(load)

    def tokens_by_tier(self, request: Request) -> dict[str, int]:
        tracked = self._requests.get(request.request_id)
        return tracked.match.tokens_by_tier if tracked is not None and tracked.match is not None else {}

    # Saving

    def step_work(self, output: SchedulerOutput) -> StepWork:
        """The loads planned since the last step, and the chunks that this step completes."""
        work, self._work = self._work, StepWork()
        work.preempted = set(output.preempted_req_ids or ())
        for request_id in work.preempted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.saved_blocks, tracked.tail_saved, tracked.stale = 0, False, False
        try:
            if not self._unconfirmed:
                self._plan_saves(work, output)
        except Exception:
            logger.exception("some chunks are not stored")
        return work

    def progress(self, progress: StepReport) -> None:
        self._unconfirmed -= progress.loads
        for request_id, count in progress.saves.items():
            tracked = self._requests.get(request_id) or self._finishing.get(request_id)
            if tracked is not None:
                tracked.saves_ended += count
                if self._is_saved(tracked):
                    self._finishing.pop(request_id, None)

    def received(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.receiving = False

    def loads_failed(self, blocks: set[int]) -> None:
        """These blocks are recomputed; so are all behind them, whose chunks are saved anew."""
        for tracked in self._requests.values():
            if not tracked.loaded_blocks.isdisjoint(blocks):
                tracked.load_failed, tracked.saved_blocks, tracked.tail_saved = True, 0, False

    def finished(self, request: Request, blocks: list[int]) -> bool:
        """Whether the request's blocks have to stay until its saves have ended."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.lookup is not None:
            tracked.lookup.cancel()
        if tracked.receiving:
            # The engine holds the blocks for the load already, and nothing was computed into them.
            self._say_end(tracked)
            return False
        try:
            if not self._unconfirmed:
                # What is in flight may still be rolled back.
                ready = request.num_computed_tokens - request.num_in_flight_tokens
                self._plan_save(self._work, tracked, ready, lambda: blocks, last=True)
        except Exception:
            logger.exception("the last chunks of request %s are not stored", request.request_id)
        self._say_end(tracked)
        if self._is_saved(tracked):
            return False
        self._finishing[request.request_id] = tracked
        self._work.held.add(request.request_id)
        return True

    @property
    def holds_blocks(self) -> bool:
        """Blocks of finished requests come free as soon as they are copied."""
        return bool(self._finishing)

    @property
    def has_news(self) -> bool:
        """The workers have to be told something, even if nothing is to be computed."""
        return bool(self._work.turns) or self._work.forget_hot

    def reset(self) -> None:
        """Nothing stored so far is found again: the engine resets caches when its weights have changed."""
        self._work.generation = self.names.forget_everything()
        for tracked in self._requests.values():
            tracked.names, tracked.lookup, tracked.match = [], None, None
            tracked.saved_blocks, tracked.stale = 0, tracked.admitted
        self._work.forget_hot = True

    def _plan_saves(self, work: StepWork, output: SchedulerOutput) -> None:
        """Only called when no synchronous load is unconfirmed: what a step computes beside a load that fails is wrong, for
        every request that shares blocks with it, and must not be stored. What is left out now is stored with a later step.
        """
        state: Any = output.kv_connector_block_state
        cached = output.scheduled_cached_reqs
        computed = [(scheduled.req_id, scheduled.num_computed_tokens) for scheduled in output.scheduled_new_reqs]
        for request_id, tokens in (*computed, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._plan_save(
                    work,
                    tracked,
                    tokens + output.num_scheduled_tokens[request_id],
                    lambda request_id=request_id: state.get_block_ids(request_id)[0],
                    last=False,
                )

    def _plan_save(self, work: StepWork, tracked: _Tracked, ready_tokens: int, blocks: Any, *, last: bool) -> None:
        """Plan what is new among the first `ready_tokens`. `last`: no token follows. Costs little when nothing is new."""
        request = tracked.request
        if tracked.stale or (self.config.priority_limit is not None and request.priority > self.config.priority_limit):
            return
        limit = request.num_tokens if self.config.save_decode_cache else request.num_prompt_tokens
        ready = min(ready_tokens, limit) // self.geometry.block_tokens
        last = last or (ready_tokens >= request.num_prompt_tokens and not tracked.tail_saved)
        if wants_save(tracked.saved_blocks, ready, self.geometry, last=last):
            transfers, tracked.saved_blocks = plan_save(
                self._names(tracked), tracked.saved_blocks, ready, blocks(), self.geometry, last=last
            )
            if transfers:
                tracked.saves_begun += 1
                work.saves.append(Save(request.request_id, transfers, request.num_tokens))
                if tracked.wishes.forget:
                    tracked.stored += [transfer.name for transfer in transfers]
        tracked.tail_saved |= last

    def _is_saved(self, tracked: _Tracked) -> bool:
        return tracked.saves_ended >= tracked.saves_begun * self._workers

    # Turns

    def _say_beginning(self, tracked: _Tracked) -> None:
        if parameters := getattr(tracked.request, "kv_transfer_params", None):
            tracked.wishes = wishes_of(parameters, self._warned)
            if tracked.wishes.session:
                names = self._names(tracked)
                full = [names[end - 1] for end in chunk_ends(len(names), self.geometry)]
                self._work.turns.append(RequestBegan(tracked.wishes.session, tracked.wishes.step, full))

    def _say_end(self, tracked: _Tracked) -> None:
        if not tracked.wishes.at_the_end:
            return
        try:
            names = self._names(tracked)
            ends = [] if tracked.stale else stored_ends(min(tracked.saved_blocks, len(names)), self.geometry)
            held = [names[end - 1] for end in ends]
            self._work.turns.append(RequestEnded(tracked.request.request_id, tracked.wishes, held, tracked.stored))
        except Exception:
            logger.exception("what request %s says about its end has no effect", tracked.request.request_id)

    # Looking up

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request)
        return tracked

    def _names(self, tracked: _Tracked) -> list[bytes]:
        return self.names.extend(tracked.names, tracked.request)

    def _begin_lookup(self, tracked: _Tracked) -> None:
        tracked.asked_at_s = time.monotonic()
        names = list(self._names(tracked))
        if not names:
            tracked.match = Match()
            return
        try:
            tracked.lookup = self.client.begin(names)
        except Exception as error:
            logger.warning("a look-up could not be begun: %r", error)
            tracked.match = Match(failed=True)

    def _answer(self, tracked: _Tracked) -> Match | None:
        lookup = tracked.lookup
        if lookup is None:
            return Match()
        if lookup.done():
            try:
                return lookup.result()
            except (Exception, concurrent.futures.CancelledError) as error:
                logger.warning("a look-up failed: %r", error)
                return Match(failed=True)
        if time.monotonic() - tracked.asked_at_s > self.config.lookup_timeout_ms / 1000:
            logger.warning("a look-up took longer than lookup_timeout_ms; the request is computed instead")
            lookup.cancel()
            return Match(failed=True)
        return None

    def _note_once(self, tracked: _Tracked, computed: int, load: int) -> None:
        request = tracked.request
        if tracked.logged or tracked.match is None:
            return
        tracked.logged = True
        if not request.skip_reading_prefix_cache:
            put_off_s = None if tracked.put_off_at_s is None else time.monotonic() - tracked.put_off_at_s
            skipped = not load and loadable_tokens(tracked.match, request.num_tokens, computed, 0, self.geometry) > 0
            self.figures.looked_up(tracked.match, request.num_tokens, put_off_s, skipped=skipped)
        tiers = {"cpu": 0, "disk": 0} | tracked.match.tokens_by_tier
        logger.info(
            "Reqid: %s, Total tokens %d, engine computed tokens: %d, hit tokens: %d (%s), need to load: %d",
            request.request_id,
            request.num_tokens,
            computed,
            tracked.match.blocks * self.geometry.block_tokens,
            ", ".join(f"{name}: {tokens}" for name, tokens in tiers.items()),
            load,
        )
