"""Warm start (`preload: recent`): the chunks that are hot at a close are promoted after the next open.

A list of their keys lies beside the capacity counter of a tier on files, one list for each rank, layout and salt. The last
cache to close replaces it, and `kill -9` leaves the old one. It is advice: a key that no tier has any more is a miss, and
a list that cannot be read is ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from tiercache.core.keys import TAGGED_KEY_BYTES, ChunkKey, check_keys
from tiercache.core.prefetch import MAX_REQUEST_KEYS, PrefetchRequest
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.scheduler.prefetcher import Prefetcher
from tiercache.tiers.base import Tier
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.files.access import open_file
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import read_small
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.shared_memory import SharedMemoryTier

logger = logging.getLogger("tiercache.prefetch")

T = TypeVar("T")
_LONGEST_BYTES = MAX_REQUEST_KEYS * (2 * TAGGED_KEY_BYTES + 1)


class WarmStart:
    """The list in the first directory of a tier: read once, after the open, and written at the close."""

    def __init__(self, tiers: Sequence[Tier], namespace: bytes, rank: int, cpu: CpuTier, ahead: Prefetcher) -> None:
        """`tiers` changes when one is replaced. `namespace` is the seed of the keys. The name of the list has only a hash
        of it, since it is worth as much as the salt in it. Raises ConfigError if no tier can keep the list.
        """
        digest = hashlib.blake2b(namespace, digest_size=16, person=b"tiercache-recent")
        self._name = f"recent-{digest.hexdigest()}.{rank}"
        self._tiers = tiers
        self._cpu = cpu
        self._ahead = ahead
        self._request: PrefetchRequest | None = None
        self._keeper()
        self._loading = asyncio.create_task(self._load(), name="tiercache-warm-start")

    async def close(self) -> None:
        """Write the list, unless the last one has not been read yet. What it had and was not promoted yet stays in it."""
        if not self._loading.done():
            self._loading.cancel()
            return
        keys = self._cpu.hottest(MAX_REQUEST_KEYS)
        if self._request is not None:
            keys += self._request.keys[self._request.cursor - self._request.progress.in_flight :]
        try:
            await self._in_directory(_write, keys[:MAX_REQUEST_KEYS])
        except (OSError, TierUnavailable) as error:
            logger.warning("the list of hot chunks cannot be written: %s", error)

    async def _load(self) -> None:
        try:
            keys = await self._in_directory(_read)
        except (OSError, TierUnavailable, ValueError) as error:
            logger.warning("the list of hot chunks is ignored: .tiercache/%s: %s", self._name, error)
            return
        if keys:
            logger.info("promoting up to %d chunks that were hot at the last close", len(keys))
            self._request = self._ahead.preload(keys)

    async def _in_directory(self, work: Callable[..., T], *arguments: object) -> T:
        """Call `work(files, name, *arguments)` in a thread."""
        keeper = self._keeper()
        if not keeper.directories.is_open:
            raise TierUnavailable(f"{keeper.name} is not open")
        files = keeper.directories.all[0].files
        return await keeper.directories.metadata.submit(work, files, self._name, *arguments)

    def _keeper(self) -> FileTier:
        """Return the tier that keeps the list: the first on files, preferably not in memory."""
        found = [tier for tier in self._tiers if isinstance(tier, FileTier) and tier.writes]
        if not found:
            raise ConfigError("preload: recent needs a tier on files that this process writes to, such as local_disk")
        return min(found, key=lambda tier: isinstance(tier, SharedMemoryTier))


def _write(files: ChunkFiles, name: str, keys: list[ChunkKey]) -> None:
    """Replace the list. Two caches that write at once leave one of their lists, or one that is ignored."""
    path = files.root / ".tiercache" / name
    temporary = f"{path}.new"
    descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(descriptor, "".join(f"{key.hex()}\n" for key in keys).encode())
    finally:
        os.close(descriptor)
    files.access.grant(temporary)
    os.replace(temporary, path)


def _read(files: ChunkFiles, name: str) -> list[ChunkKey]:
    """Return the keys of the list, none if it is missing. Raises OSError, and ValueError if it is damaged."""
    content = read_small(files.root / ".tiercache" / name, _LONGEST_BYTES + 1) or b""
    *lines, rest = content.decode("ascii").split("\n")
    if rest:
        raise ValueError(f"expected at most {MAX_REQUEST_KEYS} lines with a key each")
    keys = [bytes.fromhex(line) for line in lines]
    check_keys(keys)
    return keys
