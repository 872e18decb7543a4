"""Lookups: the scheduler's half asks the workers' caches which blocks of requests they have, without waiting for answers.

`LookupClient` sends all questions of a step at once: to the worker's loop if that is in this process, else through a Unix
socket to each worker. With several workers the answer is the hit that all of them have. Questions are sent together
because each wake-up of another thread makes the scheduler's thread compete for Python's lock. What the scheduler lets go
goes the same way, so that it comes after its question.

`LookupServer` answers in a worker. A synchronous load must not fail at all, because other requests that share its blocks
go on with them (see `SchedulerSide`). So a load is synchronous only if all of its chunks were read, verified, and held in
the hot cache (or mapped) by `Claims`, and it reads from these leases. At most a part of the hot cache is held.

`AnnouncedPrompts` finds the chunks that a request for a prompt announced by its token ids will need.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.control.framing import frame, receive
from tiercache.control.messages import ControlError, Prefix
from tiercache.control.naming import given_keys
from tiercache.control.served import ServedCache
from tiercache.control.sockets import bound, check_private, connect
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierCacheError
from tiercache.integrations.vllm.names import BlockNames
from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    Match,
    agreed,
    all_names,
    full_chunks,
    held_names,
    keys_of,
    names_of,
    window_chunks,
)
from tiercache.integrations.vllm.siblings import Siblings
from tiercache.memory.slots import Lease

logger = logging.getLogger("tiercache.vllm")

LARGEST_MESSAGE_BYTES = 1 << 30

_PART_FOR_PROMOTING = 0.8
"""Fraction of `lookup_timeout_ms` that may be spent on bringing chunks into the hot cache."""
_MOST_QUESTIONS = 256
"""Limit of the questions for one hit: if only few recurrent states are stored, many are needed. Each is answered from
memory, unless a shared tier has to be asked."""

_MOST_SIBLINGS = 1 << 14
"""Limit of the chunks whose block names a worker keeps, 16 bytes a block."""

local: dict[tuple[str, int], LookupServer] = {}
"""The servers of workers that live in this process, by engine and rank."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A question about one request."""

    claim: str
    """Names the question, since answers come in any order, and the chunks that are held for it."""
    names: list[bytes]
    """One name per block."""
    again: bool = False
    """The request was looked up before."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message from the scheduler to a worker."""

    questions: list[Question]
    released: list[str]
    """Claims of earlier questions after which nothing will be loaded."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a question. A worker sends lists of them."""

    claim: str
    match: Match


class Lookup:
    """A question about one request to the caches: asked by the scheduler's thread, answered by another.

    Cheaper than a `concurrent.futures.Future`, since a step may begin many lookups.
    """

    def __init__(self, question: Question) -> None:
        """No other lookup has the claim of `question`."""
        self.question = question
        self.answers: dict[int, Match] = {}
        """The answers so far, by rank."""
        self.match: Match | None = None
        """The answer, which is set once; a miss if the lookup was given up."""
        self._answered = threading.Event()

    def give(self, match: Match) -> None:
        if self.match is None:
            self.match = match
            self._answered.set()

    def wait(self, timeout_s: float) -> Match | None:
        """Block the calling thread until there is an answer; return None if there is none after `timeout_s`."""
        self._answered.wait(timeout_s)
        return self.match


