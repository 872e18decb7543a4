"""The Weka tier: a directory on WekaFS or another mount that many hosts share.

It stores the files of the disk tier. A round trip is expensive there, and other instances add and remove chunks all the
time. So lookups are answered from memory, which a background task refreshes, and a chunk costs one write and one rename.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.device.device import Device
from tiercache.tiers.files.index import RelistingLookup
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.gds import DeviceIO, GdsSettings

METADATA_THREADS = 8


@dataclass(frozen=True)
class WekaSettings(GdsSettings):
    threads: int = 16
    direct: bool | None = True
    many_hosts: bool = True
    beside: bool = False
    """Temporary files beside the chunks would change each listed directory twice per chunk."""
    refresh_s: float = 1.0
    """Interval between two refreshes of the index without a miss in between, in seconds."""


class WekaTier(FileTier):
    def __init__(self, settings: WekaSettings, fingerprint: bytes, device: Device | None = None) -> None:
        super().__init__(
            "weka",
            "weka_path",
            settings,
            fingerprint,
            lambda directories: DeviceIO(directories, device, settings.way),
            lambda directories: RelistingLookup(directories, settings.refresh_s),
            metadata_threads=METADATA_THREADS,
        )
