"""Where the chunks of a configured directory lie: in it, or in a subdirectory of our own.

A directory that has our manifest, or holds nothing but what is ours, is used itself. In one that holds files of others, or
that others can change, a subdirectory is made: whatever the names of those files look like, nothing of ours lies among them.
Synchronous; for worker threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
from pathlib import Path

from tiercache.tiers.files.access import ABSENT, FILE_MODE, Access, open_regular, require_directory
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.manifest import MANIFEST, WrongFormat
from tiercache.tiers.files.survey import is_ours

logger = logging.getLogger("tiercache.disk")

SUBDIRECTORY = "tiercache-chunks"
_NEUTRAL = re.compile(rf"lost\+found|\.tiercache|{re.escape(MANIFEST)}|probe\.\d+\.\d+")
"""Names that file systems put there, and that only we make."""


def found_place(directory: Path) -> Path:
    """Return where the chunks of `directory` lie already, and `directory` itself where there are none. Changes nothing.

    Links in the configured path are resolved here. Raises OSError.
    """
    root = Path(os.path.realpath(directory))
    below = root / SUBDIRECTORY
    return below if _is_claimed(below) else root


def make_place(directory: Path, access: Access) -> Path:
    """As `found_place`, with the directory made, and with the subdirectory where `directory` is not to be used itself.

    Raises PermissionError where the subdirectory is another user's, WrongFormat where it is not ours, OSError.
    """
    access.make_root(directory)
    root = Path(os.path.realpath(directory))
    below = root / SUBDIRECTORY
    if not _is_claimed(below):
        reason = _why_not(root, access)
        if not reason:
            return root
        with contextlib.suppress(*ABSENT):
            if _of_others(below):
                raise WrongFormat(f"{below} is not empty and has no {MANIFEST}: move it away, or name another directory")
        logger.warning("%s %s; chunks are stored in %s", directory, reason, below)
    access.make_directory(below)
    status = require_directory(below)
    if not access.owns(status) and status.st_uid != _own_user(below):
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(below))
    return below


def _is_claimed(place: Path) -> bool:
    """Return True if a directory has our manifest or our count; a clean-up by hand rarely deletes both."""
    return os.path.lexists(place / MANIFEST) or counted_in(place / ".tiercache" / "ledger") is not None


def _why_not(root: Path, access: Access) -> str:
    """Why `root` is not used itself; empty where it is."""
    status = os.stat(root)
    if not access.owns(status) and status.st_uid != _own_user(root):
        return f"belongs to user {status.st_uid}"
    if not status.st_mode & stat.S_ISVTX:
        if status.st_mode & stat.S_IWOTH:
            return "may be written to by everybody"
        if status.st_mode & stat.S_IWGRP and access.file_mode == FILE_MODE:
            return "may be written to by its group, and file_access is not group"
    others = _of_others(root)
    return f"holds files of others, such as {', '.join(others[:3])}" if others else ""


def _of_others(place: Path) -> list[str]:
    """Return the names in a directory that are not ours; none where the directory is claimed.

    When a directory is emptied, its manifest is gone as well. Instances that still run put chunks there before it is made
    again, and all must come to the same answer.
    """
    if _is_claimed(place):
        return []
    try:
        private = require_directory(place / ".tiercache").st_uid == os.geteuid()
    except OSError:
        private = False
    names = [name for name in sorted(os.listdir(place)) if not _NEUTRAL.fullmatch(name)]
    others = [name for name in names if not is_ours(place, name, private=private)]
    return [] if _is_claimed(place) else others  # asked again: other instances may begin at this moment


def _own_user(directory: Path) -> int:
    """The user id that the mount shows for what this process makes; not its own where a server or an option maps it."""
    probe = directory / f"probe.{os.getpid()}.{threading.get_ident()}"
    descriptor = open_regular(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        probe.unlink(missing_ok=True)
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
