"""What all file tiers are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LARGEST_ALLOWANCE_BYTES = 1 << 30
_SMALLEST_SHARE = 64


@dataclass(frozen=True)
class FileSettings:
    directories: tuple[Path, ...]
    cap_bytes: int
    """Of all directories together; each gets an equal share. 0 takes nine tenths of what is free (or ours already) when the
    tier opens."""
    threads: int = 4
    """For reads; as many again for writes, or more. 1: one chunk after the other, in the order in which they were asked
    for."""
    direct: bool | None = None
    """O_DIRECT: True, False, or None to use it where it works."""
    durable: bool = True
    """fdatasync each file before it gets its name. Its name follows with the file system's next commit (seconds): a power
    cut can lose the newest chunks but never show half of one. Without, all that was written lately may be lost, and what is
    torn is found by verification. Neither matters for kill -9."""
    admission: str = "all"
    """Which chunks are worth writing, see tiercache.core.admission."""
    bytes_per_day: float = 0.0
    """The most that is written a day; 0: no limit."""
    file_access: str = "owner"
    """Who may read what is stored: "owner" (0600, directories 0700) or "group" (0660, 2770). Directories that exist already
    keep their modes, except those below them that are ours."""
    chunk_bytes: int = 0
    """The largest payload. Needed by those that move chunks through buffers of their own."""
    allowance_bytes: int | None = 0
    """What this instance may have charged to the cap and not used yet: fewer changes of a count that others wait for. None:
    a 64th of the cap, at most 1 GiB."""
    compression: str = "none"
    """What is done to payloads in host memory: none, lz4, zstd or auto. See `tiercache.tiers.compression`."""
    item_bytes: int = 1
    """Length of a number in them."""
    tenant_bytes: int = 0
    """What each tenant may have of all directories together, of each an equal share; 0: no quota."""
    beside: bool = True
    """A file is made in the directory in which it will have its name, see `Volume`."""

    @property
    def tenant_share_bytes(self) -> int:
        """Of one directory."""
        return self.tenant_bytes // len(self.directories)

    def allowance_of(self, cap_bytes: int) -> int:
        """For a directory with that cap."""
        if self.allowance_bytes is None:
            return min(_LARGEST_ALLOWANCE_BYTES, cap_bytes // _SMALLEST_SHARE)
        return self.allowance_bytes
