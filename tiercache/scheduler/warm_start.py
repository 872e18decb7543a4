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
import re
from contextlib import suppress

from tiercache.core.keys import HEX_KEY, TAGGED_KEY_BYTES, ChunkKey
from tiercache.core.prefetch import MAX_REQUEST_KEYS, PrefetchRequest
from tiercache.errors import TierUnavailable
from tiercache.scheduler.prefetcher import Prefetcher
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import read_small, write_new
from tiercache.tiers.files.tier import FileTier

logger = logging.getLogger("tiercache.prefetch")

_LONGEST_BYTES = MAX_REQUEST_KEYS * (2 * TAGGED_KEY_BYTES + 1)
_KEYS = re.compile(rf"(?:{HEX_KEY}\n)*")


class WarmStart:
    """The list in the first directory of `tier`: read once, after the open, and written at the close."""

    def __init__(self, tier: FileTier, namespace: bytes, rank: int, cpu: CpuTier, ahead: Prefetcher) -> None:
        """`namespace` is the seed of the keys. The name of the list has only a hash of it, since it is worth as much as the
        salt in it.
        """
        digest = hashlib.blake2b(namespace, digest_size=16, person=b"tiercache-recent")
        self._name = f"recent-{digest.hexdigest()}.{rank}"
        self._tier = tier
        self._cpu = cpu
        self._ahead = ahead
        self._request: PrefetchRequest | None = None
        self._loading = asyncio.create_task(self._load(), name="tiercache-warm-start")

    async def close(self) -> None:
        """Write the list, unless the last one has not been read yet. What it had and was not promoted yet stays in it."""
        if not self._loading.done():
            self._loading.cancel()
            return
        keys = self._cpu.hottest(MAX_REQUEST_KEYS)
        if self._request is not None:
            keys += self._request.keys[self._request.cursor :]
        try:
            await self._tier.directories.metadata.submit(_write, self._files, self._name, keys[:MAX_REQUEST_KEYS])
        except (OSError, TierUnavailable) as error:
            logger.warning("the list of hot chunks cannot be written: %s", error)

    async def _load(self) -> None:
        try:
            keys = await self._tier.directories.metadata.submit(_read, self._files, self._name)
        except (OSError, TierUnavailable, ValueError) as error:
            logger.warning("the list of hot chunks is ignored: %s", error)
            return
        if keys:
            logger.info("promoting up to %d chunks that were hot at the last close", len(keys))
            self._request = self._ahead.preload(keys)

    @property
    def _files(self) -> ChunkFiles:
        if not self._tier.directories.is_open:
            raise TierUnavailable(f"{self._tier.name} is not open yet")
        return self._tier.directories.all[0].files


def _write(files: ChunkFiles, name: str, keys: list[ChunkKey]) -> None:
    """Replace the list. Two caches that write at once leave one of their lists, or one that is ignored."""
    path = f"{files.private}/{name}"
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # a process was killed
    write_new(temporary, "".join(f"{key.hex()}\n" for key in keys).encode())
    files.access.grant(temporary)
    os.replace(temporary, path)


def _read(files: ChunkFiles, name: str) -> list[ChunkKey]:
    """Return the keys of the list, none if it is missing. Raises OSError, and ValueError if it is damaged."""
    path = files.private / name
    content = (read_small(path, _LONGEST_BYTES + 1) or b"").decode("ascii", "replace")
    if len(content) > _LONGEST_BYTES or not _KEYS.fullmatch(content):
        raise ValueError(f"{path}: expected at most {MAX_REQUEST_KEYS} lines with a key each")
    return [bytes.fromhex(line) for line in content.splitlines()]
