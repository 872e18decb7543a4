"""The disk tier: chunk files in one or several directories of this machine's own disks."""

from __future__ import annotations

from tiercache.tiers.files.settings import FileSettings
from tiercache.tiers.files.threads import ThreadMover
from tiercache.tiers.files.tier import FileTier


class DiskTier(FileTier):
    """Threads move bytes; the index is what this instance did and found; who writes makes room."""

    def __init__(self, settings: FileSettings, fingerprint: bytes) -> None:
        super().__init__("disk", "local_disk", settings, fingerprint, ThreadMover)
