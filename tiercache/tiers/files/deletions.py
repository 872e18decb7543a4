"""What others delete in a directory leaves the index as soon as the kernel tells of it, not when somebody asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Container, Sequence

from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.inotify import (
    CREATED,
    DELETED,
    IGNORED,
    MOVED_FROM,
    MOVED_SELF,
    MOVED_TO,
    OVERFLOW,
    Inotify,
)
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.shelves import Shelves
from tiercache.tiers.files.survey import CHUNK_NAME, TOP_LEVELS
from tiercache.tiers.files.volume import Volume

logger = logging.getLogger("tiercache.disk")

_ROOT = CREATED | MOVED_TO | MOVED_SELF
"""A subdirectory is made when its first chunk comes."""
_CHUNKS = DELETED | MOVED_FROM
_PAUSE_S = 1.0
_AT_ONCE = 1024


class Deletions:
    """Of one shelf. Belongs to the event loop; `follow` is a task of its own.

    A file that was deleted may have been stored again since, so each key is looked for before it leaves the index. What
    other hosts delete on a mount that they share is not told.
    """

    def __init__(self, shelves: Shelves, shelf: Shelf, on_stored: Callable[[ChunkKey], None] | None = None) -> None:
        """`on_stored`: as for `Knowledge.follow_deletions`."""
        self._shelves = shelves
        self._shelf = shelf
        self._on_stored = on_stored
        self._mask = _CHUNKS if on_stored is None else _CHUNKS | MOVED_TO
        self._gone: dict[ChunkKey, None] = {}
        self._new: set[str] = set()
        """Subdirectories that came since the others are watched."""
        self._is_short = True
        """Some directory may not be watched, or something was not told."""
        self._is_elsewhere = False
        """The kernel watches directories, not paths: what is watched has another one now."""
        self._news = asyncio.Event()
        shelf.on_other_volume = self._begin_elsewhere

    async def follow(self) -> None:
        """Until cancelled. Ends, with a warning, where the kernel has no watches left."""
        try:
            while True:
                await self._follow_here(Inotify())
        except OSError as error:
            self._give_up(error)

    async def _follow_here(self, inotify: Inotify) -> None:
        """Until what has the path is another directory. Raises OSError."""
        loop = asyncio.get_running_loop()
        loop.add_reader(inotify.fileno(), self._note, inotify)
        self._is_short, self._is_elsewhere = True, False
        try:
            while not self._is_elsewhere:
                self._news.clear()
                try:
                    await self._catch_up(inotify)
                except TierUnavailable:  # no thread could be started
                    self._is_short = True
                if self._is_short:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    await self._news.wait()
        finally:
            loop.remove_reader(inotify.fileno())
            self._shelves.metadata.later(inotify.close)  # a thread that hangs may be using it

    def _begin_elsewhere(self) -> None:
        self._is_elsewhere = True
        self._news.set()

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "%s: what others delete there is noticed only when it is asked for: %s (fs.inotify.max_user_instances, "
            "fs.inotify.max_user_watches: 257 a directory)", self._shelf.volume.root, error,
        )  # fmt: skip

    def _note(self, inotify: Inotify) -> None:
        for happening in inotify.happened():
            if happening.mask & MOVED_SELF:
                self._begin_elsewhere()
            elif happening.mask & (OVERFLOW | IGNORED):
                self._is_short = True
            elif happening.mask & _CHUNKS and CHUNK_NAME.fullmatch(happening.name):
                key = bytes.fromhex(happening.name)
                if key in self._shelf.index or self._shelf.is_looked_for(key):
                    self._gone[key] = None
            elif self._on_stored is not None and happening.mask & MOVED_TO and CHUNK_NAME.fullmatch(happening.name):
                self._on_stored(bytes.fromhex(happening.name))
            elif happening.mask & _ROOT and happening.name in _NUMBERS:
                self._new.add(happening.name)
        if self._gone or self._new or self._is_short:
            self._news.set()

    async def _catch_up(self, inotify: Inotify) -> None:
        if self._is_short or self._new:
            came = self._new if self._on_stored is not None else set()
            new = TOP_LEVELS if self._is_short else list(self._new)
            self._is_short, self._new = False, set()
            try:
                found = await self._shelves.metadata.submit(_watch, inotify, self._shelf.volume, new, self._mask, came)
                if self._on_stored is not None:
                    for key in found:
                        self._on_stored(key)
            except FileNotFoundError:
                self._is_short = True  # the directory was deleted; a write makes it anew
            await self._look_through({_NUMBERS[name] for name in new})
        while self._gone:
            await self._look_for([self._gone.popitem()[0] for _ in range(min(len(self._gone), _AT_ONCE))])

    async def _look_through(self, numbers: set[int]) -> None:
        """Look for all chunks known in these subdirectories, a slice in each turn of the loop."""
        for number in sorted(numbers):
            known = self._shelf.index.keys.part(number)
            for start in range(0, len(known), _AT_ONCE):
                keys = [key for key in known[start : start + _AT_ONCE] if key in self._shelf.index]
                if keys:
                    await self._look_for(keys)
            await asyncio.sleep(0)

    async def _look_for(self, keys: list[ChunkKey]) -> None:
        shelf, volume, index = self._shelf, self._shelf.volume, self._shelf.index
        began = {key: shelf.look_for(key) for key in keys}
        try:
            missing = await self._shelves.metadata.submit(_missing, volume, keys)
        except BaseException:
            self._gone.update(dict.fromkeys(keys))
            raise
        finally:
            latest = {key for key, since in began.items() if shelf.looked(key, since)}
        # Also what is there again: it is another file.
        self._shelves.deleted(keys)
        if shelf.index is index:
            for key in missing:
                if key in latest:
                    index.remove(key)
                elif key in index:
                    self._gone[key] = None  # somebody stored or found it meanwhile: it has to be looked for again


_NUMBERS = {name: number for number, name in enumerate(TOP_LEVELS)}


def _watch(inotify: Inotify, volume: Volume, names: Sequence[str], mask: int, came: Container[str]) -> list[ChunkKey]:
    """The root, and of these subdirectories those that are there. For a worker thread. Raises FileNotFoundError without a
    root.

    Returns what lies in those that just `came`: it may have been stored before they were watched.
    """
    inotify.watch(volume.root, _ROOT)
    found = []
    for name in names:
        with contextlib.suppress(*ABSENT):
            inotify.watch(volume.root / name, mask)
            if name in came:
                chunks = filter(CHUNK_NAME.fullmatch, os.listdir(volume.root / name))
                found += [bytes.fromhex(chunk) for chunk in chunks]
    return found


def _missing(volume: Volume, keys: list[ChunkKey]) -> list[ChunkKey]:
    """Which are not there. For a worker thread."""
    found = []
    for key in keys:
        try:
            os.lstat(volume.path(key))
        except ABSENT:
            found.append(key)
        except OSError as error:  # it cannot be said
            logger.debug("%s: %s", volume.root, error)
    return found