async def locate(
    cache: ServedCache, names: Sequence[bytes], geometry: BlockGeometry, *, counts: bool = False
) -> tuple[Match, list[ChunkKey]]:
    """Return how many blocks of a request the cache has, and the keys of the longest hit that every group can serve.

    The keys are those of the full chunks, then of the longest tail. For groups with a window only the chunks that the hit
    needs are looked up. `names` has one name per block. All questions together take at most `lookup_timeout_ms`; chunks that
    a tier has not reported by then count as missing. `counts` says that this is the first question about a request. Then
    tiers are asked for tails only if none is known, and not all whole chunks are hot; later, if a longer one may be there.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + cache.config.lookup_timeout_ms / 1000
    chunks = len(names) // geometry.blocks_per_chunk
    windows = window_chunks(chunks, geometry)
    question = full_chunks(chunks, geometry) or windows
    found: list[ChunkKey] = []
    tokens: dict[str, int] = {}
    asked = 0
    while question:
        asked += 1
        if asked > _MOST_QUESTIONS:
            logger.info("windows are stored with so many gaps that a lookup was given up: it counts as a miss")
            return Match(), []
        keys = keys_of(cache.namespace, names_of(question, names, geometry), geometry)
        left_s = max(0.0, until_s - loop.time())
        hit = await cache.lookup_keys(keys, deadline_s=left_s, counts=counts and asked == 1)
        # The first question is about the layers that see every token; the hit is attributed to their tiers.
        found = found or keys
        tokens = tokens or {tier: count * geometry.chunk_tokens for tier, count in hit.by_tier.items()}
        if hit.chunks < len(question):
            _, chunks = question[hit.chunks]
        # A shorter hit ends elsewhere, and so do its windows.
        windows = window_chunks(chunks, geometry)
        question = windows if windows != question else []
    found = found[: len(full_chunks(1, geometry)) * chunks]
    found += keys_of(cache.namespace, names_of(windows, names, geometry), geometry)
    match = Match(tokens_by_tier=tokens).shortened(chunks * geometry.blocks_per_chunk, geometry)
    if geometry.save_tails:
        after = names[match.blocks : match.blocks + geometry.blocks_per_chunk - 1]
        tails = keys_of(cache.namespace, after, geometry)
        there = await cache.lookup_each(tails, deadline_s=0.0)
        if counts:
            whole = len(names) // geometry.blocks_per_chunk
            is_enough = any(there) or (whole > 0 and cache.lookup_hot(found) == whole)
        else:
            is_enough = all(there[-1:])
        if not is_enough:
            there = await cache.lookup_each(tails, deadline_s=max(0.0, until_s - loop.time()))
        for blocks in range(len(tails), 0, -1):
            if there[blocks - 1] and await _lengthen(match, blocks, found, tails[blocks - 1], cache, geometry):
                found.append(tails[blocks - 1])
                break
    return match, found


async def _lengthen(
    match: Match, blocks: int, found: Sequence[ChunkKey], key: ChunkKey, cache: ServedCache, geometry: BlockGeometry
) -> bool:
    """Add the first blocks of a chunk after those `found`, if it is known without I/O. Return False if it is not.

    All are asked for, since a tier may be worth asking for all of them and not for one.
    """
    before, after = [await cache.lookup_keys(keys, deadline_s=0.0, counts=False) for keys in (found, [*found, key])]
    if after.chunks <= len(found):
        return False
    match.blocks += blocks
    tier = max(after.by_tier, key=lambda name: after.by_tier[name] - before.by_tier.get(name, 0))
    match.tokens_by_tier[tier] = match.tokens_by_tier.get(tier, 0) + blocks * geometry.block_tokens
    return True


class LookupServer:
    """Answers lookups of the scheduler, from this or another process. Runs on the worker's cache thread."""

    def __init__(self, engine: str, rank: int, thread: CacheThread, geometry: BlockGeometry) -> None:
        self.thread = thread
        self._path = socket_path(engine, rank)
        self._geometry = geometry
        self._key = (engine, rank)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._finding: dict[str, asyncio.Task[Match]] = {}
        """Running lookups, by claim."""
        local[self._key] = self
        cache = thread.cache
        self.claims = Claims(cache)
        self._holds = geometry.plain and not cache.config.enable_async_loading and cache.ahead.promotes
        """Loads may be synchronous, so chunks are held for them."""
        self._siblings = None
        if geometry.plain and geometry.blocks_per_chunk > 1:
            most = min(_MOST_SIBLINGS, 2 * cache.cpu.pool.count)
            self._siblings = Siblings(geometry.blocks_per_chunk, most, tails=geometry.save_tails)
        self._server = thread.submit(self._start()).result(10)

    async def find(self, names: Sequence[bytes], claim: str, *, again: bool = False) -> Match:
        """Return the match that `locate` finds for a waiting request.

        If loads may be synchronous, the chunks found are in the hot cache when this returns and are held under the `claim`,
        as far as room and time allow. Otherwise they are prefetched, so that reading overlaps with the request's wait in
        the engine's queue. Chunks that a tier reads directly into the device are not prefetched. `again` says that this
        request was looked up before.
        """
        cache, geometry = self.thread.cache, self._geometry
        until_s = asyncio.get_running_loop().time() + _PART_FOR_PROMOTING * cache.config.lookup_timeout_ms / 1000
        match, found = await locate(cache, names, geometry, counts=not again)
        if not again and not geometry.save_tails:
            whole = geometry.whole_chunks(len(names))
            if match.blocks == whole < len(names):
                cache.parts.advisor.asked_partial(found, (len(names) - whole) * geometry.block_tokens)
        if self._siblings is not None:
            await self._add_sibling(self._siblings, names, match, found)
        # What a tier reads directly into the device does not pass through the hot cache.
        direct = [tier for tier in cache.tiers if tier.serves_device] if cache.parts.on_device is not None else []
        for_host = [key for key in found if not any(tier.contains(key) for tier in direct)]
        if self._holds and found and len(for_host) == len(found):
            held = await self.claims.claim(claim, found, until_s)
            if held is not None:
                if held < len(found):
                    match = match.shortened(held * geometry.blocks_per_chunk, geometry)
                match.held = True
                return match
        cache.warm_soon(for_host)
        return match

    async def _add_sibling(
        self, siblings: Siblings, names: Sequence[bytes], match: Match, found: list[ChunkKey]
    ) -> None:
        """Make a match longer if the first blocks after its whole chunks are those of another request's chunk.

        A chunk that has to be read is used only if at least half of its blocks make the match longer.
        """
        cache, geometry = self.thread.cache, self._geometry
        whole = geometry.whole_chunks(match.blocks)
        for blocks, sibling in siblings.like(names[whole:]):
            if blocks <= match.blocks - whole:
                break
            (key,) = keys_of(cache.namespace, [sibling.name], geometry)
            more, first = whole + blocks - match.blocks, found[: whole // geometry.blocks_per_chunk]
            reads = 2 * more >= sibling.chunk_blocks and any(tier.offers(key) for tier in cache.tiers)
            if not reads and not cache.parts.reader.has_at_hand(key):
                continue
            longer = match.shortened(whole, geometry)
            if await _lengthen(longer, blocks, first, key, cache, geometry):
                match.blocks, match.tokens_by_tier, match.sibling = longer.blocks, longer.tokens_by_tier, sibling
                found[:] = [*first, key]
                break
        siblings.add(names)

    def ask(self, asked: Sequence[Lookup], released: Iterable[str]) -> None:
        """Begin lookups, and end earlier ones. Called by the scheduler's thread in this process.

        Raises RuntimeError if the loop is closed.
        """
        self.thread.loop.call_soon_threadsafe(self._ask, asked, released)

    def release(self, claim: str) -> None:
        """Release the chunks of a load that has ended. Called by the engine's thread."""
        if self._holds:
            self.thread.call_soon(self.claims.release, claim)

    def close(self) -> None:
        local.pop(self._key, None)
        with contextlib.suppress(Exception):
            self.thread.submit(self._stop()).result(5)
        self._path.unlink(missing_ok=True)

    def _ask(self, asked: Sequence[Lookup], released: Iterable[str]) -> None:
        for one in asked:
            self._begin(one.question, one.give)
        self._release(released)

    def _begin(self, asked: Question, answer: Callable[[Match], None]) -> None:
        """Begin a lookup. `answer` is called with its match. A lookup that fails or is cancelled is a miss."""

        def ended(task: asyncio.Task[Match]) -> None:
            self._finding.pop(asked.claim, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("a lookup failed: %r", error)
            answer(Match(failed=True) if task.cancelled() or task.exception() else task.result())

        finding = self.find(asked.names, asked.claim, again=asked.again)
        self._finding[asked.claim] = task = self.thread.loop.create_task(finding)
        task.add_done_callback(ended)

    def _release(self, released: Iterable[str]) -> None:
        """End the lookups of these claims, and release what is held under them. One that came just now never begins."""
        for claim in released:
            if (task := self._finding.get(claim)) is not None:
                task.cancel()
            self.claims.release(claim)

    async def _start(self) -> asyncio.Server:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        check_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._serve, sock=bound(self._path))

    async def _stop(self) -> None:
        self._server.close()
        self.claims.close()
        for task in self._finding.values():
            task.cancel()
        for writer in self._connections.values():
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=2.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._connections[serving] = writer
        answers = _Answers(writer)
        try:
            while True:
                await writer.drain()
                message = msgspec.msgpack.decode(await receive(reader, LARGEST_MESSAGE_BYTES), type=Message)
                for question in message.questions:
                    self._begin(question, partial(answers.add, question.claim))
                self._release(message.released)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, ControlError):
            pass  # the scheduler's process ended, or another program connected
        finally:
            writer.close()
            del self._connections[serving]


