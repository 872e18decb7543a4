"""`tiercache.json`: which format a directory has. Synchronous; for worker threads.

Published whole: processes that begin together see either none or all of it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from tiercache.tiers.files.access import Access, open_regular
from tiercache.tiers.files.allocation import NO_ROOM
from tiercache.tiers.files.publishing import UNSUPPORTED, Publish

FORMAT = 1
MANIFEST = "tiercache.json"
_CONTENT = json.dumps({"format": FORMAT, "what": "tiercache chunks"}).encode() + b"\n"
_LARGEST_BYTES = 4096
_ATTEMPTS = 8


class WrongFormat(ValueError):
    """The directory is of another version, or is not ours. The message says what was found."""


def require_manifest(root: Path, temporary: str, ways: Sequence[Publish], access: Access) -> None:
    """See that `root` has a manifest of this format; not where the device has no room for one, which is no reason not to
    serve what lies there.

    `temporary` is a name that nobody else uses. A manifest that a crash left empty or torn is replaced. Raises WrongFormat,
    OSError.
    """
    path = root / MANIFEST
    for _ in range(_ATTEMPTS):
        found = _read(path)
        if found is not None and not _is_torn(found):
            _require_ours(path, found)
            return
        try:
            _write(temporary, _CONTENT)
            access.grant(temporary)
            if found is not None:
                os.replace(temporary, path)
            else:
                _name(temporary, str(path), ways)
            return
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno in NO_ROOM:
                return
            raise
        finally:
            _remove(temporary)
    raise OSError(errno.EAGAIN, "the manifest changes as often as it is looked at", str(path))


def check_manifest(root: Path) -> None:
    """As `require_manifest`, for who only reads: there may be none yet. Raises WrongFormat, OSError."""
    found = _read(root / MANIFEST)
    if found is not None and not _is_torn(found):
        _require_ours(root / MANIFEST, found)


def reads_directly(root: Path) -> bool:
    """Return True if the manifest can be opened with O_DIRECT. Does not raise."""
    try:
        os.close(open_regular(root / MANIFEST, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def reads_back(root: Path) -> bool:
    """Whether the device gives what is in the manifest; what memory has kept of it says nothing. Does not raise."""
    try:
        try:
            descriptor = open_regular(root / MANIFEST, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return False
            descriptor = open_regular(root / MANIFEST, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(-1, _LARGEST_BYTES) as page:  # aligned, as O_DIRECT wants it
                return os.preadv(descriptor, [page], 0) > 0
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _read(path: Path) -> bytes | None:
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = b""
        while len(found) < _LARGEST_BYTES and (more := os.pread(descriptor, _LARGEST_BYTES, len(found))):
            found += more
        return found
    finally:
        os.close(descriptor)


def _is_torn(content: bytes) -> bool:
    """Nothing, zeroes (a power cut leaves those) or the beginning of what we write."""
    rest = content.rstrip(b"\0")
    return rest not in (_CONTENT, _CONTENT[:-1]) and _CONTENT.startswith(rest)


def _require_ours(path: Path, content: bytes) -> None:
    try:
        found = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise WrongFormat(f"{path} is not a manifest of ours: {content[:40]!r}") from error
    if found != FORMAT:
        raise WrongFormat(f"{path.parent} has format {found!r}, this version writes {FORMAT}; use another directory")


def _write(unnamed: str, content: bytes) -> None:
    descriptor = open_regular(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), unnamed)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _name(unnamed: str, path: str, ways: Sequence[Publish]) -> None:
    for way in ways:
        try:
            way(unnamed, path)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.rename(unnamed, path)  # all of it all the same, and another's says the same


def _remove(unnamed: str) -> None:
    try:
        os.unlink(unnamed)
    except OSError:
        return
