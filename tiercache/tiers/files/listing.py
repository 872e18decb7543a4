"""Keeping an index fresh while others add and remove chunks: list the subdirectories that changed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from tiercache.core.header import file_bytes
from tiercache.core.keys import ChunkKey
from tiercache.core.sharing import Freshness, SharedIndex, pause_s
from tiercache.errors import TierUnavailable
from tiercache.memory.workers import Workers, retrieve_exception
from tiercache.tiers.files.access import ABSENT, occupied_bytes, opened_directory, require_directory
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.survey import CHUNK_NAME, TOP_LEVELS, has_our_header
from tiercache.tiers.files.volume import Volume

logger = logging.getLogger("tiercache.weka")

T = TypeVar("T")

_SETTLE_S = 1.0
_STEP = 2048
"""Entries that are taken up at a time, so that the loop is never busy with it for long."""
_HURRY = 10
"""With a hint the next refresh may come so many times sooner."""
_PATIENCE_S = 30.0


def pauses_s(refresh_s: float, calls_s: Sequence[float]) -> tuple[float, float]:
    """How long to wait after a refresh whose calls took so long: in any case, and then for a hint."""
    least_s = max(refresh_s / _HURRY, pause_s(calls_s))
    return least_s, max(0.0, refresh_s - least_s)


class Refresher:
    """Keeps a shelf's index and its counter fresh. All methods belong to the event loop; `run` is a task of its own.

    The shelf's index is a SharedIndex. `ignored` are keys that are not taken up when they are found.
    """

    def __init__(
        self,
        shelf: Shelf,
        workers: Workers,
        refresh_s: float,
        ignored: Container[ChunkKey],
        on_gone: Callable[[list[ChunkKey]], None],
        on_refresh: Callable[[], None],
    ) -> None:
        self.shelf = shelf
        self.refresh_s = refresh_s
        self.listings = 0
        """Of one subdirectory each."""
        self._workers = workers
        self._ignored = ignored
        self._on_gone = on_gone
        self._on_refresh = on_refresh
        self._index: object = None
        self._freshness = Freshness(_SETTLE_S)
        self._hint = asyncio.Event()
        self._calls_s: list[float] = []
        """What each call of this refresh took."""
        self._begun = 0
        self._ended = 0
        self._end = asyncio.Event()

    def hint(self) -> None:
        """Somebody missed a chunk that may be new."""
        self._hint.set()

    async def refreshed(self) -> None:
        """Wait for a refresh that begins after this call."""
        wanted = self._begun + 1
        self.hint()
        while self._ended < wanted:
            await self._end.wait()

    async def run(self) -> None:
        """Refresh again and again, until cancelled."""
        failing = False
        while True:
            self._hint.clear()
            self._begun += 1
            self._calls_s.clear()
            try:
                await self._refresh()
                self._on_refresh()
                failing = False
            except (OSError, TierUnavailable) as error:
                if not failing:
                    logger.warning("%s could not be listed: %s", self.shelf.volume.root, error)
                failing = True
                self._calls_s.clear()  # it has not looked through anything
            self._ended = self._begun
            self._end.set()
            self._end = asyncio.Event()
            least_s, more_s = pauses_s(self.refresh_s, self._calls_s)
            await asyncio.sleep(least_s)
            try:
                async with asyncio.timeout(more_s):
                    await self._hint.wait()
            except TimeoutError:
                pass

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        volume, index = self.shelf.volume, self.shelf.index
        assert isinstance(index, SharedIndex)
        if index is not self._index:
            # The directory was replaced, and with it all that we knew of it.
            self._index, self._freshness = index, Freshness(_SETTLE_S)
        await self._ask(volume, volume.capacity.refresh)
        times_ns = await self._ask(volume, directory_times_ns, volume)
        for directory in self._freshness.stale(times_ns, loop.time()):
            began_s = loop.time()
            with self.shelf.looking_around() as gone:
                await self._list(volume, index, directory, gone)
            if index is not self.shelf.index:
                return
            self._freshness.listed(directory, began_s)

    async def _list(self, volume: Volume, index: SharedIndex, directory: int, gone: Container[ChunkKey]) -> None:
        """Bring the index up to what lies in a subdirectory. What is `gone` may have been seen before."""
        before = index.group(directory)
        listed = await self._ask(volume, list_keys, volume, directory)
        self.listings += 1
        if index is not self.shelf.index:
            return
        if dropped := index.drop(before, listed):
            self._on_gone(dropped)
        unknown = [key for key in index.unknown(listed) if key not in self._ignored]
        for found in _steps(unknown):
            for key, size_bytes in await self._ask(volume, sizes, volume, found):
                if key not in index and key not in gone:
                    index.add(key, size_bytes)

    async def _ask(self, volume: Volume, call: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await answered(self._workers.submit(call, *arguments), str(volume.root))
        self._calls_s.append(loop.time() - began_s)
        return answer


def _steps(keys: Iterable[ChunkKey]) -> Iterable[list[ChunkKey]]:
    rest = iter(keys)
    while step := list(islice(rest, _STEP)):
        yield step


def directory_times_ns(volume: Volume) -> list[int]:
    """Modification time of each of the 256 subdirectories; 0 where there is none. For a worker thread."""
    times_ns = []
    root = str(volume.root)
    for top in TOP_LEVELS:
        try:
            times_ns.append(require_directory(f"{root}/{top}").st_mtime_ns)
        except ABSENT:
            times_ns.append(0)
    return times_ns


def list_keys(volume: Volume, directory: int) -> set[ChunkKey]:
    """The chunks in a subdirectory, by their names alone. For a worker thread."""
    try:
        with opened_directory(volume.root / TOP_LEVELS[directory], to_list=True) as opened:
            names = os.listdir(opened)
    except ABSENT:
        return set()
    return {bytes.fromhex(name) for name in names if CHUNK_NAME.fullmatch(name)}


def sizes(volume: Volume, keys: list[ChunkKey]) -> list[tuple[ChunkKey, int]]:
    """What each chunk occupies, without those that vanished or cannot be chunks. For a worker thread."""
    found = []
    for key in keys:
        path = volume.path(key)
        try:
            status = os.lstat(path)
        except ABSENT:
            continue
        fits = status.st_size >= file_bytes(1) and status.st_size % 4096 == 0
        if fits and (volume.surveyor.trusts(status) or has_our_header(path)):
            found.append((key, occupied_bytes(status)))
    return found


async def answered(work: asyncio.Future[T], what: str) -> T:
    """Wait for a call in the background, and say so when it takes long. Nobody's answer depends on it."""
    work.add_done_callback(retrieve_exception)  # also of a call that was left behind
    while not (await asyncio.wait([work], timeout=_PATIENCE_S))[0]:
        logger.warning("%s has not answered for %.0f s; what it holds is known only as it was", what, _PATIENCE_S)
    return work.result()