class _Answers:
    """Sends all answers of one round of the loop in one message, since each message costs the scheduler Python's lock."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[Answer] = []

    def add(self, claim: str, match: Match) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(Answer(claim, match))

    def _send(self) -> None:
        answers, self._unsent = self._unsent, []
        if not self._writer.is_closing():
            self._writer.write(frame(answers))


def socket_path(engine: str, rank: int) -> Path:
    """Return the path of a worker's socket. The engine's name is hashed, since the path may have only 107 bytes."""
    name = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}" / f"{name}.{rank}.sock"


class LookupClient:
    """Asks all workers. The scheduler's thread calls `begin`, `release`, `send` and `close`, and polls the lookups."""

    def __init__(self, engine: str, ranks: int, geometry: BlockGeometry) -> None:
        self._engine = engine
        self._ranks = ranks
        self._geometry = geometry
        self._unsent: list[Lookup] = []
        self._released: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[int, _Connection] = {}

    def begin(self, names: Sequence[bytes], claim: str, *, again: bool = False) -> Lookup:
        """Return a lookup that the next `send` sends. The chunks found may be held under the `claim` until it is released.

        `again` says that the request was looked up before. The answer is a failed Match if a worker is gone. A worker that
        hangs never answers: give up the lookup then.
        """
        one = Lookup(Question(claim, list(names), again))
        self._unsent.append(one)
        return one

    def release(self, one: Lookup) -> None:
        """Give up the lookup. The next `send` releases the chunks that it holds or may still hold."""
        one.give(Match(failed=True))
        self._released.append(one.question.claim)

    def send(self) -> None:
        """Send all that was begun and released since the last call. Never waits."""
        if not self._unsent and not self._released:
            return
        asked, self._unsent = self._unsent, []
        released, self._released = self._released, []
        try:
            if self._ranks == 1 and (worker := local.get((self._engine, 0))) is not None:
                worker.ask(asked, released)
                return
            self._running().call_soon_threadsafe(self._ask, asked, released)
        except RuntimeError as error:  # no thread could be started, or the loop is closed
            _miss(asked, error)

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="tiercache-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()  # not kept: lookups given to a loop that does not run would never end
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    # On the loop

    def _ask(self, asked: list[Lookup], released: list[str]) -> None:
        for rank in range(self._ranks):
            connection = self._connections.get(rank)
            if connection is None or connection.serving.done():
                connection = self._connections[rank] = _Connection(self, rank, socket_path(self._engine, rank))
            connection.send(asked, released)

    def answered(self, rank: int, one: Lookup, match: Match) -> None:
        one.answers[rank] = match
        if len(one.answers) < self._ranks or one.match is not None:
            return
        answers = list(one.answers.values())
        least = min(answers, key=lambda match: match.blocks)
        if self._geometry.plain or all(match.blocks == least.blocks for match in answers):
            one.give(agreed(answers, self._geometry))
            return
        # Windows are needed at the end of this exact hit, and a worker with a longer hit may lack them: ask again.
        one.question = Question(one.question.claim, one.question.names[: least.blocks], again=True)
        one.answers.clear()
        self._ask([one], [])


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its tasks and close it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


