"""What an instance says of itself in its own lock file, for others to read: while it lives, and when it was killed.

- *pledged*: so much of the count is certainly unspent by it. Whoever finds it dead gives that back: where hosts come and go,
  nobody may ever have the directory to himself. Never more than what is unspent.
- *outstanding*: so much it has charged, at most, that is not on the device yet. Never less.
- *owed*: so much it has deleted, at most, that is still in the count. Never less.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

_RECORD = struct.Struct("<8sQQQ")
_MAGIC = b"TIERRECD"


class Standing(NamedTuple):
    pledged_bytes: int = 0
    outstanding_bytes: int = 0
    owed_bytes: int = 0


class Record:
    """`step_bytes`: how far it may lag behind, on the safe side, so that not each change is written. Not thread-safe."""

    def __init__(self, descriptor: int, step_bytes: int, *, synced: bool) -> None:
        self._descriptor = descriptor
        self._step_bytes = step_bytes
        self._synced = synced
        """Other hosts are to see it, also when this one dies."""
        self._written = Standing()
        self._is_certain = True
        """Whether that stands there: a call that failed may have written all the same."""

    @property
    def is_certain(self) -> bool:
        """Whether the last `update` was written."""
        return self._is_certain

    @property
    def is_lost(self) -> bool:
        """Whether its file was deleted, so that nobody else reads it. Raises OSError."""
        return self._descriptor >= 0 and not os.fstat(self._descriptor).st_nlink

    def update(self, spare_bytes: int, outstanding_bytes: int, owed_bytes: int, *, falls: bool = True) -> None:
        """Write what is to be written so that the file is true. Raises OSError, and the file is as it was, or as it
        was to be; the next call writes it again.

        Without `falls`, an amount that stands there and is too much by now may wait, while anything at all is outstanding or
        owed (with steps, those are all the slack there is).
        """
        if self._descriptor < 0:
            return
        step_bytes, written = self._step_bytes, self._written
        pledged_bytes = written.pledged_bytes
        if spare_bytes < pledged_bytes or spare_bytes >= pledged_bytes + 2 * max(1, step_bytes):
            pledged_bytes = max(0, spare_bytes - max(1, step_bytes))
        if not falls and not step_bytes and (outstanding_bytes or owed_bytes):
            outstanding_bytes = max(outstanding_bytes, written.outstanding_bytes)
            owed_bytes = max(owed_bytes, written.owed_bytes)
        wanted = Standing(
            pledged_bytes,
            _above(outstanding_bytes, written.outstanding_bytes, step_bytes),
            _above(owed_bytes, written.owed_bytes, step_bytes),
        )
        if wanted == written and self._is_certain:
            return
        raw = _RECORD.pack(_MAGIC, wanted.pledged_bytes, wanted.outstanding_bytes, wanted.owed_bytes)
        self._is_certain = False
        os.pwrite(self._descriptor, raw, 0)
        if self._synced:
            os.fdatasync(self._descriptor)
        self._is_certain = True
        self._written = wanted


def _above(real_bytes: int, written_bytes: int, step_bytes: int) -> int:
    if written_bytes - 2 * step_bytes <= real_bytes <= written_bytes:
        return written_bytes
    return real_bytes + step_bytes


def read_record(descriptor: int) -> Standing:
    """What stands in an instance's record; all zero where it has none."""
    raw = os.pread(descriptor, _RECORD.size, 0)
    if len(raw) < _RECORD.size:
        return Standing()
    magic, *amounts = _RECORD.unpack(raw)
    return Standing(*amounts) if magic == _MAGIC else Standing()
