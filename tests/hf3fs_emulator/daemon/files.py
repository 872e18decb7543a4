"""The inodes that the daemon knows: those of open files.

3FS counts what a ring wrote into a file's length when the file is synced or closed, not when the write ends. So does this.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class KnownFile:
    """One inode, with a descriptor. The last reference closes that: a transfer may outlive the client's file."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        self.descriptor = descriptor
        self.writable = writable
        self.holders = 0
        self.visible_bytes: int | None = None
        """What `stat` says while it lags behind what rings wrote; None when it does not lag."""
        self.changed = False
        """Rings wrote to it since this was last made visible."""

    def __del__(self) -> None:
        os.close(self.descriptor)


class KnownFiles:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, KnownFile] = {}
        self.on_visible: Callable[[int], None] = lambda inode: None
        """Called with the inode when what rings wrote is to be seen."""

    def hold(self, descriptor: int, inode: int, *, writable: bool) -> KnownFile:
        """Count an opening of the file. Where it is the first, the file keeps `descriptor` and closes it."""
        with self._lock:
            known = self._files.get(inode)
            if known is None:
                known = self._files[inode] = KnownFile(descriptor, writable)
            known.holders += 1
            return known

    def release(self, inode: int) -> None:
        with self._lock:
            known = self._files[inode]
            known.holders -= 1
            if known.holders == 0:
                del self._files[inode]

    def find(self, inode: int) -> KnownFile | None:
        return self._files.get(inode)

    def will_write(self, known: KnownFile, until: int) -> None:
        """A ring is about to write up to the offset `until`."""
        known.changed = True
        if known.visible_bytes is None:
            with self._lock:
                size_bytes = os.fstat(known.descriptor).st_size
                if known.visible_bytes is None and until > size_bytes:
                    known.visible_bytes = size_bytes

    def make_visible(self, inode: int) -> None:
        """Let `stat` see everything that was written so far."""
        known = self._files.get(inode)
        if known is not None:
            known.visible_bytes = None
            if known.changed:
                known.changed = False
                self.on_visible(inode)

    def visible_bytes(self, inode: int, size_bytes: int) -> int:
        known = self._files.get(inode)
        if known is None or known.visible_bytes is None:
            return size_bytes
        return known.visible_bytes
