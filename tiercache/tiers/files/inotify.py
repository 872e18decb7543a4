"""The kernel's word about what happens in a directory: Linux's inotify, by ctypes. It knows what this host does there."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import NamedTuple

MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATED = 0x100
DELETED = 0x200
MOVED_SELF = 0x800
"""The directory that is watched has another name now, and is watched on."""
OVERFLOW = 0x4000
IGNORED = 0x8000
"""The directory is not watched any more: it was deleted, or what it lies on unmounted."""
_ONLY_DIRECTORIES = 0x01000000
_NO_LINKS = 0x02000000
_HEADER = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class Happening(NamedTuple):
    watch: int
    mask: int
    name: str


class Inotify:
    """Raises OSError where the kernel gives no more of them (fs.inotify.max_user_instances)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify")

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, directory: Path, mask: int) -> int:
        """The number that its happenings have; of a directory that is watched already, the same one. Asks the mount, so it
        may block. Raises OSError, also where there may be no more (fs.inotify.max_user_watches)."""
        number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(directory), mask | _ONLY_DIRECTORIES | _NO_LINKS)
        return self._checked(number, str(directory))

    def happened(self) -> list[Happening]:
        """Some of what nobody has taken yet, at once; nothing where there is nothing."""
        try:
            raw = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        found, position = [], 0
        while position < len(raw):
            watch, mask, _, length = _HEADER.unpack_from(raw, position)
            position += _HEADER.size + length
            found.append(Happening(watch, mask, os.fsdecode(raw[position - length : position].rstrip(b"\0"))))
        return found

    def close(self) -> None:
        os.close(self._descriptor)

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)
        return result
