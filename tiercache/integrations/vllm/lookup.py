"""How the scheduler's half asks what the workers' caches have, without ever waiting.

In one process the question goes to the worker's loop directly; otherwise through a Unix socket for each worker. The answer
for several workers is what all of them have.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.control.framing import frame, receive
from tiercache.control.messages import ControlError
from tiercache.control.served import ServedCache
from tiercache.control.sockets import bound, check_private, connect
from tiercache.core.keys import ChunkKey, keys_from_hashes
from tiercache.errors import TierCacheError
from tiercache.integrations.vllm.claims import Claims
from tiercache.integrations.vllm.grouped import HitSearch, names_of, needed_chunks
from tiercache.integrations.vllm.planning import BlockGeometry, Match, agreed, chunk_ends, tail_lengths
from tiercache.tiers.leases import Lease

logger = logging.getLogger("tiercache.vllm")

_LARGEST_MESSAGE_BYTES = 64 << 20

_PART_FOR_PROMOTING = 0.8
"""Of the time that the scheduler's half waits for an answer."""
_MOST_QUESTIONS = 256
"""For one hit of several groups, of which a recurrent state may be stored in few places. Each is answered from memory, but
where a shared tier has to be asked."""

_local: dict[tuple[str, int], LookupServer] = {}
"""Those of workers that live in this process, by engine and rank."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Of its connection, where answers come in any order."""
    names: list[bytes]
    claim: str = ""


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
    keys = keys_from_hashes(cache.namespace, [names[end - 1] for end in ends])
    hit = await cache.lookup_keys(keys)
    match = Match(hit.chunks * geometry.blocks_per_chunk)
    tokens = {name: count * geometry.chunk_tokens for name, count in hit.by_tier.items()}
    found = list(keys[: hit.chunks])
    for length in tail_lengths(len(names), match.blocks, geometry):
        (key,) = keys_from_hashes(cache.namespace, [names[match.blocks + length - 1]])
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
        hit = await cache.lookup_keys(keys_from_hashes(cache.namespace, names_of(search.question, names, geometry)))
        by_tier = by_tier or hit.by_tier
        search.answer(hit.chunks)
    needed = needed_chunks(search.chunks, geometry)
    # By where the chunks lie that were asked for first: those of the layers that see every token.
    tokens = {tier: count * geometry.chunk_tokens for tier, count in (by_tier or {}).items()}
    match = Match(tokens_by_tier=tokens).shortened(search.chunks * geometry.blocks_per_chunk, geometry)
    return match, keys_from_hashes(cache.namespace, names_of(needed, names, geometry))


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
        _local[self._key] = self
        cache = thread.cache
        direct = into_device and any(tier.serves_device for tier in cache.tiers)
        # Of several groups all has to come to the hot cache for that.
        useful = not direct if geometry.groups else not cache.config.enable_async_loading
        self.claims = Claims(cache, geometry) if useful and cache.cpu.keep else None
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
        _local.pop(self._key, None)
        with contextlib.suppress(Exception):
            self.thread.submit(self._stop()).result(5)
        self._path.unlink(missing_ok=True)

    async def _start(self) -> asyncio.Server:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        check_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._serve, sock=bound(self._path))

    async def _stop(self) -> None:
        self._server.close()
        if self.claims is not None:
            self.claims.close()
        for writer in self._connections.values():
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=2.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering: set[asyncio.Task[None]] = set()
        serving = asyncio.current_task()
        assert serving is not None
        self._connections[serving] = writer
        try:
            while True:
                packed = await receive(reader, _LARGEST_MESSAGE_BYTES)
                task = asyncio.create_task(self._answer(writer, msgspec.msgpack.decode(packed, type=Question)))
                answering.add(task)
                task.add_done_callback(answering.discard)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, ControlError):
            pass  # the scheduler's process ended, or somebody else spoke
        finally:
            for task in answering:
                task.cancel()
            writer.close()
            del self._connections[serving]

    async def _answer(self, writer: asyncio.StreamWriter, question: Question) -> None:
        try:
            match = await self.find(question.names, question.claim)
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
            match = Match()
        with contextlib.suppress(ConnectionError):
            writer.write(frame(Answer(question.number, match.blocks, match.tokens_by_tier, match.held)))
            await writer.drain()


