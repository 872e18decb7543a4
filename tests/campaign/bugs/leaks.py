"""A worker that keeps a file open, and half a MiB, for each chunk that it forgets."""

from tests.torture.campaign.worker import run
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.tier import FileTier

__all__ = ["run"]

_remove = FileTier.remove
_kept: list[object] = []


async def remove(self: FileTier, key: ChunkKey) -> bool:
    _kept.append((open("/dev/null"), bytes(1 << 19).replace(b"\0", b"x")))  # noqa: SIM115
    return await _remove(self, key)


FileTier.remove = remove  # type: ignore[method-assign]
