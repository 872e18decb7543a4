"""A worker that keeps a file open, and half a MiB, for each chunk that it forgets."""

from tiercache.core.keys import ChunkKey
from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier

__all__ = ["run"]

_remove = DiskTier.remove
_kept: list[object] = []


async def remove(self: DiskTier, key: ChunkKey) -> bool:
    _kept.append((open("/dev/null"), bytes(1 << 19).replace(b"\0", b"x")))  # noqa: SIM115
    return await _remove(self, key)


DiskTier.remove = remove  # type: ignore[method-assign]
