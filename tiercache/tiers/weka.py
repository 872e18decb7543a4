"""The Weka tier: a directory on a mount that many instances share, on WekaFS or another parallel file system.

It has the disk tier's files and rules, for a mount where a round trip is expensive and others constantly add and remove
chunks: lookups are answered from memory, which a background task keeps fresh; bytes are counted in large steps; a chunk
costs one write and one rename, and no further write.
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
    """Temporary files beside chunks would change a directory twice per chunk, and changed directories are listed."""
    refresh_s: float = 1.0
    """Seconds between updates of the index from other instances' changes, if the mount is fast enough."""


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
