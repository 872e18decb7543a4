"""A disk tier that takes a cap for twice as much as it is."""

from pathlib import Path

from tests.torture.campaign.worker import run
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import Directories

__all__ = ["run"]

_make_files = Directories.make_files


def make_files(self: Directories, directory: Path, cap_bytes: int) -> ChunkFiles:
    return _make_files(self, directory, 2 * cap_bytes)


Directories.make_files = make_files  # type: ignore[method-assign]
