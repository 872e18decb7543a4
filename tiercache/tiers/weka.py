"""The Weka tier: one directory on a mount that many instances share, as WekaFS and other parallel file systems offer it.

The disk tier's files and rules, for a mount where a round trip is dear and others add and remove chunks all the time:
look-ups are answered from memory, which a background task keeps fresh; the count is charged in large steps; a chunk costs
one write and one rename, and nothing else is written for it, ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.device.device import Device
from tiercache.tiers.files.index import RelistingLookup
from tiercache.tiers.files.io_gds import DeviceFiles
from tiercache.tiers.files.io_posix import DeviceIO
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.gds import GdsSettings

METADATA_THREADS = 8


@dataclass(frozen=True)
class WekaSettings(GdsSettings):
    threads: int = 16
    direct: bool | None = True
    many_hosts: bool = True
    beside: bool = False
    """Directories that changed are listed, and each chunk would change one of them twice."""
    refresh_s: float = 1.0
    """The interval at which the index learns what other instances did, if the mount is fast enough."""


class WekaTier(FileTier):
    def __init__(
        self,
        settings: WekaSettings,
        fingerprint: bytes,
        device: Device | None = None,
        files: DeviceFiles | None = None,
    ) -> None:
        super().__init__(
            "weka",
            "weka_path",
            settings,
            fingerprint,
            lambda directories: DeviceIO(directories, device, settings.way, files),
            lambda directories: RelistingLookup(directories, settings.refresh_s),
            metadata_threads=METADATA_THREADS,
        )
