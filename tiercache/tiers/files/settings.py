"""What all file tiers are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LARGEST_STEP_BYTES = 64 << 20
_STEPS = 64


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
    many_hosts: bool = False
    """Other hosts use the directories, too, and must see what this one has reserved when it is gone."""
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

    def step_of(self, cap_bytes: int) -> int:
        """In how large steps a process reserves bytes of a directory with that cap."""
        return min(_LARGEST_STEP_BYTES, cap_bytes // _STEPS)
