"""What a worker's cache has of requests, answered to the scheduler's half: see `lookup_client` for how it asks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.control.framing import frame, receive
from tiercache.control.messages import ControlError
from tiercache.control.served import ServedCache
from tiercache.control.sockets import bound, check_private
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm.claims import Claims
from tiercache.integrations.vllm.grouped import HitSearch, keys_of, names_of, needed_chunks
from tiercache.integrations.vllm.planning import BlockGeometry, Match, chunk_ends, tail_lengths
from tiercache.memory.slots import Lease

logger = logging.getLogger("tiercache.vllm")

LARGEST_MESSAGE_BYTES = 64 << 20

_PART_FOR_PROMOTING = 0.8
"""Of the time that the scheduler's half waits for an answer."""
_MOST_QUESTIONS = 256
"""For one hit of several groups, of which a recurrent state may be stored in few places. Each is answered from memory, but
where a shared tier has to be asked."""

local: dict[tuple[str, int], LookupServer] = {}
"""Those of workers that live in this process, by engine and rank."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Messages are lists of these, and of answers: what a step asks in one, and what is answered together in one."""

    number: int
    """Of its connection, where answers come in any order."""
    names: list[bytes]
    claim: str = ""


class LookUp:
    """What the caches have of one request: asked by the scheduler's thread, answered by another.

    A `concurrent.futures.Future` does the same for 6 us, of which a step with 64 arrivals has many.
    """

    __slots__ = ("_wake", "answers", "claim", "given_up", "match", "names", "on_given_up")

    def __init__(self, names: list[bytes], claim: str = "") -> None:
        """`names`: one a block."""
        self.names = names
        self.claim = claim
        self.answers: dict[int, Match] = {}
        """By rank, so far."""
        self.match: Match | None = None
        """The answer, which stays as it is."""
        self.given_up = False
        self.on_given_up: Callable[[], None] | None = None
        self._wake: threading.Event | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for an answer that is not there yet."""
        return self.match is None and not self.given_up

    def give(self, match: Match) -> None:
        if self.match is None:
            self.match = match
        if (wake := self._wake) is not None:
            wake.set()

    def wait(self, timeout_s: float) -> Match | None:
        """The answer, if it is there by then."""
        if self.match is None:
            self._wake = threading.Event()
            if self.match is None:  # it may have come between the two
                self._wake.wait(timeout_s)
        return self.match

    def give_up(self) -> None:
        """Nobody wants the answer any more: where it is not looked up yet, it is not, and where it is, that is cancelled."""
        self.given_up = True
        if self.on_given_up is not None:
            self.on_given_up()


class Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    blocks: int
    tokens_by_tier: dict[str, int]
    held: bool = False


async def find(
    cache: TierCache,
    names: Sequence[bytes],
    geometry: BlockGeometry,
    *,
    into_device: bool = False,
    claims: Claims | None = None,
    claim: str = "",
) -> Match:
    """`locate`, for a request that is here. With `claims`, what is found is in the hot cache when this returns, and held for
    the request, as far as there is room for that and time until then.

    Where it is not, it is prefetched, so that reading overlaps with the request's wait in the engine's queue; but for what a
    tier reads into the device by itself, if that is where it will be wanted (`into_device`).
    """
    until_s = asyncio.get_running_loop().time() + _PART_FOR_PROMOTING * cache.config.lookup_timeout_ms / 1000
    match, found = await locate(cache, names, geometry)
    if claims is not None and geometry.groups:
        return await claims.claim(claim, names, match, until_s) if match.blocks else match
    direct = [tier for tier in cache.tiers if into_device and tier.serves_device]
    for_host = [key for key in found if not any(tier.contains(key) for tier in direct)]
    if claims is not None and found and len(for_host) == len(found):
        held = await claims.claim_prefix(claim, found, until_s)
        if held is not None:
            if held < len(found):
                match = match.shortened(held * geometry.blocks_per_chunk, geometry)
            match.held = True
            return match
    cache.warm_soon(for_host)
    return match


async def locate(cache: ServedCache, names: Sequence[bytes], geometry: BlockGeometry) -> tuple[Match, list[ChunkKey]]:
    """How many blocks of a request the cache has, and in which chunks: full ones, then the longest tail. `names` has one
    name a block.
    """
    if geometry.groups:
        return await _locate_groups(cache, names, geometry)
    ends = chunk_ends(len(names), geometry)
    keys = keys_of(cache.namespace, [names[end - 1] for end in ends], geometry)
    hit = await cache.lookup_keys(keys)
    match = Match(hit.chunks * geometry.blocks_per_chunk)
    tokens = {name: count * geometry.chunk_tokens for name, count in hit.by_tier.items()}
    found = list(keys[: hit.chunks])
    for length in tail_lengths(len(names), match.blocks, geometry):
        (key,) = keys_of(cache.namespace, [names[match.blocks + length - 1]], geometry)
        tail = await cache.lookup_keys([key])
        if tail.chunks:
            found.append(key)
            match.blocks += length
            for name, count in tail.by_tier.items():
                tokens[name] = tokens.get(name, 0) + count * length * geometry.block_tokens
            break
    match.tokens_by_tier = tokens
    return match, found


async def _locate_groups(
    cache: ServedCache, names: Sequence[bytes], geometry: BlockGeometry
) -> tuple[Match, list[ChunkKey]]:
    """The longest hit that all groups agree on. Of the windows only what the hit needs is asked for."""
    search = HitSearch(len(names) // geometry.blocks_per_chunk, geometry)
    by_tier: dict[str, int] | None = None
    asked = 0
    while search.question:
        asked += 1
        if asked > _MOST_QUESTIONS:
            logger.info("windows are stored with so many gaps that a look-up was given up: it counts as a miss")
            return Match(), []
        hit = await cache.lookup_keys(keys_of(cache.namespace, names_of(search.question, names, geometry), geometry))
        by_tier = by_tier or hit.by_tier
        search.answer(hit.chunks)
    needed = needed_chunks(search.chunks, geometry)
    # By where the chunks lie that were asked for first: those of the layers that see every token.
    tokens = {tier: count * geometry.chunk_tokens for tier, count in (by_tier or {}).items()}
    match = Match(tokens_by_tier=tokens).shortened(search.chunks * geometry.blocks_per_chunk, geometry)
    return match, keys_of(cache.namespace, names_of(needed, names, geometry), geometry)


class LookupServer:
    """Answers look-ups from another process. Lives on the worker's cache thread."""

    def __init__(
        self, engine: str, rank: int, thread: CacheThread, geometry: BlockGeometry, *, into_device: bool = False
    ) -> None:
        self.thread = thread
        self._into_device = into_device
        self._path = socket_path(engine, rank)
        self._geometry = geometry
        self._key = (engine, rank)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._finding: set[asyncio.Task[None]] = set()
        """For this process."""
        local[self._key] = self
        cache = thread.cache
        direct = into_device and any(tier.serves_device for tier in cache.tiers)
        # Of several groups all has to come to the hot cache for that.
        useful = not direct if geometry.groups else not cache.config.enable_async_loading
        self.claims = Claims(cache, geometry) if useful and cache.ahead.promotes else None
        self._server = thread.submit(self._start()).result(10)

    async def find(self, names: Sequence[bytes], claim: str = "") -> Match:
        return await find(
            self.thread.cache,
            names,
            self._geometry,
            into_device=self._into_device,
            claims=self.claims if claim else None,
            claim=claim,
        )

    def ask(self, asked: Sequence[LookUp]) -> None:
        """For the scheduler's half in this process, whose thread calls it. Raises RuntimeError where the loop is closed."""
        self.thread.loop.call_soon_threadsafe(self._begin, asked)

    def release(self, claims: Iterable[str]) -> None:
        """What was held for these requests is loaded, or not wanted any more. Called by the engine's thread."""
        if self.claims is not None and (over := tuple(claims)):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is held
                self.thread.loop.call_soon_threadsafe(self.claims.release, *over)

    @property
    def held(self) -> Mapping[ChunkKey, Lease]:
        """Of all requests. Belongs to the cache's loop."""
        return self.claims.leases if self.claims is not None else {}

    def close(self) -> None:
        local.pop(self._key, None)
        with contextlib.suppress(Exception):
            self.thread.submit(self._stop()).result(5)
        self._path.unlink(missing_ok=True)

    def _begin(self, asked: Sequence[LookUp]) -> None:
        for one in asked:
            task = self.thread.loop.create_task(self._find_for(one))
            self._finding.add(task)
            task.add_done_callback(self._finding.discard)
            one.on_given_up = functools.partial(self._cancel, task)
            if one.given_up:  # before that
                task.cancel()

    def _cancel(self, task: asyncio.Task[None]) -> None:
        """Called by the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.thread.loop.call_soon_threadsafe(task.cancel)

    async def _find_for(self, one: LookUp) -> None:
        match = Match(failed=True)
        try:
            match = await self.find(one.names, one.claim)
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
        finally:
            one.give(match)

    async def _start(self) -> asyncio.Server:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        check_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._serve, sock=bound(self._path))

    async def _stop(self) -> None:
        self._server.close()
        if self.claims is not None:
            self.claims.close()
        for task in self._finding:
            task.cancel()
        for writer in self._connections.values():
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=2.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering: set[asyncio.Task[None]] = set()
        serving = asyncio.current_task()
        assert serving is not None
        self._connections[serving] = writer
        answers = _Answers(writer)
        try:
            while True:
                await writer.drain()
                packed = await receive(reader, LARGEST_MESSAGE_BYTES)
                for question in msgspec.msgpack.decode(packed, type=list[Question]):
                    task = asyncio.create_task(self._answer(answers, question))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, ControlError):
            pass  # the scheduler's process ended, or somebody else spoke
        finally:
            for task in answering:
                task.cancel()
            writer.close()
            del self._connections[serving]

    async def _answer(self, answers: _Answers, question: Question) -> None:
        try:
            match = await self.find(question.names, question.claim)
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
            match = Match()
        answers.add(Answer(question.number, match.blocks, match.tokens_by_tier, match.held))


class _Answers:
    """What is found in one round of the loop goes in one message: each costs the scheduler's process a turn of Python's
    lock."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[Answer] = []

    def add(self, answer: Answer) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(answer)

    def _send(self) -> None:
        answers, self._unsent = self._unsent, []
        if not self._writer.is_closing():
            self._writer.write(frame(answers))


def socket_path(engine: str, rank: int) -> Path:
    """Short whatever the engine is called: a Unix socket's path may have 107 characters."""
    name = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}" / f"{name}.{rank}.sock"
