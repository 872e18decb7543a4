"""A FUSE mount that hangs, dies and comes back: the emulator of 3FS, with rings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chunks import chunks_of
from tests.hf3fs_emulator import Hf3fsEmulator, why_no_fuse
from tests.torture.campaign.places.base import Occupied, Place, Skipped
from tests.torture.campaign.places.directory import ROOMY_CAP_BYTES, occupied


class Hf3fsPlace(Place):
    keeps = True
    is_calm = False
    cap_bytes = ROOMY_CAP_BYTES

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self._emulator: Hf3fsEmulator | None = None
        self._struck = ""

    def open(self) -> None:
        if (reason := why_no_fuse()) is not None:
            raise Skipped(reason)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._emulator = Hf3fsEmulator(self.directory)
        self._emulator.start()

    def close(self) -> None:
        """Kill the emulator, which ends all calls that wait on the mount."""
        emulator, self._emulator = self._emulator, None
        if emulator is not None:
            if self._struck != "die":
                emulator.kill()
            emulator.stop()

    def overrides(self, slot: int) -> dict[str, Any]:
        assert self._emulator is not None
        return self.config(
            remote_storage_plugins=["hf3fs"],
            hf3fs_base_path=str(self._emulator.mount / "chunks"),
            hf3fs_mount_point=str(self._emulator.mount),
            max_hf3fs_size=ROOMY_CAP_BYTES / 2**30,
            hf3fs_ior_entries=128,
            hf3fs_io_thread_num=2,
            shm_name=f"{self.directory.parent.name}-{self.name}-{slot}",
        )

    def strike(self, kind: str) -> bool:
        assert self._emulator is not None
        self._struck = kind
        if kind == "freeze":  # every call on the mount hangs
            self._emulator.pause()
        elif kind == "hang":  # only the rings do
            self._emulator.control.hang()
        else:
            self._emulator.kill()
        return False

    def heal(self) -> None:
        struck, self._struck = self._struck, ""
        assert self._emulator is not None
        if struck == "freeze":
            self._emulator.resume()
        elif struck == "hang":
            self._emulator.control.resume()
        elif struck:
            self._emulator.restart()

    def occupied(self) -> Occupied:
        """Of the files behind the mount, which does not always answer."""
        assert self._emulator is not None
        return occupied(chunks_of(self._emulator.backing / "chunks"))
