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
import stat
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiercache.bridge import CacheThread
from tiercache.cache import TierCache
from tiercache.control.served import ServedCache
from tiercache.core.keys import ChunkKey, keys_from_hashes
from tiercache.errors import TierCacheError
from tiercache.integrations.vllm.planning import Geometry, Match, chunk_ends, tail_lengths
from tiercache.tiers.base import DeviceTier

logger = logging.getLogger("tiercache.vllm")

_LENGTH_BYTES = 4
_LARGEST_MESSAGE_BYTES = 64 << 20

_local: dict[tuple[str, int], LookupServer] = {}
"""Those of workers that live in this process, by engine and rank."""


async def find(cache: TierCache, names: Sequence[bytes], geometry: Geometry, *, into_device: bool = False) -> Match:
    """`locate`, for a request that is here.

    Starts prefetching what is not hot and keeps what is, so that reading overlaps with the request's wait in the engine's
    queue; but for what a tier reads into the device by itself, if that is where it will be wanted (`into_device`).
    """
    match, found = await locate(cache, names, geometry)
    direct = [tier for tier in cache.tiers if into_device and isinstance(tier, DeviceTier) and tier.serves_device]
    cache.warm_soon([key for key in found if not any(tier.contains(key) for tier in direct)])
    return match


async def locate(cache: ServedCache, names: Sequence[bytes], geometry: Geometry) -> tuple[Match, list[ChunkKey]]:
    """How many blocks of a request the cache has, and in which chunks: full ones, then the longest tail. `names` has one
    name a block.
    """
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


class LookupServer:
    """Answers look-ups from another process. Lives on the worker's cache thread."""

    def __init__(
        self, engine: str, rank: int, thread: CacheThread, geometry: Geometry, *, into_device: bool = False
    ) -> None:
        self.thread = thread
        self._into_device = into_device
        self._path = socket_path(engine, rank)
        self._geometry = geometry
        self._key = (engine, rank)
        self._lines: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        _local[self._key] = self
        self._server = thread.submit(self._start()).result(10)

    async def find(self, names: Sequence[bytes]) -> Match:
        return await find(self.thread.cache, names, self._geometry, into_device=self._into_device)

    def close(self) -> None:
        _local.pop(self._key, None)
        with contextlib.suppress(Exception):
            self.thread.submit(self._stop()).result(5)
        self._path.unlink(missing_ok=True)

    async def _start(self) -> asyncio.Server:
        directory = self._path.parent
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise TierCacheError(
                f"{directory}: expected a directory of this user with mode 0700 for look-up sockets; remove what is there"
            )
        self._path.unlink(missing_ok=True)
        return await asyncio.start_unix_server(self._serve, str(self._path))

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._lines.values():
            writer.close()
        if self._lines:
            await asyncio.wait(list(self._lines), timeout=2.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering: set[asyncio.Task[None]] = set()
        line = asyncio.current_task()
        assert line is not None
        self._lines[line] = writer
        try:
            while True:
                number, names = await _receive(reader)
                task = asyncio.create_task(self._answer(writer, number, names))
                answering.add(task)
                task.add_done_callback(answering.discard)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError, ValueError):
            pass  # the scheduler's process ended, or somebody else spoke
        finally:
            for task in answering:
                task.cancel()
            writer.close()
            del self._lines[line]

    async def _answer(self, writer: asyncio.StreamWriter, number: int, names: list[bytes]) -> None:
        try:
            match = await self.find(names)
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
            match = Match()
        with contextlib.suppress(ConnectionError):
            _send(writer, [number, match.blocks, match.tokens_by_tier])
            await writer.drain()


class LookupClient:
    """Begins look-ups for the scheduler; each answer is a future that the caller polls."""

    def __init__(self, engine: str, ranks: int, geometry: Geometry, timeout_s: float) -> None:
        self._engine = engine
        self._ranks = ranks
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lines: dict[int, _Line] = {}

    def begin(self, names: Sequence[bytes]) -> concurrent.futures.Future[Match]:
        """Never waits. The future ends with a Match, an empty one where a worker did not answer in time."""
        if self._ranks == 1 and (local := _local.get((self._engine, 0))) is not None:
            return local.thread.submit(local.find(names))
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
                missed.set_result(Match())
                return missed
            self._loop, self._thread = loop, thread
        return asyncio.run_coroutine_threadsafe(self._ask_all(list(names)), self._loop)

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._hang_up)
            self._thread.join(5.0)
            self._loop.close()
            self._loop = self._thread = None

    def _hang_up(self) -> None:
        assert self._loop is not None
        for line in self._lines.values():
            line.close()
        # One round later the transports are closed.
        self._loop.call_soon(self._loop.stop)

    async def _ask_all(self, names: list[bytes]) -> Match:
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await asyncio.gather(*(self._ask(rank, names) for rank in range(self._ranks)))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            logger.warning("a look-up got no answer from the workers: %r", error)
            return Match()
        return min(answers, key=lambda match: match.blocks)

    async def _ask(self, rank: int, names: list[bytes]) -> Match:
        line = self._lines.get(rank)
        if line is None or line.broken:
            line = self._lines[rank] = _Line(socket_path(self._engine, rank))
        return await line.ask(names)


class _Line:
    """One connection to a worker; answers may come in any order."""

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

    async def ask(self, names: list[bytes]) -> Match:
        async with self._connecting:
            if self._writer is None:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(str(self._path))
                except OSError:
                    self.broken = True
                    raise
                self._reading = asyncio.create_task(self._read(reader))
        number = next(self._numbers)
        answer: asyncio.Future[Match] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            _send(self._writer, [number, names])
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, blocks, tokens = await _receive(reader)
                if (answer := self._waiting.get(number)) is not None and not answer.done():
                    answer.set_result(Match(blocks, tokens))
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            self.broken = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError(f"the worker's look-up socket closed: {error!r}"))


def socket_path(engine: str, rank: int) -> Path:
    """Short whatever the engine is called: a Unix socket's path may have 107 characters."""
    name = hashlib.blake2b(engine.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}" / f"{name}.{rank}.sock"


def _send(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    packed = msgspec.msgpack.encode(message)
    writer.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)


async def _receive(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > _LARGEST_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is not ours")
    return msgspec.msgpack.decode(await reader.readexactly(length))
