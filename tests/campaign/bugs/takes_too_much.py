"""A disk tier that takes a cap for twice as much as it is."""

from tests.torture.campaign.worker import run
from tiercache.tiers.files.chunk_files import ChunkFiles

__all__ = ["run"]

_limit = ChunkFiles.limit


def limit(self: ChunkFiles, cap_bytes: int, step_bytes: int) -> None:
    _limit(self, 2 * cap_bytes, step_bytes)


ChunkFiles.limit = limit  # type: ignore[method-assign]
