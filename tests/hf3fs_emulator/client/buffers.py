"""`iovec`: shared memory that rings read into and write from, and slices of it."""

from __future__ import annotations

import ctypes
import re
import uuid
from typing import Any

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class iovec:
    """A buffer or, from `iovec[a:b]`, a piece of one, which serves one operation at a time.

    The real one holds the bare address: it keeps neither the shared memory nor the registration alive. This one pins the
    memory until it is released, so that closing the shared memory first raises BufferError instead of leaving a trap.
    """

    def __init__(self, base: Any, id: str, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> None:
        if not _UUID.fullmatch(id):
            raise ValueError(f"id {id!r} is not a valid UUID")
        view = memoryview(base)
        self._pin: Any = (ctypes.c_char * view.nbytes).from_buffer(view)
        self._address = ctypes.addressof(self._pin)
        self._size = view.nbytes
        self._id = uuid.UUID(id).bytes
        self._base: iovec | None = None
        self._result = 0
        self._userdata: object = None
        self._in_flight = False

    def __getitem__(self, key: slice) -> iovec:
        """A piece, with its own `result`. Raises ValueError for a step, TypeError for an index."""
        if not isinstance(key, slice):
            raise TypeError(f"iovec takes a slice, found {type(key).__name__}")
        start, stop, step = key.indices(self._size)
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return self._piece(self._address + start, max(0, stop - start))

    @property
    def result(self) -> int:
        """Bytes moved or -errno, once a `wait` has returned this very object."""
        return self._result

    @property
    def userdata(self) -> object:
        """What `prepare` was given, once a `wait` has returned this very object."""
        return self._userdata

    @property
    def base_off(self) -> int:
        return self._address - self.base._address

    @property
    def base(self) -> iovec:
        """The whole buffer; not part of the real interface."""
        return self if self._base is None else self._base

    def release(self) -> None:
        """Unpin the memory; not part of the real interface, where nothing is pinned."""
        self._pin = None

    def _piece(self, address: int, size: int) -> iovec:
        piece = object.__new__(iovec)
        piece._pin = None
        piece._address = address
        piece._size = size
        piece._id = self._id
        piece._base = self.base
        piece._result = 0
        piece._userdata = None
        piece._in_flight = False
        return piece
