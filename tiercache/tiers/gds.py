"""The GDS tier: the disk tier, with chunks moved to and from device memory."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.device.device import Device
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.io_gds import DeviceFiles
from tiercache.tiers.files.io_posix import DeviceIO
from tiercache.tiers.files.tier import FileTier


@dataclass(frozen=True)
class GdsSettings(FileSettings):
    """Settings of the GDS tier. With a device, `chunk_bytes` is required."""

    way: str = "auto"
    """auto, cufile or posix.

    auto uses cuFile if it works, cufile raises ConfigError if it does not, and posix reads and writes through pinned
    memory."""


class GdsTier(FileTier):
    def __init__(
        self,
        settings: GdsSettings,
        fingerprint: bytes,
        device: Device | None = None,
        files: DeviceFiles | None = None,
    ) -> None:
        """`files` skips the search for the best way."""
        super().__init__(
            "gds",
            "gds_path",
            settings,
            fingerprint,
            lambda directories: DeviceIO(directories, device, settings.way, files),
        )
