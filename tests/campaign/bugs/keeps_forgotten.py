"""A disk tier that forgets nothing."""

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]


async def remove(self: FileTier, key: ChunkKey) -> bool:
    return True


FileTier.remove = remove  # type: ignore[method-assign]
