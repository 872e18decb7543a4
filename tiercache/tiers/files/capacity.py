"""The capacity counter of a directory, and this process's reservation.

The counter is a small file that all processes change under flock(2). A process reserves bytes in steps. It spends
these, and the bytes of chunks that it deletes, without the lock, and creates no file before it has the bytes. So the
counter is never below what the files occupy. A process that finds a dead one removes the dead one's temporary files.
What the dead one had reserved, for these and about a step more, stays counted until a scan.

A scan corrects the counter if no other process uses bytes meanwhile (`mark` and `recount`), as the owner lock files
(`owners.py`) show.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tiercache.core.index import pause_s
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import ABSENT, OWNER, Access, lock_within, open_file
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.owners import Owner

_FILE = struct.Struct("<8sQQ")
_COUNTED = struct.Struct("<8sQ")
_MAGIC = b"TIERLEDG"
_UNTRUSTED_MAGIC = b"TIERLED?"
_SMALLEST_SHARE = 8
"""A step takes at most the remaining room divided by this, so that idle processes leave room to others."""
_MUCH_SHARE = 4
"""A process asks the others to stop writing for a recount if more than the cap divided by this is lost."""
_QUIET_S = 15.0
"""Longest time for which it asks."""
_QUIET_PAUSE_S = 600.0
"""Shortest time until it asks again."""
_LOCK_WAIT_S = 5.0
_SHORT_WAIT_S = 0.25
"""Longest wait for changes that can be retried later."""


Freeing = Callable[[int], AbstractContextManager[None]]
"""Brackets the unlink of a file that occupies so many bytes."""


class CounterLost(FileNotFoundError):
    """The counter is missing, empty or closed: reopen the directory."""


class Count(NamedTuple):
    """The content of the counter."""

    counted_bytes: int = 0
    changes: int = 0
    """Number of changes, modulo 2**64."""
    trusted: bool = False
    """False until a scan has counted the files that are older than the counter, or while a process asks for a recount.
    Nothing is written then.
    """

    def changed(self, by_bytes: int) -> Count:
        return self._replace(
            counted_bytes=max(0, self.counted_bytes + by_bytes), changes=(self.changes + 1) % (1 << 64)
        )


class Mark(NamedTuple):
    """State at the beginning of a scan, for `recount`."""

    is_alone: bool
    """True if no other process used bytes."""
    others_changes: int
    settled_bytes: int
    released_bytes: int


class Capacity:
    """Counter and reservation. Thread-safe; blocks, so it runs in worker threads.

    A lock that is not available within seconds raises TierUnavailable; CounterLost means that the directory must be
    reopened. A write calls `reserve`, then `cancel`, or `commit` and `settle`. Deletions are bracketed by `deleting`.
    """

    def __init__(
        self,
        path: Path,
        cap_bytes: int,
        step_bytes: int,
        owner: Owner,
        access: Access = OWNER,
        *,
        synced: bool = False,
    ) -> None:
        """`owner` holds its lock file. `synced`: make that durable, since other hosts use the directory. Raises OSError,
        TierUnavailable.
        """
        self.cap_bytes = cap_bytes
        self.step_bytes = step_bytes
        self.missing = False
        """True if the counter was found lost."""
        self._owner = owner
        self._synced = synced
        self._state = threading.Lock()
        """Guards the following fields. Held for arithmetic only."""
        self._unused_bytes = 0
        self._awaited_bytes = 0
        """Unused bytes that were freed for writes which have not reserved them yet."""
        self._in_flight_bytes = 0
        """Bytes reserved for temporary files."""
        self._deleting_bytes = 0
        self._committed_bytes = self._settled_bytes = self._released_bytes = 0
        """Bytes of all files since the start."""
        self._operations = 0
        self._spent = False
        self._is_active: bool | None = False
        """True if the lock file says that this process uses or deletes bytes; None if a failed write may have."""
        self._may_spend = False
        """True if the counter changed since this process became active, which shows others that bytes are used."""
        self._closing = self._closed = False
        self._files = threading.Lock()
        """Guards the following fields. Held while the counter or the lock file is written."""
        self._changes = 0
        self._next_look_s = 0.0
        self._asked_s: float | None = None
        """The time at which this process made the counter untrusted, if that has had no effect yet."""
        self._next_quiet_s = 0.0
        self._path = path
        self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            access.enforce(path)
            with self._locked(_LOCK_WAIT_S):
                found = _read(self._descriptor)
                if found is None:
                    found = Count()
                    self._store(found)
                self._count = found
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def counted_bytes(self) -> int:
        """The last known counter, reservations included. Non-blocking."""
        return self._count.counted_bytes

    @property
    def used_bytes(self) -> int:
        """`counted_bytes` without this process's reservation. Bytes that were freed for a write count as used."""
        return max(0, self._count.counted_bytes - max(0, self._unused_bytes - self._awaited_bytes))

    @property
    def trusted(self) -> bool:
        """True if the last known counter includes all files."""
        return self._count.trusted

    @property
    def is_behind(self) -> bool:
        """True if `catch_up` may have bytes to return. Non-blocking."""
        return self._is_active is not False

    def is_lost(self) -> bool:
        """Return True if another file, or none, is at the counter's path. Raises OSError when the file system fails."""
        try:
            there = os.stat(self._path)
        except ABSENT:
            return True
        return not os.path.samestat(os.fstat(self._descriptor), there)

    # Writing

    def reserve(self, needed_bytes: int) -> bool:
        """Reserve bytes for a new file or directory. Return False if they do not fit under the cap.

        Bytes that this process has freed fit even above a lowered cap.
        """
        with self._state:
            if self._closing:
                raise self._lost("is closed")
            self._operations += 1
            self._spent = True
            self._awaited_bytes = max(0, self._awaited_bytes - needed_bytes)
            held_bytes = self._take(needed_bytes)
            self._in_flight_bytes += held_bytes
            if held_bytes == needed_bytes and self._may_spend:
                return True
        try:
            self._look_for_dead()
            fits = self._charge(needed_bytes - held_bytes, limited=True)
        except BaseException:
            self.cancel(held_bytes)
            raise
        if not fits:
            self.cancel(held_bytes)
        return fits

    def resize(self, difference_bytes: int) -> None:
        """Adjust the reservation of a temporary file, even above the cap."""
        with self._state:
            taken_bytes = self._take(difference_bytes)  # negative if the file shrank
            self._in_flight_bytes += taken_bytes
        if taken_bytes < difference_bytes:
            try:
                self._charge(difference_bytes - taken_bytes, limited=False)
            except BaseException:
                self._untake(taken_bytes)
                raise

    def commit(self, amount_bytes: int) -> None:
        """Note that a file is about to be published, so that a scan may find it. Raises CounterLost after `close`."""
        with self._state:
            if self._closing:
                raise self._lost("is closed")
            self._in_flight_bytes -= amount_bytes
            self._committed_bytes += amount_bytes

    def uncommit(self, amount_bytes: int) -> None:
        """Undo `commit` of a file that was not published."""
        with self._state:
            self._in_flight_bytes += amount_bytes
            self._committed_bytes -= amount_bytes

    def settle(self, amount_bytes: int, committed_bytes: int | None = None) -> None:
        """End the write of a published file or directory that occupies `amount_bytes`. If `committed_bytes` is more,
        the rest becomes unused. Does not raise.
        """
        rest_bytes = 0 if committed_bytes is None else committed_bytes - amount_bytes
        with self._state:
            self._committed_bytes -= rest_bytes
            self._unused_bytes += rest_bytes
            self._settled_bytes += amount_bytes
        self._end()

    def cancel(self, amount_bytes: int) -> None:
        """End a write that is not published and has no file any more. Does not raise. A temporary file that could not be
        deleted stays counted with 0.
        """
        self._untake(amount_bytes)
        self._end()

    # Deleting

    @contextmanager
    def deleting(self, *, reuse_bytes: int = 0, forced: bool = False) -> Iterator[Freeing]:
        """Bracket the deletion of files. Yields a context manager to call with the bytes of each file, which brackets its
        unlink: the bytes are freed unless that raises. `reuse_bytes` of them are kept for a write that follows, and about
        a step more.

        If the lock file cannot be written on a full device, the deletion goes on, and its bytes stay counted until a
        recount. `forced`: it goes on after any OSError or TierUnavailable here, unless this process has been closed.
        """

        @contextmanager
        def freeing(amount_bytes: int) -> Iterator[None]:
            nonlocal reuse_bytes
            with self._state:
                self._deleting_bytes += amount_bytes
            is_gone = False
            try:
                yield
                is_gone = is_announced
            finally:
                with self._state:
                    self._deleting_bytes -= amount_bytes
                    if is_gone:
                        kept_bytes = min(amount_bytes, reuse_bytes)
                        reuse_bytes -= kept_bytes
                        self._released_bytes += amount_bytes
                        self._unused_bytes += amount_bytes
                        self._awaited_bytes += kept_bytes

        with self._state:
            self._operations += 1
        try:
            is_announced = self._announce(forced=forced)
            yield freeing
        finally:
            with self._state:
                kept_bytes = self._awaited_bytes
                surplus = self._unused_bytes > self.step_bytes + kept_bytes
            if surplus:
                with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):  # `catch_up` tries again
                    self._give_back(self.step_bytes // 2 + kept_bytes)
            self._end()

    def _announce(self, *, forced: bool) -> bool:
        """Show other processes that bytes may become free. Return False if that failed and the deletion goes on."""
        try:
            if self._closed or (self._closing and not self._is_active):
                raise self._lost("is closed")
            if not self._is_active:
                with self._turn(_LOCK_WAIT_S):
                    self._become_active()
        except (OSError, TierUnavailable) as error:
            if self._closing or not (forced or (isinstance(error, OSError) and error.errno in NO_ROOM)):
                raise
            return False
        return True

    # The counter

    def refresh(self) -> bool:
        """Read the counter; return False if another process holds its lock. Does not wait for that."""
        with self._turn(_LOCK_WAIT_S):
            self.missing = self.is_lost()
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            try:
                self._load()
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            return True

    def catch_up(self) -> None:
        """Return unused bytes. Call it periodically while `is_behind`. Does not raise."""
        with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):
            with self._state:
                is_idle, self._spent = not self._spent, False
                self._awaited_bytes = 0
            keep_bytes = 0 if is_idle else self.step_bytes
            try:
                self._give_back(keep_bytes)
            except CounterLost:
                with self._state:
                    self._unused_bytes = 0
            if is_idle:
                self._rest()

    def mark(self) -> Mark:
        """Record the counter's state before a scan."""
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            now = self._load()
            is_alone = not self._owner.active_others()
            with self._state:
                return Mark(is_alone, now.changes - self._changes, self._settled_bytes, self._released_bytes)

    def recount(self, mark: Mark, found_bytes: int) -> int:
        """Correct the counter by a scan that began after `mark`. Return the change.

        Nothing changes if another process used or deleted bytes meanwhile. This process knows its own changes: each existing
        file was seen, published since, or is still reserved.
        """
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            now = self._load()
            active = self._owner.active_others()
            if not mark.is_alone or active or now.changes - self._changes != mark.others_changes:
                self._ask_for_quiet(now, found_bytes + active * self.step_bytes)
                return 0
            self._asked_s = None
            with self._state:
                there_bytes = found_bytes + self._unused_bytes + self._in_flight_bytes
                most_bytes = there_bytes + self._deleting_bytes + self._committed_bytes - mark.settled_bytes
                least_bytes = there_bytes - (self._released_bytes - mark.released_bytes)
            if now.trusted and least_bytes <= now.counted_bytes <= most_bytes:
                return 0
            self._store(now._replace(trusted=True).changed(most_bytes - now.counted_bytes))
            return most_bytes - now.counted_bytes

    def _ask_for_quiet(self, now: Count, known_bytes: int) -> None:
        """Stop the writes of all processes for a recount, if others keep writing and much of the cap is lost: files that
        another program has deleted stay counted until then.

        A process that is stopped in a write would keep all from writing, so this ends after some time. The counter is
        not below what the files occupy, so it may be trusted again.
        """
        now_s = time.monotonic()
        if now.trusted:
            lost_bytes = now.counted_bytes - known_bytes - self._unused_bytes - self._in_flight_bytes
            if lost_bytes > self.cap_bytes // _MUCH_SHARE and now_s >= self._next_quiet_s:
                self._asked_s, self._next_quiet_s = now_s, now_s + _QUIET_PAUSE_S
                self._store(now._replace(trusted=False).changed(0))
        elif self._asked_s is not None and now_s >= self._asked_s + _QUIET_S:
            self._asked_s = None
            self._store(now._replace(trusted=True).changed(0))

    def trust(self) -> None:
        """Mark the counter as complete, for an empty directory."""
        with self.locked():
            if not (now := self._load()).trusted:
                self._store(now._replace(trusted=True).changed(0))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the counter's lock."""
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            yield

    def close(self) -> None:
        """Return the reservation and the lock file now, or when the last running write or deletion ends.

        Waits briefly. Idempotent; does not raise.
        """
        with self._state:
            self._closing = True
        self._end_if_closing()

    def _take(self, most_bytes: int) -> int:
        """Take up to `most_bytes` of the unused bytes. Needs `_state`."""
        taken_bytes = min(self._unused_bytes, most_bytes)
        self._unused_bytes -= taken_bytes
        return taken_bytes

    def _untake(self, amount_bytes: int) -> None:
        with self._state:
            self._in_flight_bytes -= amount_bytes
            self._unused_bytes += amount_bytes

    def _end(self) -> None:
        with self._state:
            self._operations -= 1
        self._end_if_closing()

    def _end_if_closing(self) -> None:
        if self._closing:
            with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):
                pass  # the last thread to leave closes everything

    def _charge(self, missing_bytes: int, *, limited: bool) -> bool:
        """Take the missing bytes of a file from the unused ones, and charge the rest to the counter, or a step if that is
        more. Return False if they exceed the cap.
        """
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            now = self._load()
            room_bytes = self.cap_bytes - now.counted_bytes
            with self._state:
                taken_bytes = self._take(missing_bytes)  # from a step of another thread, for which this one waited
                self._in_flight_bytes += taken_bytes
            missing_bytes -= taken_bytes
            if not missing_bytes and self._may_spend:
                return True
            if limited and missing_bytes > max(0, room_bytes):
                self._untake(taken_bytes)
                return False
            step_bytes = max(missing_bytes, min(self.step_bytes, room_bytes // _SMALLEST_SHARE))
            try:
                self._become_active()
                self._store(now.changed(step_bytes))
            except BaseException:
                self._untake(taken_bytes)
                raise
            with self._state:
                self._in_flight_bytes += missing_bytes
                self._unused_bytes += step_bytes - missing_bytes
                self._may_spend = True
        return True

    def _give_back(self, keep_bytes: int) -> None:
        """Return all unused bytes but `keep_bytes`. Needs `_files`."""
        with self._locked(_SHORT_WAIT_S):
            if self._owner.lost:
                raise self._lost("may have been corrected without the bytes of this process")
            now = self._load()
            with self._state:
                amount_bytes = self._take(max(0, self._unused_bytes - keep_bytes))
            if not amount_bytes:
                return
            try:
                self._store(now.changed(-amount_bytes))
            except OSError:
                with suppress(OSError):
                    if self._load() == now:  # otherwise the bytes may have been returned
                        with self._state:
                            self._unused_bytes += amount_bytes
                raise

    def _rest(self) -> None:
        """Become inactive if nothing is used or deleted. Needs `_files`."""
        with self._state:
            if not self.is_behind or self._operations or self._unused_bytes:
                return
            self._is_active, self._may_spend = None, False
        self._write_activity(False)

    def _become_active(self) -> None:
        """Show other processes that this one uses or deletes bytes. Needs `_files`."""
        if not self._is_active:
            self._write_activity(True)

    def _write_activity(self, is_active: bool) -> None:
        if self._owner.lost:
            raise self._lost("has no lock file of this process beside it")
        self._is_active = None
        self._owner.write(is_active, synced=self._synced and is_active)
        self._is_active = is_active

    def _look_for_dead(self) -> None:
        """Call `Owner.remove_dead` for at most a tenth of the time. Does not raise."""
        began_s = time.monotonic()
        if began_s >= self._next_look_s:
            with suppress(OSError):
                self._owner.remove_dead()
            now_s = time.monotonic()
            self._next_look_s = now_s + pause_s([now_s - began_s])

    def _load(self) -> Count:
        found = _read(self._descriptor)
        if found is None:
            raise self._lost("has no content")
        self._count = found
        return found

    def _store(self, count: Count) -> None:
        """Write the counter. Reads it after an error: a network file system may have lost only the answer."""
        magic = _MAGIC if count.trusted else _UNTRUSTED_MAGIC
        try:
            os.pwrite(self._descriptor, _FILE.pack(magic, count.counted_bytes, count.changes), 0)
        except OSError:
            if _read(self._descriptor) != count:
                raise
        self._changes += 1
        self._count = count

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Hold the counter's lock. Needs `_files`."""
        lock_within(self._descriptor, wait_s, self._path)
        try:
            if self.is_lost():
                self.missing = True
                raise self._lost("is not there any more, or another one is")
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @contextmanager
    def _turn(self, wait_s: float) -> Iterator[None]:
        """Hold `_files`. After `close`, the last thread to leave returns everything."""
        if not self._files.acquire(timeout=wait_s + _SHORT_WAIT_S):
            raise TierUnavailable(f"{self._path}: a change of the count has not ended for {wait_s:g} s")
        try:
            if self._closing:
                raise self._lost("is closed")
            yield
        finally:
            try:
                if self._closing and not self._closed and not self._operations:
                    self._closed = True
                    self._finish()
            finally:
                self._files.release()

    def _finish(self) -> None:
        with suppress(OSError, TierUnavailable):
            if self._unused_bytes:
                self._give_back(0)
        with suppress(OSError):
            os.close(self._descriptor)
        # The lock file leads others to temporary files that could not be deleted.
        self._owner.leave(keep=self._in_flight_bytes > 0)

    def _lost(self, why: str) -> CounterLost:
        return CounterLost(errno.ENOENT, f"the count of bytes {why}", str(self._path))


def _read(descriptor: int) -> Count | None:
    """Return a counter's content, or None. Older files have another number in the last field, and one more."""
    raw = os.pread(descriptor, _FILE.size, 0)
    if len(raw) < _COUNTED.size or raw[:8] not in (_MAGIC, _UNTRUSTED_MAGIC):
        return None
    magic, counted_bytes, changes = _FILE.unpack(raw.ljust(_FILE.size, b"\0"))
    return Count(counted_bytes, changes, magic == _MAGIC)


def counted_in(path: Path) -> int | None:
    """Return the bytes in a counter that is not open; None if there is no trusted one."""
    try:
        descriptor = open_file(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = _read(descriptor)
    finally:
        os.close(descriptor)
    return found.counted_bytes if found is not None and found.trusted else None
