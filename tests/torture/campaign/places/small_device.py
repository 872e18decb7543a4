"""A device that fills up: a small file system, on which another program writes and deletes, too."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.torture.campaign.places.base import Skipped
from tests.torture.campaign.places.directory import DirectoryPlace

DEVICE_BYTES = 6 << 20
_CAP_BYTES = 64 << 20
"""More than the device has: the device is what is in the way."""
_STEP_BYTES = 64 << 10
_CALL_S = 10.0


class SmallDevicePlace(DirectoryPlace):
    is_calm = False

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory, "disk", _CAP_BYTES, keeps=False)
        self._mounted = False

    @property
    def device(self) -> Path:
        return self.directory / "device"

    @property
    def chunks(self) -> Path:
        return self.device / "chunks"

    def open(self) -> None:
        self.device.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "tmpfs", str(self.device)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skipped(f"a small file system cannot be mounted: {error}") from error
        if done.returncode:
            raise Skipped(f"a small file system cannot be mounted (root can): {done.stderr.strip()}")
        self._mounted = True
        super().open()

    def close(self) -> None:
        """Unmount the device, and keep its files beside it, to examine a failure."""
        if self._mounted:
            self._mounted = False
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(self.chunks, self.directory / "chunks-at-the-end", dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(self.device)], timeout=_CALL_S, check=True, capture_output=True)

    def strike(self, kind: str) -> bool:
        """Write as another program until the device is full."""
        with contextlib.suppress(OSError):
            for number in range(DEVICE_BYTES // _STEP_BYTES + 1):
                with open(self.device / f"others.{number}", "ab", buffering=0) as file:
                    file.write(os.urandom(4096) * (_STEP_BYTES // 4096))
        return False

    def heal(self) -> None:
        for path in self.device.glob("others.*"):
            path.unlink()
