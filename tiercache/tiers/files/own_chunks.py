"""Find the chunks of a tier's own layout by their headers."""

from __future__ import annotations

import os

from tiercache.core.header import PACKED_BYTES, Header, HeaderError
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.access import ABSENT, NotAFile, open_regular, opened_directory
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import CHUNK_NAME, TOP_LEVELS
from tiercache.tiers.files.tier import FileTier


async def own_keys(tier: FileTier) -> set[ChunkKey]:
    """Return the existing chunks of the tier's layout, stored by any process. Reads every header. Raises OSError.

    The caller sets a deadline. After cancellation one subdirectory is still read in its thread.
    """
    found: set[ChunkKey] = set()
    for directory in tier.directories.all:
        for top in range(len(TOP_LEVELS)):
            found |= await tier.directories.metadata.submit(_own_in, directory.files, top)
    return found


def _own_in(files: ChunkFiles, top: int) -> set[ChunkKey]:
    try:
        with opened_directory(files.root / TOP_LEVELS[top], to_list=True) as directory:
            names = os.listdir(directory)
    except ABSENT:
        return set()
    keys = map(bytes.fromhex, filter(CHUNK_NAME.fullmatch, names))
    return {key for key in keys if _is_own(files, key)}


def _is_own(files: ChunkFiles, key: ChunkKey) -> bool:
    try:
        with os.fdopen(open_regular(files.path(key), os.O_RDONLY), "rb", buffering=0) as file:
            return Header.unpack(file.read(PACKED_BYTES)).fingerprint == files.fingerprint
    except (FileNotFoundError, NotAFile, HeaderError):
        return False  # missing, foreign or damaged
