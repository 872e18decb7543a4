"""Find the chunks of a tier's own layout by their headers."""

from __future__ import annotations

import os

from tiercache.core.header import PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.access import NotAFile, open_regular
from tiercache.tiers.files.directory import TOP_LEVELS
from tiercache.tiers.files.index import list_keys
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.files.volume import Volume


async def own_keys(tier: FileTier) -> set[ChunkKey]:
    """Return the existing chunks of the tier's layout, stored by any process. Reads every header. Raises OSError.

    The caller sets a deadline. After cancellation one subdirectory is still read in its thread.
    """
    found: set[ChunkKey] = set()
    for shelf in tier.shelves.all:
        for directory in range(len(TOP_LEVELS)):
            found |= await tier.shelves.metadata.submit(_own_in, shelf.volume, directory)
    return found


def _own_in(volume: Volume, directory: int) -> set[ChunkKey]:
    return {key for key in list_keys(volume, directory) if _is_own(volume, key)}


def _is_own(volume: Volume, key: ChunkKey) -> bool:
    try:
        with os.fdopen(open_regular(volume.path(key), os.O_RDONLY), "rb", buffering=0) as file:
            return Header.unpack(file.read(PACKED_BYTES)).fingerprint == volume.fingerprint
    except (FileNotFoundError, NotAFile, HeaderError):
        return False  # missing, foreign or damaged
