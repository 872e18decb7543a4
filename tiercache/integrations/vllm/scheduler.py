"""The scheduler's half: decide what to load when a request is admitted, and what to save after each step.

It keeps the state of each request, and looks up its prompt in the workers' caches while the engine does other things. A
request waits for the answer only as long as the configuration allows.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.core.estimate import PrefillCost
from tiercache.integrations.vllm.events import KvEvents
from tiercache.integrations.vllm.hints import EXPECT_TOKENS, RequestBegan, RequestEnded, Wishes, wishes_of
from tiercache.integrations.vllm.logs import add_span, trace_of
from tiercache.integrations.vllm.lookup import HELD_FOR_S, Lookup, LookupClient
from tiercache.integrations.vllm.metadata import Load, Save, StepReport, StepWork
from tiercache.integrations.vllm.metrics import SchedulerFigures
from tiercache.integrations.vllm.names import BlockNames, nobodys_key
from tiercache.integrations.vllm.planning import (
    NULL_BLOCK,
    BlockGeometry,
    Match,
    Tables,
    end_of_saves,
    given_away,
    held_names,
    loadable_tokens,
    plan_loads,
    plan_saves,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")


@dataclass
class TrackedRequest:
    """A request that the engine knows and has not finished."""

    request: Request
    names: list[bytes] = field(default_factory=list)
    lookup: Lookup | None = None
    asked_at_s: float = 0.0
    ask_again_at_s: float = 0.0
    """The earliest time of the next lookup, if more is expected than was found."""
    put_off_at_s: float | None = None
    """The time at which the engine was first told to ask again later."""
    match: Match | None = None
    admitted: bool = False
    logged: bool = False
    load_from: int = 0
    """Number of first tokens that the engine has in its own cache."""
    loads_later: bool = True
    """The load runs while other requests compute. `matched_tokens` told the engine so, together with the tokens."""
    loaded_blocks: frozenset[int] = frozenset()
    load_failed: bool = False
    scheduled: bool = False
    """A step has computed tokens since the request was admitted. Before, its blocks may wait for an asynchronous load, of
    another connector too (vLLM's MultiConnector), and vLLM counts the tokens as computed.
    """
    saved_blocks: int = 0
    """Number of first blocks that need no save: they are saved, or were found in the cache."""
    saves_begun: int = 0
    saves_ended: int = 0
    wishes: Wishes = field(default_factory=Wishes)
    arrived_s: float = field(default_factory=time.monotonic)
    adapter: concurrent.futures.Future[bytes | None] | None = None
    adapter_key: bytes = b""
    """The key of its LoRA adapter in the names of its blocks; empty until the first are given."""
    began: bool = False
    """The workers were told of its beginning, if it belongs to a session."""
    stale: bool = False
    """Its KV was computed before the cache was reset, perhaps with other weights."""


_WAIT_A_STEP_S = 0.0005
"""Longest wait for answers before a step, all requests together. A request without an answer waits for the next step."""
_ASK_AGAIN_S = 0.02
"""Pause before another lookup of chunks that another engine is storing."""


class SchedulerSide:
    """All methods are called by the engine's scheduler thread."""

    def __init__(
        self, config: Config, geometry: BlockGeometry, names: BlockNames, client: LookupClient, workers: int,
        kv_events: KvEvents | None = None, role: str = "kv_both",
    ) -> None:  # fmt: skip
        """`kv_events` is set if routers are told which blocks the tiers have.

        `role` "kv_consumer" stores nothing; "kv_producer" adds the number of stored tokens to each answer.
        """
        self.kv_events = kv_events
        self.config = config
        self.geometry = geometry
        self.names = names
        self.client = client
        self._workers = workers
        self._stores, self._announces = role != "kv_consumer", role == "kv_producer"
        self.figures = SchedulerFigures(geometry.chunk_tokens)
        self._requests: dict[str, TrackedRequest] = {}
        self._finishing: dict[str, TrackedRequest] = {}
        self._unconfirmed: set[str] = set()
        self._work = StepWork()
        self._warned: set[str] = set()
        self._prefill = PrefillCost()
        self._hit_tokens = geometry.block_tokens if geometry.plain else geometry.chunk_tokens
        self._claims = itertools.count()
        self._lookup_s = config.lookup_timeout_ms / 1000
        self._patience_s = _WAIT_A_STEP_S
        """How long this step may still wait for answers."""

    # Loading

    def on_new_request(self, request: Request) -> None:
        """Begin the lookup at once, so that the answer has often come by the time the request is scheduled."""
        tracked = self._track(request)
        if self._awaits_adapter(tracked):
            return
        self._begin_lookup(tracked)
        self._say_beginning(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        tracked.load_from = computed_tokens
        if self._awaits_adapter(tracked):
            return None, False
        self._say_beginning(tracked)
        if tracked.admitted:
            # Preempted or rolled back: it has no KV, and chunks found before may be gone.
            tracked.admitted = tracked.stale = False
            self._forget_lookup(tracked)
        if tracked.load_failed:
            # Do not load again: the same chunk may fail again, each time after a whole deadline.
            return 0, False
        match = self._answer(tracked)
        if match is None and computed_tokens >= (request.num_tokens - 1) // self._hit_tokens * self._hit_tokens:
            # The engine already has all tokens that could be loaded.
            self._forget_lookup(tracked)
            self._note_once(tracked, None, computed_tokens, 0)
            return 0, False
        if match is None:
            tracked.put_off_at_s = tracked.put_off_at_s or time.monotonic()
            return None, False
        tokens = loadable_tokens(
            match, request.num_tokens, computed_tokens, self.config.min_retrieve_tokens, self.geometry
        )
        tracked.loads_later = self._loads_later(tracked, match)
        self._note_once(tracked, match, computed_tokens, tokens)
        return tokens, tracked.loads_later and tokens > 0

    def _loads_later(self, tracked: TrackedRequest, match: Match) -> bool:
        """Return True if the load has to be asynchronous: a synchronous load must not fail, so its chunks must be held.

        If several requests share blocks that failed to load, vLLM 0.32 lets all but the first go on before the blocks are
        recomputed. It also accepts failed blocks only from models with a single group.
        """
        kept = match.held and time.monotonic() - tracked.asked_at_s < HELD_FOR_S
        return self.config.enable_async_loading or not self.geometry.plain or not kept

    def after_allocation(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """Plan the load of `external_tokens`. `tables` has all block ids of the request, unless there is nothing to load
        and the geometry is plain.
        """
        tracked = self._track(request)
        if not self.geometry.plain:
            # The connector whose load fills them may be another one, beside this one in vLLM's MultiConnector.
            for group in self.geometry.groups:
                self._work.given_away.update(tables[group.index][tracked.load_from // group.block_tokens :])
        tracked.admitted, tracked.scheduled = True, False
        match = tracked.match or Match()
        if not tracked.load_failed and not tracked.saved_blocks:
            is_saved = self.geometry.save_tails and not match.sibling
            tracked.saved_blocks = match.blocks if is_saved else self.geometry.whole_chunks(match.blocks)
        if external_tokens <= 0:
            self._let_go(tracked)
            return
        end = tracked.load_from + external_tokens
        wanted = self._to_be_filled(tables, tracked.load_from, end)
        claim = tracked.lookup.question.claim if tracked.lookup is not None else ""
        load = Load(request.request_id, [], tracked.loads_later, claim, trace=trace_of(request))
        try:
            load.transfers = plan_loads(
                self._names_of(tracked), match.blocks, tracked.load_from, end, tables, self.geometry,
                match.sibling,
            )  # fmt: skip
            planned = tuple(block for transfer in load.transfers for block in transfer.blocks)
            if planned != wanted or not planned:
                raise RuntimeError(
                    f"{external_tokens} tokens in blocks {wanted} were to be loaded, {planned} were planned"
                )
        except Exception:
            # The engine counts on these blocks now, so it has to be told that they are not filled.
            logger.exception("request %s: the load could not be planned, it is computed instead", request.request_id)
            load.transfers, load.impossible = [], wanted or (NULL_BLOCK,)
        if self.kv_events is not None:
            first = tracked.load_from // self.geometry.block_tokens
            self.kv_events.moves(request, tracked.names, first, load.transfers)
        tracked.loaded_blocks = frozenset(wanted)
        if not load.asynchronous:
            self._unconfirmed.add(request.request_id)
        self._work.loads.append(load)

    def _to_be_filled(self, tables: Tables, first_token: int, end_token: int) -> tuple[int, ...]:
        """Return the blocks that the engine has set aside for these tokens; for a window only those that it keeps."""
        return tuple(
            block
            for group in self.geometry.groups
            for block in tables[group.index][first_token // group.block_tokens : end_token // group.block_tokens]
            if block != NULL_BLOCK
        )

    # Looking up

    def _awaits_adapter(self, tracked: TrackedRequest) -> bool:
        """Return True while its adapter's files are read, at most as long as a lookup: its blocks have no names yet."""
        if tracked.adapter is None or tracked.adapter_key or tracked.adapter.done():
            return False
        return time.monotonic() - tracked.arrived_s < self._lookup_s

    def _names_of(self, tracked: TrackedRequest) -> list[bytes]:
        """Return the names of the full blocks that it has so far."""
        if tracked.adapter is not None and not tracked.adapter_key:
            known = tracked.adapter.result() if tracked.adapter.done() else None
            tracked.adapter_key = known or nobodys_key()
        return self.names.extend(tracked.names, tracked.request, tracked.adapter_key)

    def _begin_lookup(self, tracked: TrackedRequest) -> None:
        """Begin a lookup. It is sent together with others, when an answer is wanted or the step is planned."""
        again, tracked.asked_at_s = tracked.asked_at_s > 0, time.monotonic()
        names = list(self._names_of(tracked))
        if not self.geometry.plain:
            # The last token has to be computed, and a hit with windows cannot be shortened afterwards.
            del names[(tracked.request.num_tokens - 1) // self.geometry.block_tokens :]
        if not names or tracked.request.skip_reading_prefix_cache:
            tracked.match = Match()
            return
        # Each lookup has its own claim, so that releasing an earlier one does not release this one's chunks.
        claim = f"{tracked.request.request_id}#{next(self._claims)}"
        tracked.lookup = self.client.begin(names, claim, again=again)

    def _answer(self, tracked: TrackedRequest) -> Match | None:
        """Return the answer, or None if there is none yet. Begins the next lookup if one is due."""
        if tracked.lookup is not None and self._is_old(tracked, tracked.lookup):
            self._forget_lookup(tracked)
        if tracked.match is not None:
            return tracked.match
        if tracked.lookup is None:
            if time.monotonic() < tracked.ask_again_at_s:
                return None
            self._begin_lookup(tracked)
        self.client.send()
        if tracked.lookup is not None:
            tracked.match = self._look(tracked, tracked.lookup)
        if tracked.match is not None and self._is_being_stored(tracked, tracked.match):
            self._forget_lookup(tracked)
        return tracked.match

    def _is_old(self, tracked: TrackedRequest, lookup: Lookup) -> bool:
        """Return True if others may have stored what was not found: once for a request that waits long for its turn."""
        found, asked_before = lookup.match, lookup.question.again
        if found is None or found.failed or asked_before or time.monotonic() - tracked.asked_at_s < HELD_FOR_S:
            return False
        return bool(found.blocks < (tracked.request.num_tokens - 1) // self.geometry.block_tokens)

    def _let_go(self, tracked: TrackedRequest) -> None:
        """Give up a lookup that will not be loaded, and release the chunks that it holds or may still hold."""
        if tracked.lookup is not None:
            self.client.release(tracked.lookup)

    def _forget_lookup(self, tracked: TrackedRequest) -> None:
        """Forget the lookup and its answer."""
        self._let_go(tracked)
        tracked.lookup = tracked.match = None

    def _look(self, tracked: TrackedRequest, lookup: Lookup) -> Match | None:
        if lookup.match is None and self._patience_s > 0:
            began_s = time.monotonic()
            lookup.wait(self._patience_s)
            self._patience_s -= time.monotonic() - began_s
        if lookup.match is not None:
            return lookup.match
        if time.monotonic() - tracked.asked_at_s > self._lookup_s:
            logger.warning("a lookup took longer than lookup_timeout_ms; the request is computed instead")
            self._let_go(tracked)
            return Match(failed=True)
        return None

    def _is_being_stored(self, tracked: TrackedRequest, match: Match) -> bool:
        """Return True if more was announced (`tiercache.expect_tokens`) than found, and there is time to look again."""
        now_s = time.monotonic()
        expected = min(tracked.wishes.expect_tokens, tracked.request.num_tokens - 1) // self.geometry.block_tokens
        if not self.geometry.save_tails:
            expected = self.geometry.whole_chunks(expected)
        if match.failed or match.blocks >= expected:
            return False
        if now_s - tracked.arrived_s >= self._lookup_s:
            logger.info("request %s: not all tokens announced for it were stored in time", tracked.request.request_id)
            return False
        tracked.ask_again_at_s = now_s + _ASK_AGAIN_S
        return True

    # Saving

    def step_work(self, output: SchedulerOutput) -> StepWork:
        """Return the loads planned since the last step, and the saves of the chunks that this step completes."""
        work, self._work = self._work, StepWork()
        work.preempted = set(output.preempted_req_ids or ())
        for request_id in work.preempted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.saved_blocks = 0
        for request_id in output.num_scheduled_tokens:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.scheduled = True
        self.client.send()
        self._patience_s = _WAIT_A_STEP_S
        # Tell the workers how fast the engine computes, so that they can decide which loads are worthwhile.
        tokens = output.num_scheduled_tokens
        self._prefill.began(tokens, sum(tokens.values()), time.monotonic())
        work.token_s = self._prefill.news()
        try:
            if not self.geometry.plain:
                work.given_away |= given_away(output, self.geometry)
            if not self._unconfirmed:
                self._plan_saves(work, output)
        except Exception:
            logger.exception("some chunks are not stored")
        if self.kv_events is not None:
            work.watching = self.kv_events.take_watching()
        return work

    def progress(self, progress: StepReport) -> None:
        self._unconfirmed -= progress.loads
        if self.kv_events is not None and progress.residency is not None:
            self.kv_events.changed(progress.residency)
        for request_id, count in progress.saves.items():
            tracked = self._requests.get(request_id) or self._finishing.get(request_id)
            if tracked is not None:
                tracked.saves_ended += count
                if self._is_saved(tracked):
                    self._finishing.pop(request_id, None)

    def loads_failed(self, blocks: Collection[int], request_ids: Collection[str] = ()) -> None:
        """Note failed loads, so that all chunks of the requests concerned are saved anew.

        The engine recomputes `blocks` and all blocks after them. The requests in `request_ids` begin again from their first
        token, with no block filled.
        """
        for request_id, tracked in self._requests.items():
            if request_id in request_ids or not tracked.loaded_blocks.isdisjoint(blocks):
                tracked.load_failed, tracked.saved_blocks = True, 0

    def finished(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """Return True if the request's blocks have to stay until its saves have ended, and the fields for its answer."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        held = self._finish(tracked, tables)
        tokens = tracked.saved_blocks * self.geometry.block_tokens
        return held, {EXPECT_TOKENS: tokens} if self._announces and tokens and not tracked.stale else None

    def _finish(self, tracked: TrackedRequest, tables: Tables) -> bool:
        request = tracked.request
        if not tracked.admitted:
            self._let_go(tracked)
            self.client.send()  # no step may follow
        if not tracked.scheduled:
            # There is nothing to save: none was computed. The engine itself holds the blocks for a load.
            self._say_end(tracked)
            return False
        try:
            if not self._unconfirmed:
                # Tokens in flight may still be rolled back.
                ready = request.num_computed_tokens - request.num_in_flight_tokens
                self._plan_save(self._work, tracked, ready, lambda: tables, last=True)
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
        """Return True if blocks of finished requests are still being copied; they come free after that."""
        return bool(self._finishing)

    @property
    def has_news(self) -> bool:
        """Return True if the workers have to be told something, even if there is nothing to compute."""
        return bool(self._work.turns or self._work.generation)

    def reset(self) -> None:
        """Let no request find chunks stored so far: the engine resets caches when its weights have changed."""
        self._work.generation = self.names.forget_everything()
        for tracked in self._requests.values():
            tracked.names = []
            self._forget_lookup(tracked)
            tracked.saved_blocks, tracked.stale = 0, tracked.admitted
        if self.kv_events is not None:
            self.kv_events.forget_everything()

    def _plan_saves(self, work: StepWork, output: SchedulerOutput) -> None:
        """Plan the saves of a step. Call it only if no synchronous load is unconfirmed.

        If such a load fails, the step computes wrong KV for every request that shares its blocks, and that must not be
        stored. Chunks left out now are stored with a later step.
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
                    partial(state.get_block_ids, request_id),
                    last=False,
                    states=state.boundary_state_offloads.get(request_id, ()),
                )

    def _plan_save(
        self, work: StepWork, tracked: TrackedRequest, ready_tokens: int, tables: Any, *, last: bool, states: Any = ()
    ) -> None:
        """Plan saves of new chunks among the first `ready_tokens`. `last`: no token follows. Cheap if nothing is new."""
        request = tracked.request
        if not self._stores or tracked.stale:
            return
        if self.config.priority_limit is not None and request.priority > self.config.priority_limit:
            return
        limit = request.num_tokens if self.config.save_decode_cache else request.num_prompt_tokens
        ready = min(ready_tokens, limit) // self.geometry.block_tokens
        first, prompt_blocks = tracked.saved_blocks, request.num_prompt_tokens // self.geometry.block_tokens
        last = last or (ready_tokens >= request.num_prompt_tokens and first < prompt_blocks)
        if end_of_saves(ready, self.geometry, last=last) > first:
            transfers, tracked.saved_blocks = plan_saves(
                self._names_of(tracked), first, ready, tables(), self.geometry, last=last, states=states
            )
            if transfers:
                if self.kv_events is not None:
                    self.kv_events.moves(request, tracked.names, first, transfers)
                tracked.saves_begun += 1
                past = first % self.geometry.blocks_per_chunk
                replaced = tracked.names[first - 1] if past else b""
                previous = tracked.names[first - past - 1] if first > past and self.geometry.plain else b""
                forget, trace = tracked.wishes.forget, trace_of(request)
                work.saves.append(
                    Save(request.request_id, transfers, request.num_tokens, trace, forget, replaced, previous)
                )

    def _is_saved(self, tracked: TrackedRequest) -> bool:
        return tracked.saves_ended >= tracked.saves_begun * self._workers

    # Turns

    def _say_beginning(self, tracked: TrackedRequest) -> None:
        """Read the request's wishes and report the beginning of its turn; once, when its blocks can be named."""
        began, tracked.began = tracked.began, True
        if not began:
            tracked.wishes = wishes_of(tracked.request, self._warned)
            if tracked.wishes.session:
                names = self._names_of(tracked)
                full = held_names(names, self.geometry.whole_chunks(len(names)), self.geometry)
                self._work.turns.append(RequestBegan(tracked.wishes.session, full))

    def _say_end(self, tracked: TrackedRequest) -> None:
        if not tracked.wishes.at_the_end:
            return
        try:
            names = self._names_of(tracked)
            held = [] if tracked.stale else held_names(names, min(tracked.saved_blocks, len(names)), self.geometry)
            self._work.turns.append(RequestEnded(tracked.request.request_id, tracked.wishes, held))
        except Exception:
            logger.exception("the hints of request %s for its end have no effect", tracked.request.request_id)

    def _track(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = TrackedRequest(request)
            if (lora := getattr(request, "lora_request", None)) is not None:
                tracked.adapter = self.names.adapters.key_of(lora.lora_path)
        return tracked

    def _note_once(self, tracked: TrackedRequest, answer: Match | None, computed: int, load: int) -> None:
        """Log what was found for the request. `answer` is None if the engine had all tokens before there was one."""
        request, match = tracked.request, answer or Match()
        if tracked.logged:
            return
        tracked.logged = True
        if answer is not None:
            if not request.skip_reading_prefix_cache:
                put_off_s = None if tracked.put_off_at_s is None else time.monotonic() - tracked.put_off_at_s
                skipped = not load and loadable_tokens(match, request.num_tokens, computed, 0, self.geometry) > 0
                self.figures.looked_up(match, request.num_tokens, put_off_s, skipped=skipped)
            hits = {f"{tier}_tokens": tokens for tier, tokens in match.tokens_by_tier.items()}
            add_span("lookup", trace_of(request), tracked.asked_at_s, request_tokens=request.num_tokens, **hits)
        tiers = {"cpu": 0, "disk": 0} | match.tokens_by_tier
        logger.info(
            "Reqid: %s, Total tokens %d, engine computed tokens: %d, hit tokens: %d (%s), need to load: %d",
            request.request_id,
            request.num_tokens,
            computed,
            match.blocks * self.geometry.block_tokens,
            ", ".join(f"{name}: {tokens}" for name, tokens in tiers.items()),
            load,
        )
