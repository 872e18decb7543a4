"""The lock files of the processes that use a directory, and what those left that were killed.

Each process has an id, a lock file of that name in `.tiercache/tmp` that it holds as long as it lives, and files that are
being written, `<id>.<n>`. Synchronous; for worker threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import struct
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tiercache.tiers.files.access import ABSENT, Access, NotAFile, open_regular, opened_below

PENDING_NAME = re.compile(r"[0-9a-f]{32}\.\d+")
_LOCK_NAME = re.compile(r"[0-9a-f]{32}\.lock")
TEMPORARY = (".tiercache", "tmp")
_RECORD = struct.Struct("<8sQQQ")
_MAGIC = b"TIEROWNR"


class Record(NamedTuple):
    """The content of a lock file."""

    number_bytes: int = 0
    """So much of the counter is certainly on no device: whoever finds the process dead takes it over."""
    counter: int = 0
    """The identity of that counter."""
    is_active: bool = False
    """Whether the process may be using or deleting bytes."""


class Owner:
    """The lock file of this process in the directory at `root`."""

    def __init__(self, root: Path, places: Sequence[str], owns: Callable[[os.stat_result], bool]) -> None:
        """`places`: the names below `root` where files may be written, besides TEMPORARY. `owns` says if a directory with
        that status may be ours; in another one nothing is made, read or removed."""
        self.name = uuid.uuid4().hex
        self._root = root
        self._places = places
        self._owns = owns
        self._numbers = itertools.count()
        self._descriptor = -1

    @property
    def descriptor(self) -> int:
        """Of the lock file, once there is one."""
        return self._descriptor

    @property
    def lost(self) -> bool:
        """Whether the lock file was deleted, or left: others take this process for dead, or know nothing of it."""
        descriptor = self._descriptor
        return descriptor < 0 or not os.fstat(descriptor).st_nlink

    def settle(self, access: Access) -> None:
        """Make the lock file. Another process may find it unlocked at first, and remove it: then there is another name."""
        while self._descriptor < 0:
            with self._opened(TEMPORARY) as directory:
                descriptor = open_regular(f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, directory)
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

    def write(self, record: Record, *, synced: bool) -> None:
        """Raises OSError, and then either may stand there."""
        os.pwrite(self._descriptor, _RECORD.pack(_MAGIC, *record), 0)
        if synced:
            os.fdatasync(self._descriptor)

    def leave(self, *, keep: bool = False) -> None:
        """Idempotent. `keep`: the lock file stays, for others to find."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError), self._opened(TEMPORARY) as directory:  # it may be gone
                if not keep:
                    os.unlink(f"{self.name}.lock", dir_fd=directory)
            with contextlib.suppress(OSError):  # of a mount that is dead
                os.close(descriptor)

    def new_name(self) -> str:
        """For a file that is being written; nobody else has it."""
        return f"{self.name}.{next(self._numbers)}"

    def is_stray(self, name: str) -> bool:
        """Whether a file of such a name belongs to nobody: its writer's lock file is gone."""
        if not PENDING_NAME.fullmatch(name):
            return False
        try:
            with self._opened(TEMPORARY) as directory:
                return _has_no_lock(name, directory)
        except ABSENT:
            return False  # nobody can say

    def others(self) -> list[Record]:
        """The records of all other processes, living or not, whose lock files are there."""
        found = []
        with self._opened(TEMPORARY) as directory:
            for name in self._locks(os.listdir(directory)):
                try:
                    descriptor = open_regular(name, os.O_RDONLY, directory)
                except (FileNotFoundError, NotAFile):
                    continue
                except PermissionError:
                    found.append(Record(is_active=True))
                    continue
                try:
                    found.append(_read(descriptor))
                finally:
                    os.close(descriptor)
        return found

    def remove_dead(self, take_over: Callable[[Record, Callable[[], bool]], None]) -> int:
        """Remove what processes that no longer live (nobody holds their lock) left half-written; return how many files.

        `take_over` gets the record of each, and what removes its lock file and says whether that was there still.
        Raises FileNotFoundError, and NotADirectoryError where a link or another user's directory has the place of ours.
        """
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(self._opened(TEMPORARY))
            if not self._is_here(temporary):
                return 0
            names = os.listdir(temporary)
            locks = self._locks(names)
            known = {self.name, *(name.removesuffix(".lock") for name in locks)}
            removed = 0
            for name in names:  # of processes that others have removed
                if PENDING_NAME.fullmatch(name) and name[:32] not in known and _has_no_lock(name, temporary):
                    removed += _unlink(name, temporary)
            dead = {}
            for name in locks:
                record = stack.enter_context(_locked(name, temporary))
                if record is not None:
                    dead[name.removesuffix(".lock")] = record
            if dead:
                removed += self._remove_files(dead)
            for name, record in dead.items():  # last, for it is how the others are found
                take_over(record, partial(_unlink, f"{name}.lock", temporary))
        return removed

    def _opened(self, names: Sequence[str]) -> contextlib.AbstractContextManager[int]:
        return opened_below(self._root, names, self._owns)

    def _is_here(self, temporary: int) -> bool:
        """Return True if our lock file lies in an open directory: else that is not where we settled."""
        try:
            there = os.lstat(f"{self.name}.lock", dir_fd=temporary)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _locks(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if _LOCK_NAME.fullmatch(name) and name != f"{self.name}.lock"]

    def _remove_files(self, dead: Container[str]) -> int:
        """One look at each place, however many are dead."""
        removed = 0
        for names in (TEMPORARY, *([place] for place in self._places)):
            with contextlib.suppress(*ABSENT), self._opened(names) as directory:
                for name in os.listdir(directory):
                    if PENDING_NAME.fullmatch(name) and name[:32] in dead:
                        removed += _unlink(name, directory)
        return removed


@contextmanager
def _locked(name: str, temporary: int) -> Iterator[Record | None]:
    """The record in a lock file that nobody holds, held by us meanwhile; None where its owner lives or it is gone."""
    try:
        descriptor = open_regular(name, os.O_RDWR, temporary)
    except (FileNotFoundError, PermissionError, NotAFile):
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Record:
    """A process that has used nothing has written nothing. What is there else is another version's."""
    raw = os.pread(descriptor, _RECORD.size, 0)
    if raw[:8] != _MAGIC or len(raw) < _RECORD.size:
        return Record(is_active=bool(raw))
    _, number_bytes, counter, is_active = _RECORD.unpack(raw)
    return Record(number_bytes, counter, bool(is_active))


def _has_no_lock(name: str, temporary: int) -> bool:
    """Return True if the writer of a file that is being written has no lock file."""
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