class _Connection:
    """A connection to one worker; answers may come in any order."""

    def __init__(self, client: LookupClient, rank: int, path: Path) -> None:
        self._client = client
        self._rank = rank
        self._path = path
        self._waiting: dict[str, Lookup] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.serving = asyncio.create_task(self._serve())
        """Ends when the connection does."""

    def send(self, asked: Sequence[Lookup], released: list[str]) -> None:
        """Send now, or when the connection is made, to which no claim is known before."""
        # This worker may never answer lookups that were given up.
        self._waiting = {one.question.claim: one for one in (*self._waiting.values(), *asked) if one.match is None}
        if self._writer is not None:
            self._write(asked, released)

    def _write(self, asked: Iterable[Lookup], released: list[str]) -> None:
        assert self._writer is not None
        self._writer.write(frame(Message([one.question for one in asked], released)))

    async def _serve(self) -> None:
        try:
            check_private(self._path.parent)
            reader, self._writer = await connect(self._path)
            self._write(self._waiting.values(), [])
            while True:
                for found in msgspec.msgpack.decode(await receive(reader, LARGEST_MESSAGE_BYTES), type=list[Answer]):
                    if (one := self._waiting.pop(found.claim, None)) is not None:
                        self._client.answered(self._rank, one, found.match)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, TierCacheError) as error:
            _miss(list(self._waiting.values()), error)
        finally:
            for one in self._waiting.values():
                one.give(Match(failed=True))
            if self._writer is not None:
                self._writer.close()


