"""Safe access to files and directories: modes, owners, mounts, and locks with deadlines.

`Access` sets modes and checks owners, the `open*` functions follow no link and wait for no pipe, `lock_within` bounds the
wait for a lock, and `mount_of` finds the mount of a path. Synchronous; runs in worker threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiercache.errors import TierUnavailable

logger = logging.getLogger("tiercache.disk")

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.02
_TRIES = 4
"""Attempts to create a directory that other processes make and delete."""


def lock_within(descriptor: int, wait_s: float, path: Path | str) -> None:
    """Call flock(2), exclusive. Raises TierUnavailable if the lock is not free within `wait_s` seconds.

    Polls, since a blocking flock cannot be ended from outside.
    """
    until_s = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise TierUnavailable(
                    f"{path}: another process has kept its lock for {wait_s:g} s; is one stopped, or a host gone?"
                ) from None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


NFS = ("nfs", "nfs4")


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    source: str = ""
    options: tuple[str, ...] = ()
    """Options of the mount and its file system, without duplicates."""

    def option(self, name: str) -> str | None:
        """Return the value of `name=value`, "" for a bare `name`, None if it is not set."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """Return all mounts that this process sees; none if the table is unreadable."""
    try:
        return parse_mountinfo(table.read_text(errors="surrogateescape"))
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse a mount table, see proc(5): `36 35 98:0 /root /point options tags... - kind source options`."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if not separator or len(before) < 6 or len(after) < 2:
            continue
        options = [option for each in (before[5], *after[2:3]) for option in each.split(",") if option]
        found.append(Mount(_plain(before[4]), after[0], _plain(after[1]), tuple(dict.fromkeys(options))))
    return found


def mount_of(path: Path, mounted: list[Mount] | None = None) -> Mount:
    """Return the mount of `path`: the one with the longest mount point above it, and the last of several there."""
    place = Path(os.path.realpath(path))
    best = Mount("", "unknown file system")
    for mount in mounts() if mounted is None else mounted:
        if place.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def file_system_of(path: Path, mounted: list[Mount] | None = None) -> str:
    """Return the type of the file system that holds `path`."""
    return mount_of(path, mounted).kind


def local_locks(mount: Mount) -> tuple[str, str]:
    """Return the mount option that keeps file locks on this host, and the remedy. Both are empty if the mount table shows
    none. A directory's cap holds among processes that see one another's locks.
    """
    if mount.kind in NFS:
        if mount.option("nolock") is not None:
            return "nolock", "Mount it without nolock"
        if (value := mount.option("local_lock")) in ("all", "flock"):
            return f"local_lock={value}", "Mount it with local_lock=none"
    elif mount.kind == "lustre" and mount.option("flock") is None:
        return "localflock" if mount.option("localflock") is not None else "noflock", "Mount it with -o flock"
    elif mount.kind in ("cifs", "smb3") and mount.option("nobrl") is not None:
        return "nobrl", "Mount it without nobrl"
    return "", ""


def _plain(escaped: str) -> str:
    """Decode octal escapes, such as backslash 040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)


ABSENT = (FileNotFoundError, NotADirectoryError)
"""The path or a directory above it does not exist."""
FILE_MODE = 0o600
"""Mode of new files. Chunks are derived from prompts, so they are private."""
_ABOVE_MOUNTS = ("/", "/mnt", "/media", "/srv")


