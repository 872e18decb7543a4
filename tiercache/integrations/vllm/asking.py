"""What the caches have of each request's prompt, asked and answered while the engine does other things."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiercache.config import Config
from tiercache.integrations.vllm.adapters import nobodys_key
from tiercache.integrations.vllm.block_names import BlockNames
from tiercache.integrations.vllm.lookup import LookUp
from tiercache.integrations.vllm.lookup_client import LookupClient
from tiercache.integrations.vllm.planning import BlockGeometry, Match
from tiercache.integrations.vllm.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("tiercache.vllm")

_WAIT_A_STEP_S = 0.0005
"""So long the scheduler waits for answers before each step, in all: who has none by then waits for the whole step."""
_WAITS_FOR = 4
"""Where more are open it does not wait: a thread that answers many keeps Python's lock for up to 5 ms."""
_ASK_AGAIN_S = 0.005
"""What another engine is storing is looked for after such a pause, and after longer ones up to the next."""
_LONGEST_PAUSE_S = 0.05


class Asking:
    """All methods are called by the engine's scheduler thread, and wait for no more than `_WAIT_A_STEP_S` a step."""

    def __init__(
        self,
        config: Config,
        geometry: BlockGeometry,
        names: BlockNames,
        client: LookupClient,
        release: Callable[[str], None],
    ) -> None:
        """`release` is told of look-ups of which nothing will be loaded, by their `TrackedRequest.claim`."""
        self._config = config
        self._geometry = geometry
        self._names = names
        self._client = client
        self._release = release
        self._numbers = itertools.count()
        self._patience_s = _WAIT_A_STEP_S
        self._begun: list[LookUp] = []
        """Since the last step."""

    @property
    def _longest_s(self) -> float:
        return self._config.lookup_timeout_ms / 1000

    def step_begins(self) -> None:
        self._client.send()
        self._patience_s = _WAIT_A_STEP_S
        self._begun.clear()

    def track(self, request: Request) -> TrackedRequest:
        tracked = TrackedRequest(request)
        if (lora := getattr(request, "lora_request", None)) is not None:
            tracked.adapter = self._names.adapters.key_of(lora.lora_path)
        return tracked

    def awaits_adapter(self, tracked: TrackedRequest) -> bool:
        """Its blocks cannot be named yet: what its adapter holds is being found out, as long as a look-up may take."""
        if tracked.adapter is None or tracked.adapter_key or tracked.adapter.done():
            return False
        return time.monotonic() - tracked.arrived_s < self._longest_s

    def names_of(self, tracked: TrackedRequest) -> list[bytes]:
        """Of its full blocks, as many as there are by now."""
        if tracked.adapter is not None and not tracked.adapter_key:
            tracked.adapter_key = tracked.adapter.result() if tracked.adapter.done() else nobodys_key()
        return self._names.extend(tracked.names, tracked.request, tracked.adapter_key)

    def begin(self, tracked: TrackedRequest) -> None:
        """The first since the last step is asked at once; those behind it together, when an answer is wanted or the step is
        planned."""
        tracked.asked_at_s = time.monotonic()
        names = list(self.names_of(tracked))
        if self._geometry.groups:
            # The last token has to be computed, and windows are there for a hit as it is found or not at all.
            del names[(tracked.request.num_tokens - 1) // self._geometry.block_tokens :]
        if not names:
            tracked.match = Match()
            return
        # Each has a name of its own: what is let go of an earlier one is nothing that this one holds.
        tracked.claim = f"{tracked.request.request_id}#{next(self._numbers)}"
        tracked.lookup = self._client.begin(names, tracked.claim)
        self._begun.append(tracked.lookup)
        if len(self._begun) == 1:
            self._client.send()

    def answer(self, tracked: TrackedRequest) -> Match | None:
        """None: there is none yet."""
        if tracked.match is not None:
            return tracked.match
        if tracked.lookup is None:
            if time.monotonic() < tracked.ask_again_at_s:
                return None
            self.begin(tracked)
        self._client.send()
        tracked.match = tracked.match or self._look(tracked)
        if tracked.match is not None and self._is_being_stored(tracked, tracked.match):
            self.forget(tracked)
        return tracked.match

    def let_go(self, tracked: TrackedRequest) -> None:
        """What a look-up may have found is not going to be loaded."""
        if tracked.lookup is not None:
            self._release(tracked.claim)

    def forget(self, tracked: TrackedRequest) -> None:
        """What was found is not believed any more."""
        if tracked.lookup is not None:
            tracked.lookup.give_up()
        self.let_go(tracked)
        tracked.lookup = tracked.match = None

    def _look(self, tracked: TrackedRequest) -> Match | None:
        lookup = tracked.lookup
        if lookup is None:
            return Match()
        if lookup.match is None and self._patience_s > 0:
            self._wait_for(lookup)
        if lookup.match is not None:
            return lookup.match
        if time.monotonic() - tracked.asked_at_s > self._longest_s:
            logger.warning("a look-up took longer than lookup_timeout_ms; the request is computed instead")
            lookup.give_up()
            self.let_go(tracked)
            return Match(failed=True)
        return None

    def _wait_for(self, lookup: LookUp) -> None:
        if sum(one.is_open for one in self._begun) > _WAITS_FOR:
            self._patience_s = 0.0
            return
        began_s = time.monotonic()
        lookup.wait(self._patience_s)
        self._patience_s -= time.monotonic() - began_s

    def _is_being_stored(self, tracked: TrackedRequest, match: Match) -> bool:
        """Whether more of the prompt was announced (`tiercache.expect_tokens`), and there is time to look again."""
        now_s = time.monotonic()
        expected = min(tracked.wishes.expect_tokens, tracked.request.num_tokens - 1) // self._geometry.block_tokens
        if not self._geometry.save_tails:
            expected = self._geometry.whole_chunks(expected)
        if match.failed or match.blocks >= expected:
            return False
        if now_s - tracked.arrived_s >= self._longest_s:
            logger.info("request %s: not all that it was to find has come in time", tracked.request.request_id)
            return False
        tracked.pause_s = min(2 * tracked.pause_s, _LONGEST_PAUSE_S) if tracked.pause_s else _ASK_AGAIN_S
        tracked.ask_again_at_s = now_s + tracked.pause_s
        return True
