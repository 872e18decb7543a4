"""Who uses a directory: an instance's own files in `.tiercache/tmp`, and what those left that were killed.

Each instance has an id, a lock file of that name that it holds as long as it lives and keeps its record in, and files that
are being written, `<id>.<n>`. Synchronous; for worker threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiercache.tiers.files.access import ABSENT, Access, NotAFile, open_regular, opened_below
from tiercache.tiers.files.allocation import NO_ROOM
from tiercache.tiers.files.ledger import Ledger
from tiercache.tiers.files.record import Standing, read_record

PENDING_NAME = re.compile(r"[0-9a-f]{32}\.\d+")
_ID_NAME = re.compile(r"[0-9a-f]{32}")
TEMPORARY = (".tiercache", "tmp")
_UNNAMED_S = 60.0
"""For so long the lock file of an instance that begins may lack its name."""


@dataclass
class StaleWriters:
    """What was left of instances that no longer live, and was removed."""

    instances: int = 0
    files: int = 0


@dataclass
class Owner:
    """This instance, in the directory at `root`. `places`: the names below it where files may be written, besides
    TEMPORARY. `owns`: whether a directory with that status may be ours; in another one nothing is made, read or removed."""

    root: Path
    places: Sequence[str]
    owns: Callable[[os.stat_result], bool]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._descriptor = -1

    @property
    def descriptor(self) -> int:
        """Of our lock file, once we settled."""
        return self._descriptor

    @property
    def lost(self) -> bool:
        """Whether our lock file has been deleted, or we left: others take us for dead, or know nothing of us."""
        descriptor = self._descriptor
        return descriptor < 0 or not os.fstat(descriptor).st_nlink

    def settle(self, access: Access) -> None:
        """Locked before it has its name: nobody may find it unlocked and take us for dead."""
        with self._opened(TEMPORARY) as directory:
            unnamed = f"{self.name}.new"
            self._descriptor = open_regular(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, directory)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            access.grant(self._descriptor)
            os.rename(unnamed, f"{self.name}.lock", src_dir_fd=directory, dst_dir_fd=directory)

    def leave(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError), self._opened(TEMPORARY) as directory:  # it may be gone
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

    def others(self) -> list[Standing]:
        """The records of all, living or not, that have not been removed."""
        found = []
        with self._opened(TEMPORARY) as directory:
            for name in self._names(".lock", directory):
                with contextlib.suppress(OSError):  # it left at this moment
                    descriptor = open_regular(f"{name}.lock", os.O_RDONLY, directory)
                    try:
                        found.append(read_record(descriptor))
                    finally:
                        os.close(descriptor)
        return found

    def remove_stale_writers(self, ledger: Ledger) -> StaleWriters:
        """Remove what instances that no longer live (nobody holds their lock) left half-written, and give back what they
        certainly had not used. What they used or not, nobody knows: a count that is too high for it is reckoned anew.

        Raises FileNotFoundError, and NotADirectoryError where a link or another user's directory has the place of ours.
        """
        done = StaleWriters()
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(self._opened(TEMPORARY))
            if not self._is_here(temporary):
                return done
            self._sweep_beginners(temporary)
            dead = {}
            for name in self._names(".lock", temporary):
                standing = stack.enter_context(_locked(f"{name}.lock", temporary))
                if standing is not None:
                    dead[name] = standing
            if dead:
                done.files = self._remove_files(set(dead))
            # Last, for it is how the others are found. Whoever removes it gives back; who dies in between gives too little.
            for name, standing in dead.items():
                announced_bytes = _announced(ledger, standing.pledged_bytes)
                gone = _unlink(f"{name}.lock", temporary)
                done.instances += gone
                ledger.release(announced_bytes if gone else 0, announced_bytes)
        return done

    def _opened(self, names: Sequence[str]) -> contextlib.AbstractContextManager[int]:
        return opened_below(self.root, names, self.owns)

    def _is_here(self, temporary: int) -> bool:
        """Return True if our lock file lies in an open directory: else that is not where we settled."""
        try:
            there = os.lstat(f"{self.name}.lock", dir_fd=temporary)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _remove_files(self, dead: set[str]) -> int:
        """One look at each place, however many are dead. What they take stays counted until the count is reckoned anew."""
        removed = 0
        for names in (TEMPORARY, *([place] for place in self.places)):
            with contextlib.suppress(*ABSENT), self._opened(names) as directory:
                for name in os.listdir(directory):
                    if PENDING_NAME.fullmatch(name) and name.partition(".")[0] in dead:
                        removed += _unlink(name, directory)
        return removed

    def _names(self, ending: str, temporary: int) -> list[str]:
        """The ids of the other instances that have a file with that ending."""
        ids = [name.removesuffix(ending) for name in os.listdir(temporary) if name.endswith(ending)]
        return [name for name in ids if _ID_NAME.fullmatch(name) and name != self.name]

    def _sweep_beginners(self, temporary: int) -> None:
        """What is left of instances that were killed while they opened the directory."""
        now_s = os.fstat(self._descriptor).st_ctime
        for name in os.listdir(temporary):
            if PENDING_NAME.fullmatch(name) and _has_no_lock(name, temporary):
                _unlink(name, temporary)
        for name in self._names(".new", temporary):
            with contextlib.suppress(OSError):
                if now_s - os.lstat(f"{name}.new", dir_fd=temporary).st_ctime > _UNNAMED_S:
                    with _locked(f"{name}.new", temporary) as standing:
                        if standing is not None:
                            _unlink(f"{name}.new", temporary)


def _announced(ledger: Ledger, pledged_bytes: int) -> int:
    """How much of it may be given back. On a device without a free byte our record has no room to say that we do: then
    nothing is, and the count is too high until it is reckoned anew."""
    try:
        ledger.announce(pledged_bytes)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return 0
    return pledged_bytes


@contextmanager
def _locked(name: str, temporary: int) -> Iterator[Standing | None]:
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
            yield read_record(descriptor)
    finally:
        os.close(descriptor)


def _has_no_lock(name: str, temporary: int) -> bool:
    """Return True if the writer of a file that is being written has no lock file."""
    try:
        os.lstat(f"{name.partition('.')[0]}.lock", dir_fd=temporary)
    except FileNotFoundError:
        return True
    return False


def _unlink(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True
