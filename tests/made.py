"""What this process has made outside itself, to tell its leaks from other programs' work: shared memory, directories, and
what it told its children to make.

Python says so itself (`sys.addaudithook`), whichever library asked for it. Not seen: what a child names by itself, and what
C code makes without a word to Python.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
_HERE = f"{SHARED_MEMORY}/"
_NEW_NAME = {
    "open": 0,
    "os.mkdir": 0,
    "os.chmod": 0,
    "os.truncate": 0,
    "os.rename": 1,
    "os.link": 1,
    "os.symlink": 1,
}
"""Events that may make a name, and which of their arguments it is."""
_CHILD = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"})

_entries: set[str] = set()
_directories: set[str] = set()
_told: list[str] = []


def watch_what_is_made() -> None:
    """From now on. Called once: an audit hook is for ever."""
    sys.addaudithook(_heard)
    python_shared_memory = importlib.import_module("_posixshmem")  # of multiprocessing; no event tells of it
    shm_open: Callable[..., int] = python_shared_memory.shm_open

    def watched(path: str, *arguments: Any, **named: Any) -> int:
        _entries.add(path.strip("/"))
        return shm_open(path, *arguments, **named)

    python_shared_memory.shm_open = watched  # type: ignore[attr-defined]


def forget_what_was_made() -> None:
    """A test begins."""
    _entries.clear()
    _directories.clear()
    _told.clear()


def is_ours(entry: str) -> bool:
    """Whether this process made or changed this entry of /dev/shm since the test began, or told a child of its name."""
    return entry in _entries or _is_told(entry.removeprefix("tiercache."))


def is_our_place(mount_point: str) -> bool:
    """Whether something is mounted in a directory that this process made since the test began, or told a child of."""
    return _is_told(mount_point) or any(_is_below(mount_point, os.path.realpath(one)) for one in list(_directories))


def _is_told(name: str) -> bool:
    return any(name in text for text in list(_told))


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and not arguments[2] & os.O_CREAT:
        return  # looking at another's: an arena that begins looks for those of the dead
    if (place := _NEW_NAME.get(event)) is not None:
        path = arguments[place]
        if isinstance(path, (str, bytes, os.PathLike)) and (text := os.fsdecode(path)).startswith(_HERE):
            _entries.add(text.removeprefix(_HERE).partition("/")[0])
        elif event == "os.mkdir" and isinstance(path, (str, bytes, os.PathLike)) and os.path.isabs(path):
            _directories.add(os.fsdecode(path))
    elif event in _CHILD:
        _told.extend(_texts(arguments))


def _texts(value: Any) -> Iterable[str]:
    """Every text in an event's arguments, the child's environment apart: it is the same for all."""
    if isinstance(value, (str, bytes, os.PathLike)):
        yield os.fsdecode(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)
