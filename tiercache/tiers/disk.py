"""The disk tier: chunk files in directories on local disks."""

from __future__ import annotations

from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier


class DiskTier(FileTier):
    """Preset for local disks: threads move bytes, and the index has what this instance stored or found.

    There are twice as many write threads as read threads, since a write waits twice: for its bytes and for the commit of the
    file system, which several writes share. A quarter of them, at least two, transfer bytes at a time, which keeps a device
    busy (see `DeviceTurns`). With one read thread there is one write thread.
    """

    def __init__(self, settings: FileSettings, fingerprint: bytes) -> None:
        threads = settings.threads
        writers = 2 * threads if threads > 1 else 1
        super().__init__(
            "disk",
            "local_disk",
            settings,
            fingerprint,
            lambda directories: PosixIO(directories, writers, max(2, writers // 4)),
        )
