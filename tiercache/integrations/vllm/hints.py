"""Hints about sessions: what a request says in its `kv_transfer_params`, and how the worker passes it to the cache.

    {"tiercache.session": "chat-17", "tiercache.next_in_s": 20}

The same may come as the payload of actions in vLLM's `kv_hints`, whose `session_id` is a session. The worker tells the
cache about a turn when everything that the turn stored is in the cache.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tiercache.bridge import CacheThread
from tiercache.control.messages import LONGEST_NAME, LONGEST_S
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError

logger = logging.getLogger("tiercache.vllm")

PREFIX = "tiercache."
EXPECT_TOKENS = PREFIX + "expect_tokens"


@dataclass(frozen=True)
class Wishes:
    """A field of this class is a parameter `tiercache.<field>`."""

    session: str = ""
    """An id of the program's own: its turns predict one another."""
    step: str = ""
    """Accepted without effect."""
    ended: str = ""
    """Accepted without effect."""
    next_in_s: float | None = None
    """What the request leaves behind is needed again in so many seconds."""
    pin_s: float | None = None
    """Keep it hot for so long."""
    forget: bool = False
    """Remove what the request stored when it has finished. What others had stored before stays, as far as memory and this
    host's tiers know, and as the request's look-up found it: of a chunk on a server that was not asked nobody knows."""
    session_over: bool = False
    """No turn of the session follows this one."""
    expect_tokens: int = 0
    """Another engine is storing so many of the prompt's first tokens just now: look-ups wait for them, as long as
    `lookup_timeout_ms` says."""

    @property
    def at_the_end(self) -> bool:
        """Whether there is anything to do when the request has finished."""
        return bool(self.session or self.forget or self.next_in_s is not None or self.pin_s is not None)


@dataclass(frozen=True)
class RequestBegan:
    """A request of a session has come. `names` are those of its prompt's full chunks."""

    session: str
    names: list[bytes]


@dataclass(frozen=True)
class RequestEnded:
    """A request has finished. `names` are those of the chunks that hold its prefix now."""

    request_id: str
    wishes: Wishes
    names: list[bytes]


Turn = RequestBegan | RequestEnded


def said_by(request: Any) -> dict[str, Any]:
    """Of what comes in several ways, `kv_transfer_params` win over `kv_hints`, and these over `session_id`."""
    said: dict[str, Any] = {}
    if session := getattr(request, "session_id", None):
        said[PREFIX + "session"] = session
    for action in getattr(getattr(request, "kv_hints", None), "actions", ()):
        said |= {name: value for name, value in action.payload.items() if _is_ours(name)}
    parameters = getattr(request, "kv_transfer_params", None)
    if isinstance(parameters, Mapping):
        said |= {name: value for name, value in parameters.items() if _is_ours(name)}
    return said


def _is_ours(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def wishes_of(parameters: Any, warned: set[str]) -> Wishes:
    """What is wrong counts as not said, with one warning for each parameter; nothing here fails a request.

    `warned` remembers what was warned about.
    """
    found: dict[str, Any] = {}
    if not isinstance(parameters, Mapping):
        return Wishes()
    for name, value in parameters.items():
        if not _is_ours(name):
            continue
        field = name.removeprefix(PREFIX)
        expected, parse = _KINDS.get(field, (f"one of {', '.join(_KINDS)} after {PREFIX}", lambda _: None))
        if (parsed := parse(value)) is not None:
            found[field] = parsed
        elif field[:64] not in warned and len(warned) < 100:
            warned.add(field[:64])
            logger.warning(
                "what a request says: %.80r is ignored: expected %s, found %.80s", name, expected, _shown(value)
            )
    return Wishes(**found)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"
    except RecursionError:
        return "a value that is nested too deep"


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_NAME else None


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= LONGEST_S else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_A_NAME = (f"a text of 1 .. {LONGEST_NAME} characters", _name)
_SOME_SECONDS = (f"a number of seconds in 0 .. {LONGEST_S:.0f}", _seconds)
_A_FLAG = ("true or false", _flag)
_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "session": _A_NAME,
    "step": _A_NAME,
    "ended": _A_NAME,
    "next_in_s": _SOME_SECONDS,
    "pin_s": _SOME_SECONDS,
    "forget": _A_FLAG,
    "session_over": _A_FLAG,
    "expect_tokens": ("a number of tokens", _count),
}
assert set(_KINDS) == {field.name for field in fields(Wishes)}


_STORING_S = 30.0
"""The longest wait for a request's saves; what is not stored by then is not counted on."""


class SessionTurns:
    """`follow` is called by the engine's thread and does not wait."""

    def __init__(self, thread: CacheThread, keys_of: Callable[[list[bytes]], list[ChunkKey]]) -> None:
        """`keys_of` the names of chunks."""
        self._thread = thread
        self._keys_of = keys_of
        self._new: dict[str, set[ChunkKey]] = {}
        """The loop's. What requests store and nobody had stored before."""
        self._warned = False

    def stores(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        """Of a request that wishes to have it forgotten, before it begins to store these. Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # closed
            self._thread.loop.call_soon_threadsafe(self._note, request_id, keys)

    def _note(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        tiers = (self._thread.cache.cpu, *self._thread.cache.tiers)
        new = {key for key in keys if not any(tier.contains(key) for tier in tiers)}
        self._new.setdefault(request_id, set()).update(new)

    def follow(self, turns: Sequence[Turn], storing: Mapping[concurrent.futures.Future[int], str]) -> None:
        """`storing` are the saves under way, with the requests that they are for."""
        for turn in turns:
            saves = []
            if isinstance(turn, RequestEnded):
                saves = [save for save, request_id in list(storing.items()) if request_id == turn.request_id]
            with contextlib.suppress(TierCacheError):  # closed: nothing is worth predicting any more
                self._thread.submit(self._follow(turn, saves))

    async def _follow(self, turn: Turn, saves: list[concurrent.futures.Future[int]]) -> None:
        try:
            keys = self._keys_of(turn.names)
            if isinstance(turn, RequestBegan):
                self._thread.cache.ahead.began(turn.session, keys)
                return
            # Without waiting: the session's next turn may begin before this one is stored, and must not overtake it.
            self._end_turn(turn.wishes, keys)
            if saves:
                # Waiting for them does not end them, and how they end is told elsewhere.
                ended, _ = await asyncio.wait([asyncio.wrap_future(save) for save in saves], timeout=_STORING_S)
                for save in ended:
                    _ = save.cancelled() or save.exception()
            await self._learn(turn, keys)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("what a request said about the next ones has no effect: %r", error)

    def _end_turn(self, wishes: Wishes, keys: list[ChunkKey]) -> None:
        ahead = self._thread.cache.ahead
        if wishes.session:
            ahead.ended(wishes.session, keys)
            if wishes.session_over:
                ahead.over(wishes.session)

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