@dataclass(frozen=True)
class Access:
    """The modes of a tier's files and directories."""

    file_mode: int
    directory_mode: int

    def grant(self, path: Path | str | int) -> None:
        """Give a new file (path or descriptor) its mode."""
        if self.file_mode != FILE_MODE:
            os.chmod(path, self.file_mode)

    def make_directory(self, path: Path | str) -> bool:
        """Create a directory; return False if the name was taken. The mode of an existing directory stays unchanged."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return False
        if self.directory_mode != 0o700:
            os.chmod(path, self.directory_mode)
        return True

    def make_root(self, path: Path) -> None:
        """Create a directory and its parents. An existing one stays unchanged."""
        for _ in range(_TRIES):
            if path.is_dir():
                return
            if path.is_symlink():
                missing = f"it is a link to {os.readlink(path)}, which is missing or no directory"
                raise FileNotFoundError(errno.ENOENT, missing, str(path))
            with contextlib.suppress(FileExistsError):  # another process makes it, and perhaps deletes it again
                path.parent.mkdir(parents=True, exist_ok=True)
                os.mkdir(path, 0o700)
                if self.directory_mode != 0o700:  # not every mount has chmod
                    os.chmod(path, self.directory_mode)
                return
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def enforce(self, path: Path | str, status: os.stat_result | None = None, dir_fd: int | None = None) -> None:
        """Set the mode of a directory or file of this user. `status` is what `os.stat` returned for it, if known.

        Does not raise: the file may be missing, and the file system may lack such modes.
        """
        with contextlib.suppress(OSError):
            status = status or os.stat(path, dir_fd=dir_fd)
            mode = self.directory_mode if stat.S_ISDIR(status.st_mode) else self.file_mode
            if stat.S_IMODE(status.st_mode) != mode and status.st_uid == os.geteuid():
                os.chmod(path, mode, dir_fd=dir_fd)

    def owns(self, status: os.stat_result) -> bool:
        """Return True if the owner is this user or root or, with group access, the group is one of ours."""
        if status.st_uid in (0, os.geteuid()):
            return True
        return self.file_mode != FILE_MODE and status.st_gid in (os.getegid(), *os.getgroups())


ACCESS = {"owner": Access(FILE_MODE, 0o700), "group": Access(0o660, 0o2770)}
"""Keyed by `file_access`. Group directories pass their group on (setgid)."""
OWNER = ACCESS["owner"]


def access_as_found(private: Path) -> Access:
    """Return a directory's access, as the mode of its `.tiercache` shows. For tools that change nothing."""
    try:
        shared = stat.S_IMODE(private.stat().st_mode) & 0o077 == 0o070
    except FileNotFoundError:
        return OWNER
    return ACCESS["group"] if shared else OWNER


def open_file(path: Path | str, flags: int, dir_fd: int | None = None) -> int:
    """Open a file without waiting for a pipe or following a link. A new file gets FILE_MODE."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=dir_fd)


@contextmanager
def opened_directory(path: Path | str) -> Iterator[int]:
    """Open a directory for listdir, scandir and calls with `dir_fd`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""Errors for unsupported calls: NFS lacks RENAME_NOREPLACE, FAT lacks links."""
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def rename_new(old: str, new: str, dir_fd: int = _AT_FDCWD) -> None:
    """Rename a file by renameat2(RENAME_NOREPLACE).

    Raises FileExistsError if the new name is taken, an OSError of UNSUPPORTED if the file system lacks the call.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, "this C library has no renameat2", new)
    if _renameat2(dir_fd, os.fsencode(old), dir_fd, os.fsencode(new), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), new)


def warn_of_missing_mount(path: Path) -> None:
    """Warn if a mount is probably missing: `path` is on the root file system, and is either new in an empty directory or
    empty where mount points usually are.
    """
    above = path.parent
    while not above.is_dir() and above != above.parent:
        above = above.parent
    with contextlib.suppress(OSError):
        if path.is_dir():
            state, is_suspicious = "is empty and lies", str(above) in _ABOVE_MOUNTS and not os.listdir(path)
        else:
            state, is_suspicious = "does not exist and is made", str(above) in _ABOVE_MOUNTS or not os.listdir(above)
        if is_suspicious and os.stat(path if path.is_dir() else above).st_dev == os.stat("/").st_dev:
            logger.warning(
                "%s %s on the root file system: if it belongs on a mount, that is missing; then stop, delete what was made "
                "there, and mount it", path, state,
            )  # fmt: skip


def occupied_bytes(status: os.stat_result) -> int:
    """Return the bytes allocated to a file. If the file system does not know them yet, return its size."""
    return status.st_blocks * 512 or (status.st_size if stat.S_ISREG(status.st_mode) else 0)
