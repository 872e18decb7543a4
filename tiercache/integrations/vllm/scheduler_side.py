"""The scheduler's half: what to load when a request is admitted, what to save after each step. It never waits."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.integrations.vllm.lookup import LookupClient
from tiercache.integrations.vllm.messages import Load, Save, SavesEnded, StepWork
from tiercache.integrations.vllm.planning import Geometry, Match, plan_load, plan_save, usable_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")

# Keys here are the engine's block hashes. Workers mix their layout's namespace in, which the scheduler does not know.


@dataclass
class _Tracked:
    request: Request
    lookup: concurrent.futures.Future[Match] | None = None
    asked_at_s: float = 0.0
    match: Match | None = None
    load_from: int = 0
    load_tokens: int = 0
    saved_blocks: int = 0
    saves_begun: int = 0
    saves_ended: int = 0
    admitted: bool = False
    logged: bool = False
    prompt_done: bool = False


@dataclass
class SchedulerSide:
    config: Config
    geometry: Geometry
    client: LookupClient
    workers: int
    _requests: dict[str, _Tracked] = field(default_factory=dict)
    _finishing: dict[str, _Tracked] = field(default_factory=dict)
    _work: StepWork = field(default_factory=StepWork)

    def on_new_request(self, request: Request) -> None:
        """Ask at once: by the time the request is scheduled the answer is often there."""
        self._begin_lookup(self._track(request))

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        if tracked.admitted:
            # Preempted or rolled back: what was found then may be gone.
            tracked.admitted = False
            tracked.lookup = tracked.match = None
        if tracked.match is None:
            if tracked.lookup is None:
                self._begin_lookup(tracked)
            tracked.match = self._answer(tracked)
            if tracked.match is None:
                return None, False
        usable = usable_tokens(tracked.match.blocks, request.num_tokens, self.geometry)
        more = max(0, usable - computed_tokens)
        if usable < self.config.min_retrieve_tokens:
            more = 0
        tracked.load_from, tracked.load_tokens = computed_tokens, more
        self._log_once(tracked, computed_tokens, more)
        return more, self.config.enable_async_loading and more > 0

    def after_allocation(self, request: Request, blocks: list[int], external_tokens: int) -> None:
        tracked = self._track(request)
        tracked.admitted = True
        if external_tokens <= 0 or tracked.match is None:
            return
        end = tracked.load_from + external_tokens
        transfers = plan_load(
            self._keys(request), tracked.match.blocks, tracked.load_from, end, blocks, self.geometry
        )
        self._work.loads.append(Load(request.request_id, transfers, self.config.enable_async_loading))
        whole = end // self.geometry.chunk_tokens * self.geometry.blocks_per_chunk
        at_tail = self.geometry.save_tails and end // self.geometry.block_tokens == tracked.match.blocks
        tracked.saved_blocks = tracked.match.blocks if at_tail else whole

    def step_work(self, output: SchedulerOutput) -> StepWork:
        work, self._work = self._work, StepWork()
        work.preempted = set(output.preempted_req_ids or ())
        for request_id in work.preempted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.saved_blocks = 0
        for scheduled in output.scheduled_new_reqs:
            self._plan_save(work, output, scheduled.req_id, scheduled.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._plan_save(work, output, request_id, computed)
        return work

    def saves_ended(self, ended: SavesEnded) -> None:
        for request_id, count in ended.counts.items():
            tracked = self._requests.get(request_id) or self._finishing.get(request_id)
            if tracked is not None:
                tracked.saves_ended += count
                if request_id in self._finishing and self._is_saved(tracked):
                    del self._finishing[request_id]

    def loads_failed(self) -> None:
        """Some blocks were recomputed: their chunks are saved anew. Saving a chunk that is there costs a look-up."""
        for tracked in self._requests.values():
            tracked.saved_blocks = 0
            tracked.prompt_done = False

    def finished(self, request: Request) -> bool:
        """Whether the request's blocks have to stay until its saves have ended."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.lookup is not None and not tracked.lookup.done():
            tracked.lookup.cancel()
        if self._is_saved(tracked):
            return False
        self._finishing[request.request_id] = tracked
        self._work.held.add(request.request_id)
        return True

    def forget_hot(self) -> None:
        self._work.forget_hot = True

    def _is_saved(self, tracked: _Tracked) -> bool:
        return tracked.saves_ended >= tracked.saves_begun * self.workers

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request)
        return tracked

    @staticmethod
    def _keys(request: Request) -> list[bytes]:
        return [bytes(value) for value in request.block_hashes]

    def _begin_lookup(self, tracked: _Tracked) -> None:
        tracked.asked_at_s = time.monotonic()
        keys = self._keys(tracked.request)
        if not keys:
            tracked.match = Match()
            return
        try:
            tracked.lookup = self.client.begin(keys)
        except Exception as error:
            logger.warning("a look-up could not be begun: %r", error)
            tracked.match = Match()

    def _answer(self, tracked: _Tracked) -> Match | None:
        lookup = tracked.lookup
        if lookup is None:
            return Match()
        if lookup.done():
            try:
                return lookup.result()
            except (Exception, concurrent.futures.CancelledError) as error:
                logger.warning("a look-up failed: %r", error)
                return Match()
        if time.monotonic() - tracked.asked_at_s > self.config.lookup_timeout_ms / 1000:
            logger.warning("a look-up took longer than lookup_timeout_ms; the request is computed instead")
            lookup.cancel()
            return Match()
        return None

    def _log_once(self, tracked: _Tracked, computed: int, load: int) -> None:
        if tracked.logged or tracked.match is None:
            return
        tracked.logged = True
        tiers = tracked.match.tokens_by_tier or {"cpu": 0}
        logger.info(
            "Reqid: %s, Total tokens %d, engine computed tokens: %d, hit tokens: %d (%s), need to load: %d",
            tracked.request.request_id,
            tracked.request.num_tokens,
            computed,
            tracked.match.blocks * self.geometry.block_tokens,
            ", ".join(f"{name}: {tokens}" for name, tokens in tiers.items()),
            load,
        )

    def _plan_save(self, work: StepWork, output: SchedulerOutput, request_id: str, computed_tokens: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None or (tracked.prompt_done and not self.config.save_decode_cache):
            return
        request = tracked.request
        if self.config.priority_limit is not None and request.priority > self.config.priority_limit:
            return
        after = computed_tokens + output.num_scheduled_tokens[request_id]
        limit = request.num_tokens if self.config.save_decode_cache else request.num_prompt_tokens
        ready = min(after, limit) // self.geometry.block_tokens
        last = after >= request.num_prompt_tokens and not tracked.prompt_done
        tracked.prompt_done = after >= request.num_prompt_tokens
        if ready // self.geometry.blocks_per_chunk * self.geometry.blocks_per_chunk <= tracked.saved_blocks and not last:
            return
        state: Any = output.kv_connector_block_state
        blocks = state.get_block_ids(request_id)[0]
        transfers, tracked.saved_blocks = plan_save(
            self._keys(request), tracked.saved_blocks, ready, blocks, self.geometry, last=last
        )
        if transfers:
            tracked.saves_begun += 1
            work.saves.append(Save(request_id, transfers, request.num_tokens))

