"""A disk tier that takes a cap for twice as much as it is."""

from pathlib import Path

from tiercache.testing.campaign.worker import run
from tiercache.tiers.files.shelves import Shelves
from tiercache.tiers.files.volume import Volume

__all__ = ["run"]

_make_volume = Shelves.make_volume


def make_volume(self: Shelves, directory: Path, cap_bytes: int) -> Volume:
    return _make_volume(self, directory, 2 * cap_bytes)


Shelves.make_volume = make_volume  # type: ignore[method-assign]
