"""Owner lock files, and removal of what dead processes left.

Each process has an id, holds the lock of `<id>.lock` in `.tiercache/tmp` while it lives, and names its temporary files
`<id>.<n>`. A free lock means a dead process. The lock file says if the process may use or delete bytes: then the capacity
counter is not corrected. Synchronous; runs in worker threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import uuid
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiercache.tiers.files.access import ABSENT, Access, open_file, opened_directory

PENDING_NAME = re.compile(r"[0-9a-f]{32}\.\d+")
_LOCK_NAME = re.compile(r"[0-9a-f]{32}\.lock")
TEMPORARY = ".tiercache/tmp"
_ACTIVE, _IDLE = b"1", b"0"
"""Content of a lock file: its process may use or delete bytes, or not. Other content is another version's."""


class Owner:
    """The lock file of this process in the directory at `root`."""

    def __init__(self, root: Path, places: Sequence[str]) -> None:
        """`places`: names of directories below `root` with temporary files, besides TEMPORARY."""
        self.name = uuid.uuid4().hex
        self._root = root
        self._places = places
        self._numbers = itertools.count()
        self._descriptor = -1

    @property
    def descriptor(self) -> int:
        """Descriptor of the lock file, or -1."""
        return self._descriptor

    @property
    def lost(self) -> bool:
        """True if the lock file was deleted or closed, so that others do not see this process."""
        descriptor = self._descriptor
        return descriptor < 0 or not os.fstat(descriptor).st_nlink

    def settle(self, access: Access) -> None:
        """Create the lock file. If another process removes it before it is locked, retry with another name."""
        while self._descriptor < 0:
            with self._opened(TEMPORARY) as directory:
                descriptor = open_file(f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, directory)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                access.grant(descriptor)
                if os.fstat(descriptor).st_nlink:
                    self._descriptor = descriptor
            except BlockingIOError:
                pass
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
                    self.name = uuid.uuid4().hex

    def write(self, is_active: bool, *, synced: bool) -> None:
        """Tell others if this process may use or delete bytes. On OSError the old or the new content is stored."""
        os.pwrite(self._descriptor, _ACTIVE if is_active else _IDLE, 0)
        if synced:
            os.fdatasync(self._descriptor)

    def leave(self, *, keep: bool = False) -> None:
        """Close the lock file, and delete it unless `keep`. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError), self._opened(TEMPORARY) as directory:
                if not keep:
                    os.unlink(f"{self.name}.lock", dir_fd=directory)
            with contextlib.suppress(OSError):  # the mount may be dead
                os.close(descriptor)

    def new_name(self) -> str:
        """Return a unique name for a temporary file."""
        return f"{self.name}.{next(self._numbers)}"

    def is_stray(self, name: str) -> bool:
        """Return True for a temporary file whose writer has no lock file."""
        if not PENDING_NAME.fullmatch(name):
            return False
        try:
            with self._opened(TEMPORARY) as directory:
                return _has_no_lock(name, directory)
        except ABSENT:
            return False  # unknown

    def active_others(self) -> int:
        """Return how many other processes, or dead ones that left their lock files, may use or delete bytes."""
        count = 0
        with self._opened(TEMPORARY) as directory:
            for name in self._locks(os.listdir(directory)):
                try:
                    descriptor = open_file(name, os.O_RDONLY, directory)
                except FileNotFoundError:
                    continue
                except PermissionError:
                    count += 1
                    continue
                try:
                    count += os.pread(descriptor, 1, 0) not in (b"", _IDLE)  # empty: it was never active
                finally:
                    os.close(descriptor)
        return count

    def remove_dead(self) -> int:
        """Remove temporary files of processes whose locks are free, and their lock files. Return the number of files.

        What the counter has for these files stays counted. Raises FileNotFoundError.
        """
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(self._opened(TEMPORARY))
            if not self._is_here(temporary):
                return 0
            names = os.listdir(temporary)
            locks = self._locks(names)
            known = {self.name, *(name.removesuffix(".lock") for name in locks)}
            removed = 0
            for name in names:  # left by processes without lock files
                if PENDING_NAME.fullmatch(name) and name[:32] not in known and _has_no_lock(name, temporary):
                    removed += _unlink(name, temporary)
            dead = [name for name in locks if stack.enter_context(_locked(name, temporary))]
            if dead:
                removed += self._remove_files({name.removesuffix(".lock") for name in dead})
                for name in dead:  # last, since lock files lead to all other leftovers
                    _unlink(name, temporary)
        return removed

    def _opened(self, name: str) -> contextlib.AbstractContextManager[int]:
        return opened_directory(self._root / name)

    def _is_here(self, temporary: int) -> bool:
        """Return True if an open directory contains our lock file."""
        try:
            there = os.lstat(f"{self.name}.lock", dir_fd=temporary)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _locks(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if _LOCK_NAME.fullmatch(name) and name != f"{self.name}.lock"]

    def _remove_files(self, dead: Container[str]) -> int:
        """Remove the files of all dead processes in one listing per directory. Return their number."""
        removed = 0
        for place in (TEMPORARY, *self._places):
            with contextlib.suppress(*ABSENT), self._opened(place) as directory:
                for name in os.listdir(directory):
                    if PENDING_NAME.fullmatch(name) and name[:32] in dead:
                        removed += _unlink(name, directory)
        return removed


@contextmanager
def _locked(name: str, temporary: int) -> Iterator[bool]:
    """Lock a free lock file and yield True; False if its owner lives or it is missing."""
    try:
        descriptor = open_file(name, os.O_RDWR, temporary)
    except (FileNotFoundError, PermissionError):
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _has_no_lock(name: str, temporary: int) -> bool:
    """Return True if the writer of a temporary file has no lock file."""
    try:
        os.lstat(f"{name[:32]}.lock", dir_fd=temporary)
    except FileNotFoundError:
        return True
    return False


def _unlink(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True
