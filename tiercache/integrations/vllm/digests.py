"""SHA-256 of large files, kept beside the files, or in the user's cache if that directory is not writable.

A kept digest is valid for a file with the same size, modification time, change time and inode. The kernel sets the change
time whenever a file is written, and no program can set it back. A file that was changed within the resolution of the file
system's clock before it was read is not kept. Files of the Hugging Face cache are named by their SHA-256 and are not
read.

Several processes may hash the same files. Each begins with another file, takes over what others have finished, and
publishes its results with a rename; the last process to end knows everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger("tiercache.vllm")

KEPT = ".tiercache-digests.json"
_FORMAT = 1
_PART_BYTES = 1 << 20
_MOST_THREADS = 16
_STALL_S = 30.0
"""Not a byte for so long: the files' mount hangs."""
_GRAIN_NS = 2_000_000_000
"""The coarsest clock of a file system that is still met: two seconds."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int, int, int]
"""Size in bytes, modification and change time in ns, inode."""


class FileChanged(OSError):
    """A file was written to while it was read, so there is no digest of it."""


def digests_of(files: Mapping[str, Path], directory: Path) -> dict[str, str]:
    """SHA-256 of each of `files`, as hex. Reads what is not known already, once, in threads.

    `files` lie below `directory` and are known there by their names in the mapping. Raises OSError: a file cannot be read,
    changes while it is (FileChanged), or does not come for 30 s (TimeoutError).
    """
    return _Digests(files, directory).all()


class _Digests:
    def __init__(self, files: Mapping[str, Path], directory: Path) -> None:
        self._files = files
        self._places = list(_places(directory))
        self._found: dict[str, str] = {}
        self._stamps: dict[str, Stamp] = {}
        """Of the digests that may be kept."""
        self._lock = threading.Lock()
        self._left: list[str] = []
        self._failed: OSError | None = None
        self._bytes_read = 0
        self._parts_read = 0
        """How far all threads are: what hangs does not move on."""

    def all(self) -> dict[str, str]:
        for name, path in self._files.items():
            if (digest := _name_of_blob(path)) is not None:
                self._found[name] = digest
        self._take_kept()
        unknown = self._files.keys() - self._found.keys()
        if unknown:
            self._left = random.sample(sorted(unknown), len(unknown))
            self._read_all()
        kept = self._kept()
        if any(kept.get(name) != (stamp, self._found[name]) for name, stamp in self._stamps.items()):
            # Another process has published without what we had added meanwhile.
            self._keep()
        return self._found

    def _read_all(self) -> None:
        began_s = time.monotonic()
        count = min(len(self._left), len(os.sched_getaffinity(0)), _MOST_THREADS)
        # Daemons: a mount that hangs must not hang the engine's exit.
        threads = [threading.Thread(target=self._read, name="tiercache-digest", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        parts, moved_s = -1, time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                if self._parts_read != parts:
                    parts, moved_s = self._parts_read, time.monotonic()
                elif time.monotonic() - moved_s > _STALL_S:
                    raise TimeoutError(f"not a byte of {', '.join(sorted(self._files))} came for {_STALL_S:.0f} s")
        if self._failed is not None:
            raise self._failed
        took_s = time.monotonic() - began_s
        logger.info("read %.2f GB of weights for their identity in %.1f s", self._bytes_read / 1e9, took_s)

    def _read(self) -> None:
        """In a thread: one file after the other, as long as there are any and none has failed."""
        while True:
            with self._lock:
                if self._failed is not None or not self._left:
                    return
                name = self._left.pop()
                self._take_kept()
                if name in self._found:
                    continue
            try:
                digest, stamp, settled = self._sha256(self._files[name])
            except OSError as error:
                with self._lock:
                    self._failed = self._failed or error
                return
            with self._lock:
                self._found[name] = digest
                self._bytes_read += stamp[0]
                if settled:
                    self._stamps[name] = stamp
                    self._keep()

    def _sha256(self, path: Path) -> tuple[str, Stamp, bool]:
        """Digest and stamp of the file, and whether no change of it can be hidden from the stamp."""
        part = memoryview(bytearray(_PART_BYTES))
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            before = stamp_of(os.fstat(file.fileno()))
            settled = time.time_ns() - max(before[1:3]) >= _GRAIN_NS
            while read := file.readinto(part):
                digest.update(part[:read])
                self._parts_read += 1
            if stamp_of(os.fstat(file.fileno())) != before:
                raise FileChanged(f"{path} was written to while it was read for the model's identity")
        return digest.hexdigest(), before, settled

    def _take_kept(self) -> None:
        for name, (stamp, digest) in self._kept().items():
            if name in self._files and name not in self._found and stamp_of(self._files[name].stat()) == stamp:
                self._found[name], self._stamps[name] = digest, stamp

    def _kept(self) -> dict[str, tuple[Stamp, str]]:
        """What is kept in all places, the first of which counts."""
        kept: dict[str, tuple[Stamp, str]] = {}
        for place in reversed(self._places):
            kept |= _read_kept(place)
        return kept

    def _keep(self) -> None:
        """Add what is known to the first place that can be written to."""
        for place in self._places:
            known = _read_kept(place)
            ours = {name: (stamp, self._found[name]) for name, stamp in self._stamps.items()}
            try:
                _write_kept(place, known | ours)
            except OSError as error:
                logger.debug("digests cannot be kept as %s: %s", place, error)
            else:
                return
        logger.info("digests of the model's files can be kept nowhere: each start reads them; model_id spares that")


def _places(directory: Path) -> Iterator[Path]:
    yield directory / KEPT
    with contextlib.suppress(RuntimeError):  # no home directory
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
        yield Path(cache) / "tiercache" / "digests" / f"{name}.json"


def _read_kept(place: Path) -> dict[str, tuple[Stamp, str]]:
    """Empty where there is nothing, or something else than `_write_kept` wrote."""
    try:
        kept = json.loads(place.read_bytes())
        files = kept["files"]
        if kept["format"] != _FORMAT or kept["check"] != _check(files):
            return {}
        return {name: (tuple(stamp), digest) for name, (stamp, digest) in files.items() if _SHA256.fullmatch(digest)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _write_kept(place: Path, kept: Mapping[str, tuple[Stamp, str]]) -> None:
    files = {name: [list(stamp), digest] for name, (stamp, digest) in sorted(kept.items())}
    place.parent.mkdir(parents=True, exist_ok=True)
    making = place.with_name(f"{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        making.write_text(json.dumps({"format": _FORMAT, "files": files, "check": _check(files)}, indent=1))
        making.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            making.unlink()
        raise


def _check(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _name_of_blob(path: Path) -> str | None:
    """The SHA-256 in the name of a file of the Hugging Face cache: snapshots/COMMIT/NAME links to blobs/SHA256.

    One link and no further: a blob may itself be a link, to a file that is named by another hash.
    """
    try:
        blob = path.parent / os.readlink(path)
        # The link was made when the blob was whole. One that is newer was written to since, and its name is of no worth.
        newer = path.stat().st_mtime_ns - path.lstat().st_mtime_ns > _GRAIN_NS
    except OSError:
        return None
    if newer or blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return blob.name
