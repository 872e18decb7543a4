"""The disk tier: chunk files in one or several directories of this machine's own disks."""

from __future__ import annotations

from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier


class DiskTier(FileTier):
    """The preset for local disks: threads move bytes, and the index holds the chunks that this instance stored and
    found.

    Twice as many threads write as read: a write waits for the device twice, for its bytes and for the file system's
    commit, and concurrent waits share a commit. A quarter of them, at least two, transfer to a device at a time, which
    is enough to keep it busy (see `DeviceTurns`). A single thread stays single.
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
