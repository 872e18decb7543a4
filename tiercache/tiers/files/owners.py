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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiercache.tiers.files.access import ABSENT, Access, NotAFile, open_regular, opened_directory
from tiercache.tiers.files.allocation import NO_ROOM
from tiercache.tiers.files.ledger import Ledger
from tiercache.tiers.files.record import Standing, read_record

PENDING_NAME = re.compile(r"[0-9a-f]{32}\.\d+")
_PROBE_NAME = re.compile(r"probe\.\d+\.\d+")
_UNNAMED_S = 60.0
"""For so long the lock file of an instance that begins may lack its name."""


@dataclass
class StaleWriters:
    """What was left of instances that no longer live, and was removed."""

    instances: int = 0
    files: int = 0


@dataclass
class Owner:
    """This instance, in one directory. `places`: where files that are being written may lie, besides `temporary`."""

    temporary: Path
    places: Sequence[Path]
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
        unnamed = self.temporary / f"{self.name}.new"
        self._descriptor = open_regular(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        access.grant(unnamed)
        unnamed.rename(self.temporary / f"{self.name}.lock")

    def leave(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # the directory may be gone
                (self.temporary / f"{self.name}.lock").unlink()
            with contextlib.suppress(OSError):  # of a mount that is dead
                os.close(descriptor)

    def new_name(self) -> str:
        """For a file that is being written; nobody else has it."""
        return f"{self.name}.{next(self._numbers)}"

    def is_stray(self, name: str) -> bool:
        """Whether a file of such a name belongs to nobody: its writer's lock file is gone."""
        return bool(PENDING_NAME.fullmatch(name)) and not (self.temporary / f"{name.partition('.')[0]}.lock").exists()

    def others(self) -> list[Standing]:
        """The records of all, living or not, that have not been removed."""
        found = []
        for name in self._names(".lock"):
            if name != self.name:
                with contextlib.suppress(OSError):  # it left at this moment
                    descriptor = open_regular(self.temporary / f"{name}.lock", os.O_RDONLY)
                    try:
                        found.append(read_record(descriptor))
                    finally:
                        os.close(descriptor)
        return found

    def remove_stale_writers(self, ledger: Ledger) -> StaleWriters:
        """Remove what instances that no longer live (nobody holds their lock) left half-written, and give back what they
        certainly had not used. What they used or not, nobody knows: a count that is too high for it is reckoned anew."""
        done = StaleWriters()
        self._sweep_beginners()
        with contextlib.ExitStack() as stack:
            dead = {}
            for name in self._names(".lock"):
                if name != self.name:
                    standing = stack.enter_context(_locked(self.temporary / f"{name}.lock"))
                    if standing is not None:
                        dead[name] = standing
            if dead:
                done.files = self._remove_files(set(dead))
            # Last, for it is how the others are found. Whoever removes it gives back; who dies in between gives too little.
            for name, standing in dead.items():
                announced_bytes = _announced(ledger, standing.pledged_bytes)
                gone = _unlink(self.temporary / f"{name}.lock")
                done.instances += gone
                ledger.release(announced_bytes if gone else 0, announced_bytes)
        return done

    def _remove_files(self, dead: set[str]) -> int:
        """One look at each place, however many are dead. What they take stays counted until the count is reckoned anew."""
        removed = 0
        for place in (self.temporary, *self.places):
            with contextlib.suppress(*ABSENT), opened_directory(place, to_list=True) as directory:
                for name in os.listdir(directory):
                    stem, _, number = name.rpartition(".")
                    if stem in dead and number.isdigit():
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=directory)
                            removed += 1
        return removed

    def _names(self, ending: str) -> list[str]:
        return [name[: -len(ending)] for name in os.listdir(self.temporary) if name.endswith(ending)]

    def _sweep_beginners(self) -> None:
        """What is left of instances that were killed while they opened the directory."""
        now_s = os.fstat(self._descriptor).st_ctime
        for name in os.listdir(self.temporary):
            path = self.temporary / name
            if _PROBE_NAME.fullmatch(name) or self.is_stray(name):  # a probe's maker removes its name at once
                _unlink(path)
            elif name.endswith(".new") and name != f"{self.name}.new":
                with contextlib.suppress(OSError):
                    if now_s - path.lstat().st_ctime > _UNNAMED_S:
                        with _locked(path) as standing:
                            if standing is not None:
                                _unlink(path)


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
def _locked(path: Path) -> Iterator[Standing | None]:
    """The record in a lock file that nobody holds, held by us meanwhile; None where its owner lives or it is gone."""
    try:
        descriptor = open_regular(path, os.O_RDWR)
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


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