class LookupClient:
    """Begins look-ups for the scheduler; each answer is a future that the caller polls."""

    def __init__(self, engine: str, ranks: int, geometry: BlockGeometry, timeout_s: float) -> None:
        self._engine = engine
        self._ranks = ranks
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[int, _Connection] = {}

    def begin(self, names: Sequence[bytes], claim: str = "") -> concurrent.futures.Future[Match]:
        """Never waits. The future ends with a Match, an empty one where a worker did not answer in time. What is found may
        be held for the request, until `LookupServer.release`."""
        if self._ranks == 1 and (local := _local.get((self._engine, 0))) is not None:
            return local.thread.submit(local.find(names, claim))
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="tiercache-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # Not kept: whatever is given to a loop that nobody runs would never end.
                loop.close()
                logger.warning("a look-up counts as a miss: %s", error)
                missed: concurrent.futures.Future[Match] = concurrent.futures.Future()
                missed.set_result(Match(failed=True))
                return missed
            self._loop, self._thread = loop, thread
        return asyncio.run_coroutine_threadsafe(self._ask_all(list(names), claim), self._loop)

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._hang_up)
            self._thread.join(5.0)
            self._loop.close()
            self._loop = self._thread = None

    def _hang_up(self) -> None:
        assert self._loop is not None
        for connection in self._connections.values():
            connection.close()
        # One round later the transports are closed.
        self._loop.call_soon(self._loop.stop)

    async def _ask_all(self, names: list[bytes], claim: str) -> Match:
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    answers = await asyncio.gather(*(self._ask(rank, names, claim) for rank in range(self._ranks)))
                    least = min(answers, key=lambda match: match.blocks)
                    if not self._geometry.groups or all(match.blocks == least.blocks for match in answers):
                        return agreed(answers, self._geometry)
                    # Windows have to be there for the hit as it is: who has more may not have that.
                    names = names[: least.blocks]
        except (TimeoutError, OSError, TierCacheError) as error:
            logger.warning("a look-up got no answer from the workers: %r", error)
            return Match(failed=True)

    async def _ask(self, rank: int, names: list[bytes], claim: str) -> Match:
        connection = self._connections.get(rank)
        if connection is None or connection.broken:
            connection = self._connections[rank] = _Connection(socket_path(self._engine, rank))
        return await connection.ask(names, claim)


class _Connection:
    """To one worker; answers may come in any order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Match]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self.broken = False

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    async def ask(self, names: list[bytes], claim: str) -> Match:
        async with self._connecting:
            if self._writer is None:
                try:
                    check_private(self._path.parent)
                    reader, self._writer = await connect(self._path)
                except (OSError, TierCacheError):
                    self.broken = True
                    raise
                self._reading = asyncio.create_task(self._read(reader))
        number = next(self._numbers)
        answer: asyncio.Future[Match] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(frame(Question(number, names, claim)))
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                packed = await receive(reader, _LARGEST_MESSAGE_BYTES)
                found = msgspec.msgpack.decode(packed, type=Answer)
                if (answer := self._waiting.get(found.number)) is not None and not answer.done():
                    answer.set_result(Match(found.blocks, found.tokens_by_tier, held=found.held))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, ControlError) as error:
            self.broken = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError(f"the worker's look-up socket closed: {error!r}"))


def socket_path(engine: str, rank: int) -> Path:
    """Short whatever the engine is called: a Unix socket's path may have 107 characters."""
    name = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}" / f"{name}.{rank}.sock"
