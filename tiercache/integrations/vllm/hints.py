"""Hints about sessions: parse those in a request's `kv_transfer_params`, and pass them to the cache in the worker.

    {"tiercache.session": "chat-17", "tiercache.next_in_s": 20}

The same fields may come as the payload of actions in vLLM's `kv_hints`; a request's `session_id` is a session. The
worker pins, prefetches or forgets the chunks of a turn when the turn's saves have ended, or after a time limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tiercache.bridge import CacheThread
from tiercache.control.messages import LONGEST_NAME, LONGEST_S
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError

logger = logging.getLogger("tiercache.vllm")

PREFIX = "tiercache."
EXPECT_TOKENS = PREFIX + "expect_tokens"


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Wishes(msgspec.Struct, frozen=True):
    """Parsed hints of a request. Each field is a parameter `tiercache.<field>`."""

    session: _Name = ""
    """An id chosen by the program. Turns of a session predict one another."""
    next_in_s: _Seconds | None = None
    """The time in seconds after which the request's KV is needed again."""
    pin_s: _Seconds | None = None
    """The time in seconds for which the request's KV stays hot."""
    forget: bool = False
    """Remove the chunks that the request stored when it has finished. Earlier chunks stay if memory or this host's
    tiers know them, or the request's lookup found them. A chunk on a server that was not asked counts as new.
    """
    session_over: bool = False
    """No turn of the session follows this one."""
    expect_tokens: _Tokens = 0
    """Number of the prompt's first tokens that another engine is storing: lookups wait for them within
    `lookup_timeout_ms`.
    """

    @property
    def at_the_end(self) -> bool:
        """Return True if there is anything to do when the request has finished."""
        return bool(self.session or self.forget or self.next_in_s is not None or self.pin_s is not None)


@dataclass(frozen=True)
class RequestBegan:
    """A request of a session has come. `names` are the names of its prompt's full chunks."""

    session: str
    names: list[bytes]


@dataclass(frozen=True)
class RequestEnded:
    """A request has finished. `names` are the names of the chunks that hold its prefix now."""

    request_id: str
    wishes: Wishes
    names: list[bytes]


Turn = RequestBegan | RequestEnded


def wishes_of(request: Any, warned: set[str]) -> Wishes:
    """Return the request's hints. `kv_transfer_params` override `kv_hints`, and these override `session_id`.

    An invalid hint is ignored with one warning, and never fails a request. `warned` holds the names that were warned about.
    """
    said: dict[Any, Any] = {}
    if session := getattr(request, "session_id", None):
        said[PREFIX + "session"] = session
    for action in getattr(getattr(request, "kv_hints", None), "actions", ()):
        said |= action.payload
    parameters = getattr(request, "kv_transfer_params", None)
    if isinstance(parameters, Mapping):
        said |= parameters
    found: dict[str, Any] = {}
    for name, value in said.items():
        if not isinstance(name, str) or not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX)
        try:
            if field not in _KINDS:
                raise ValueError(f"the names are {', '.join(_KINDS)}")
            found[field] = msgspec.convert(value, _KINDS[field])
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            if field[:64] not in warned and len(warned) < 100:
                warned.add(field[:64])
                logger.warning(
                    "what a request says: %.80r is ignored: expected a name and a value of ours: %s", name, error
                )
    return Wishes(**found)


_KINDS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Wishes)}


_STORING_S = 30.0
"""Longest wait in seconds for a request's saves, after which its hints are applied anyway."""


class SessionTurns:
    """Passes hints of requests to the cache. The engine's thread calls `follow`, which does not wait."""

    def __init__(self, thread: CacheThread, keys_of: Callable[[list[bytes]], list[ChunkKey]]) -> None:
        """Take `keys_of`, which returns the keys of named chunks."""
        self._thread = thread
        self._keys_of = keys_of
        self._new: dict[str, set[ChunkKey]] = {}
        """Chunks that each request stores and no tier had before. Used only on the cache's loop."""
        self._warned = False

    def stores(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        """Note chunks that are to be forgotten, before the request begins to store them. Called by the engine's thread."""
        self._thread.call_soon(self._note, request_id, keys)

    def _note(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        tiers = (self._thread.cache.cpu, *self._thread.cache.tiers)
        new = {key for key in keys if not any(tier.contains(key) for tier in tiers)}
        self._new.setdefault(request_id, set()).update(new)

    def follow(self, turns: Sequence[Turn], storing: Mapping[concurrent.futures.Future[int], str]) -> None:
        """Apply the hints of `turns`, each after its saves. `storing` are the in-flight saves, with their requests."""
        for turn in turns:
            saves = []
            if isinstance(turn, RequestEnded):
                saves = [save for save, request_id in list(storing.items()) if request_id == turn.request_id]
            with contextlib.suppress(TierCacheError):  # closed, so predictions are useless
                self._thread.submit(self._follow(turn, saves))

    async def _follow(self, turn: Turn, saves: list[concurrent.futures.Future[int]]) -> None:
        try:
            keys, ahead = self._keys_of(turn.names), self._thread.cache.ahead
            if isinstance(turn, RequestBegan):
                ahead.began(turn.session, keys)
                return
            # Do not wait here: the session's next turn may begin before this one is stored, and must come after it.
            if turn.wishes.session:
                ahead.ended(turn.wishes.session, keys)
                if turn.wishes.session_over:
                    ahead.over(turn.wishes.session)
            if saves:
                # A timeout does not cancel the saves, and their errors are logged elsewhere.
                ended, _ = await asyncio.wait([asyncio.wrap_future(save) for save in saves], timeout=_STORING_S)
                for save in ended:
                    _ = save.cancelled() or save.exception()
            await self._learn(turn, keys)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("what a request said about the next ones has no effect: %r", error)

    async def _learn(self, turn: RequestEnded, keys: list[ChunkKey]) -> None:
        cache, wishes = self._thread.cache, turn.wishes
        if wishes.forget:
            forgotten = list(self._new.pop(turn.request_id, ()))
            cache.ahead.unpin(forgotten)
            await cache.forget(forgotten)
        if wishes.pin_s is not None:
            cache.ahead.pin(keys, wishes.pin_s)
        if wishes.next_in_s is not None:
            cache.prefetch(keys, deadline=wishes.next_in_s)
