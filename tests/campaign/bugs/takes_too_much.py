"""A disk tier that takes a cap for twice as much as it is."""

from pathlib import Path

from tiercache.testing.campaign.worker import run
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.volume import Volume

__all__ = ["run"]

_make_volume = DiskTier._make_volume


def make_volume(self: DiskTier, directory: Path, cap_bytes: int) -> Volume:
    return _make_volume(self, directory, 2 * cap_bytes)


DiskTier._make_volume = make_volume  # type: ignore[method-assign]
