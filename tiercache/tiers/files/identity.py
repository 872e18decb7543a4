"""Which directory it was that was opened, and whether what has its path is still that one. Synchronous; asks the device."""

from __future__ import annotations

import os
from pathlib import Path

from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import ABSENT, Access, require_directory


class Identity:
    """Of the directory at `root`, from `note` on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._device = self._number = -1
        self._is_mount_point = False
        self.user = -1
        """To whom it belongs."""

    def note(self) -> None:
        """It is opened now. Raises OSError."""
        status = require_directory(self.root)
        self.user = status.st_uid
        self._device, self._number = status.st_dev, status.st_ino
        self._is_mount_point = os.stat(f"{self.root}/..").st_dev != self._device

    def is_same(self, other: Identity) -> bool:
        """Whether both are the same directory, by whatever names."""
        return self._number >= 0 and (self._device, self._number) == (other._device, other._number)

    def is_deleted(self) -> bool:
        """Whether somebody deleted the directory, or moved it away: it is not there, and what it lay in is, on the file
        system on which it was. Else a mount is away, and it comes back with that. Raises OSError when the device does not
        say."""
        place = os.path.realpath(self.root)  # a link to it may be there still
        try:
            os.stat(place)
            return False
        except ABSENT:
            pass
        try:
            return os.stat(os.path.dirname(place)).st_dev == self._device
        except ABSENT:
            return False

    def is_here_or_deleted(self) -> bool:
        """Whether a chunk that is not found is none: the directory is not just away. Raises OSError."""
        return self.root.is_dir() or self.is_deleted()

    def make_anew(self, access: Access) -> bool:
        """Before the directory is opened anew: make it where it was deleted; whether it was.

        Raises TierUnavailable where it cannot be made, and where a mount is away: who writes to what is below it fills
        another device. OSError when the device does not say.
        """
        if self.root.is_dir():
            if self._is_unmounted():
                raise TierUnavailable(f"what was mounted at {self.root} is not there any more")
            return False
        if not self.is_deleted():
            raise TierUnavailable(f"{self.root} is not there any more")
        try:
            access.make_directory(os.path.realpath(self.root))
        except OSError as error:
            raise TierUnavailable(f"{self.root} is not there any more, and cannot be made anew: {error}") from error
        return True

    def _is_unmounted(self) -> bool:
        """Whether only the mount point is left of what was mounted there. Raises OSError."""
        here = os.stat(self.root).st_dev
        return self._is_mount_point and here != self._device and here == os.stat(f"{self.root}/..").st_dev

    def is_mounted_anew(self, descriptor: int) -> bool:
        """Whether what is open there lies on another mount than what has the directory's path now."""
        try:
            return os.fstat(descriptor).st_dev != os.stat(self.root).st_dev
        except OSError:
            return True  # the mount that is open is dead