def _miss(asked: Sequence[Lookup], error: Exception) -> None:
    """Answer the lookups that are still open with a miss."""
    unanswered = [one for one in asked if one.match is None]
    if unanswered:
        logger.warning("%d lookups got no answer from the workers: %r", len(unanswered), error)
    for one in unanswered:
        one.give(Match(failed=True))


_MOST_OF_THE_HOT_CACHE = 0.5
_LONGEST_S = 60.0
"""Longest time that chunks are held for a request, which may still wait for blocks, or have ended unnoticed."""
HELD_FOR_S = 30.0
"""How long after the question the scheduler relies on held chunks. The load has as long again to begin."""


@dataclass
class _Claim:
    keys: list[ChunkKey]
    expiry: asyncio.TimerHandle


class Claims:
    """Leases on chunks for the requests that looked them up. Call all methods on the cache's event loop."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._reader = cache.parts.reader
        self._claims: dict[str, _Claim] = {}
        self._times: dict[ChunkKey, int] = {}
        """The number of claims on each chunk."""
        self.leases: dict[ChunkKey, Lease] = {}

    @property
    def _most(self) -> int:
        return int(self._cache.cpu.budget.slots * _MOST_OF_THE_HOT_CACHE)

    async def claim(self, name: str, keys: Sequence[ChunkKey], until_s: float) -> int | None:
        """Bring consecutive chunks into the hot cache and hold them for the request. Return how many of the first are held.

        That is not all of them if a chunk cannot be read, or if computing has become quicker than waiting. Returns None and
        holds nothing if there is no room for all, or if `until_s` (a loop time) has passed. Holds nothing if cancelled.
        """
        self.release(name)
        if len(self.leases) + sum(key not in self.leases for key in keys) > self._most:
            return None
        loop = asyncio.get_running_loop()
        if self._reader.prefix_at_hand(keys) < len(keys):
            wait_s = self._reader.worth_waiting_s(keys)
            worth_s = until_s if wait_s is None else min(until_s, loop.time() + wait_s)
            await self._cache.warm(keys, deadline_s=max(0.0, worth_s - loop.time()))
        taken: list[ChunkKey] = []
        for key in keys:
            if not self._hold(key):
                break
            taken.append(key)
        if len(taken) < len(keys) and (self._reader.has_at_hand(keys[len(taken)]) or loop.time() >= until_s):
            self._let_go(taken)
            return None
        if taken:
            expiry = loop.call_later(_LONGEST_S, self.release, name)
            self._claims[name] = _Claim(taken, expiry)
        return len(taken)

    def release(self, name: str) -> None:
        """Release the chunks held under this name."""
        claim = self._claims.pop(name, None)
        if claim is not None:
            claim.expiry.cancel()
            self._let_go(claim.keys)

    def close(self) -> None:
        for name in list(self._claims):
            self.release(name)

    def _hold(self, key: ChunkKey) -> bool:
        lease = self.leases.get(key)
        if lease is None and (len(self.leases) >= self._most or not self._cache.cpu.spares(key)):
            return False
        if lease is None or not lease.findable:
            found = self._reader.pin(key)
            if found is None:
                return False
            if lease is not None:
                lease.release()  # the leased copy was removed, and the chunk is there again
            self.leases[key] = found
        self._times[key] = self._times.get(key, 0) + 1
        return True

    def _let_go(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._times[key] -= 1
            if not self._times[key]:
                del self._times[key]
                self.leases.pop(key).release()


class AnnouncedPrompts:
    """The connector's `Naming`. `names` is the worker's copy, which follows the resets of the scheduler's names."""

    def __init__(self, names: BlockNames, geometry: BlockGeometry) -> None:
        self.names = names
        self._geometry = geometry

    async def keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        """Return keys in a request's order: full chunks that are present, the longest tail after them, then missing ones."""
        if (given := given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        _, found = await locate(cache, names, self._geometry)
        known = set(found)
        full = self._geometry.whole_chunks(len(names))
        wanted = keys_of(cache.namespace, held_names(names, full, self._geometry), self._geometry)
        return [*found, *(key for key in wanted if key not in known)]

    async def all_keys(self, cache: ServedCache, prefix: Prefix) -> list[ChunkKey]:
        if (given := given_keys(prefix)) is not None:
            return given
        names = await self._names(prefix)
        return keys_of(cache.namespace, all_names(names, self._geometry), self._geometry)

    async def _names(self, prefix: Prefix) -> list[bytes]:
        lora = (prefix.lora.name, prefix.lora.path) if prefix.lora is not None else None
        return await self.names.of_tokens(prefix.tokens or (), prefix.cache_salt, lora)
