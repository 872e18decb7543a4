"""Stands in for kvikio: a native library cannot see simulated files."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class CuFile:
    """Raises RuntimeError for everything, as kvikio does."""

    def __init__(self, path: str, flags: str = "r") -> None:
        self._descriptor = -1
        self._descriptor = _said(lambda: os.open(path, os.O_RDWR if "+" in flags else os.O_RDONLY))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def pread(self, memory: np.ndarray, length: int, offset: int, task_bytes: int) -> _Transfer:
        return _Transfer(lambda: _whole(os.preadv, self._descriptor, memory[:length], offset))

    def pwrite(self, memory: np.ndarray, length: int, offset: int, task_bytes: int) -> _Transfer:
        return _Transfer(lambda: _whole(os.pwritev, self._descriptor, memory[:length], offset))


class _Transfer:
    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work

    def get(self) -> int:
        return _said(self._work)


def _whole(call: Any, descriptor: int, memory: np.ndarray, offset: int) -> int:
    """kvikio goes on where a call has moved less, and says RuntimeError at the end of the file."""
    done = 0
    while done < memory.nbytes:
        moved = call(descriptor, [memory[done:].data], offset + done)
        if not moved:
            raise RuntimeError("pread read 0 bytes (EOF)")
        done += moved
    return done


def _said(call: Callable[[], int]) -> int:
    try:
        return call()
    except OSError as error:
        raise RuntimeError(str(error)) from error


def make_kvikio() -> Any:
    """The module."""
    return SimpleNamespace(
        CuFile=CuFile,
        defaults=SimpleNamespace(set=lambda settings: None),
        memory_register=lambda memory: None,
        memory_deregister=lambda memory: None,
    )
