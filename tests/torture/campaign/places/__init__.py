"""Where the workers of a round store their chunks, and what can happen to it."""

from __future__ import annotations

from pathlib import Path

from tests.torture.campaign.places.base import Place, Skipped
from tests.torture.campaign.places.directory import CROWDED_CAP_BYTES, ROOMY_CAP_BYTES, DirectoryPlace
from tests.torture.campaign.places.hf3fs import Hf3fsPlace
from tests.torture.campaign.places.redis import RedisPlace
from tests.torture.campaign.places.small_device import SmallDevicePlace

__all__ = ["Place", "Skipped", "make_place"]


def make_place(name: str, directory: Path) -> Place:
    """Not open yet. `name` is one of `plan.PLACES`, `directory` is its own."""
    kind, _, roomy = name.partition("-")
    if kind in ("disk", "fs"):
        return DirectoryPlace(name, directory, kind, ROOMY_CAP_BYTES if roomy else CROWDED_CAP_BYTES, keeps=bool(roomy))
    if kind == "full":
        return SmallDevicePlace(name, directory)
    return {"redis": RedisPlace, "hf3fs": Hf3fsPlace}[kind](name, directory)
