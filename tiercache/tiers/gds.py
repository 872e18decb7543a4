"""The GDS tier: the disk tier, which also reads and writes device memory."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.device.device import Device
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.io_gds import DeviceFiles
from tiercache.tiers.files.io_posix import DeviceIO
from tiercache.tiers.files.tier import FileTier


@dataclass(frozen=True)
class GdsSettings(FileSettings):
    """Settings of the GDS tier. `chunk_bytes` is required with a device."""

    way: str = "auto"
    """auto: cuFile if it works, else posix. cufile: cuFile or ConfigError. posix: through pinned host memory."""


class GdsTier(FileTier):
    def __init__(
        self,
        settings: GdsSettings,
        fingerprint: bytes,
        device: Device | None = None,
        files: DeviceFiles | None = None,
    ) -> None:
        """`files` moves device memory in place of what `way` selects."""
        super().__init__(
            "gds",
            "gds_path",
            settings,
            fingerprint,
            lambda directories: DeviceIO(directories, device, settings.way, files),
        )
