"""How many bytes a directory holds: one counter for all processes that use it, and what each of them has reserved.

The counter is a small file that changes under flock(2). A process takes bytes from it in steps, before it uses them, and
keeps what it deletes: both are its reservation, which it spends without asking anybody. Its lock file (`owners.py`) says how
much of the counter is on no device: the reservation and the files that have no name yet. That number is lowered before a
file gets its name, and raised some time after bytes became free. So the counter is never below what the files occupy, and
whoever finds a process dead removes its unfinished files and takes over its number. What is lost by a crash is at most what
the number lags behind, and the step that was being taken.

A scan corrects the counter where nobody else uses bytes meanwhile (`mark` and `recount`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tiercache.core.index import pause_s
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import ABSENT, OWNER, Access, lock_within, open_regular
from tiercache.tiers.files.format import NO_ROOM
from tiercache.tiers.files.owners import Owner, Record

_FILE = struct.Struct("<8sQQQ")
_COUNTED = struct.Struct("<8sQ")
_MAGIC = b"TIERLEDG"
_UNTRUSTED_MAGIC = b"TIERLED?"
_SMALLEST_SHARE = 8
"""A step takes at most one part in so many of the room that is left, so that idle processes do not hold all of it."""
_LAG = 4
"""The number in the lock file lags behind by up to two parts in so many of a step, so that few chunks change it."""
_LOCK_WAIT_S = 5.0
_SHORT_WAIT_S = 0.25
"""For a change that may be made later."""


class CounterLost(FileNotFoundError):
    """The counter is not at its path any more, has no content, or was closed: the directory has to be opened anew."""


class Count(NamedTuple):
    """The content of the counter."""

    counted_bytes: int = 0
    changes: int = 0
    """How often it was changed."""
    identity: int = 0
    """A random number that tells this counter from one that is made after it was deleted."""
    trusted: bool = False
    """False until a scan has counted what lay there when the file was made."""

    def changed(self, by_bytes: int) -> Count:
        return self._replace(counted_bytes=max(0, self.counted_bytes + by_bytes), changes=(self.changes + 1) % (1 << 64))


class Mark(NamedTuple):
    """What `recount` needs to know of the moment at which a scan began."""

    is_alone: bool
    """No other process used bytes then."""
    others_changes: int
    settled_bytes: int
    released_bytes: int
    others_bytes: int
    """The reservations and unfinished files of other processes, about."""


class Capacity:
    """The counter of one directory, and this process's reservation. Thread-safe, for worker threads.

    What waits for a lock raises TierUnavailable after some seconds; CounterLost says that the directory has to be opened
    anew. A write calls `reserve`, then `cancel`, or `commit` and `settle`. A deletion calls `announce`, then `release`.
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
        """`owner` has its lock file by now. `synced`: other hosts use the directory, and must see the number in the lock
        file when this host is gone. Raises OSError, TierUnavailable."""
        self.cap_bytes = cap_bytes
        self.step_bytes = step_bytes
        self.missing = False
        """Whether the counter was found lost."""
        self._owner = owner
        self._synced = synced
        self._state = threading.Lock()
        """Held for arithmetic only. The fields below belong to it."""
        self._unused_bytes = 0
        self._number_bytes = 0
        """Of the counter, what is on no device: unused, or in files without names."""
        self._written_bytes = 0
        """The most that the lock file may say."""
        self._deleting_bytes = 0
        self._committed_bytes = self._settled_bytes = self._released_bytes = 0
        """Of all files since the start."""
        self._operations = 0
        self._spent = False
        self._is_active = False
        """Whether the lock file says that bytes are used or deleted here."""
        self._may_spend = False
        """Whether the counter was changed since we became active: others see from that, too, that bytes are used."""
        self._closing = self._closed = False
        self._files = threading.Lock()
        """Held while the counter or the lock file is written. The fields below belong to it."""
        self._changes = 0
        self._next_look_s = 0.0
        self._path = path
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            access.enforce(path)
            with self._locked(_LOCK_WAIT_S):
                found = _read(self._descriptor)
                if found is None:
                    found = Count(identity=int.from_bytes(os.urandom(8), "little"))
                    self._store(found)
                self._count = found
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def counted_bytes(self) -> int:
        """The counter when this process last looked, reservations included. From memory."""
        return self._count.counted_bytes

    @property
    def used_bytes(self) -> int:
        """As `counted_bytes`, without this process's own reservation."""
        return max(0, self._count.counted_bytes - self._unused_bytes)

    @property
    def trusted(self) -> bool:
        """Whether everything there is counted, as far as this process knows."""
        return self._count.trusted

    @property
    def in_flight_bytes(self) -> int:
        """Reserved for files that have no names yet."""
        with self._state:
            return self._number_bytes - self._unused_bytes

    @property
    def is_behind(self) -> bool:
        """Whether `catch_up` may have something to give back. From memory."""
        return self._is_active

    def is_lost(self) -> bool:
        """Return True if another file, or none, is at the counter's path. Raises OSError when the file system fails."""
        try:
            there = os.stat(self._path)
        except ABSENT:
            return True
        return not os.path.samestat(os.fstat(self._descriptor), there)

    # Writing

    def reserve(self, needed_bytes: int, freed_bytes: int = 0, announced_bytes: int = 0) -> bool:
        """Take bytes for a file that is about to be made; False where they do not fit under the cap.

        `freed_bytes` of `announced_bytes` were deleted to make room. They suffice for as much also above a lowered cap.
        """
        with self._state:
            self._free(freed_bytes, announced_bytes)
            if self._closing:
                raise self._lost("is closed")
            self._operations += 1
            self._spent = True
            held_bytes = self._take(needed_bytes)
            if held_bytes == needed_bytes and self._may_spend:
                return True
        try:
            self._look_for_dead()
            with self._state:
                held_bytes += self._take(needed_bytes - held_bytes)
            fits = self._charge(needed_bytes - held_bytes, limited=True)
        except BaseException:
            self._end(held_bytes)
            raise
        if not fits:
            self._end(held_bytes)
        return fits

    def resize(self, difference_bytes: int) -> None:
        """A file in flight turns out to take more, cap or no cap, or less."""
        with self._state:
            taken_bytes = self._take(difference_bytes)  # less than nothing where it takes less
        try:
            if taken_bytes < difference_bytes:
                self._charge(difference_bytes - taken_bytes, limited=False)
        except BaseException:
            with self._state:
                self._unused_bytes += taken_bytes
            raise

    def add(self, amount_bytes: int) -> None:
        """Count something that is not a file, cap or no cap. Call it only between `reserve` and the end of that write."""
        self.resize(amount_bytes)
        with self._state:
            self._number_bytes -= amount_bytes
            self._committed_bytes += amount_bytes
            self._settled_bytes += amount_bytes
        self._lower_number()

    def commit(self, amount_bytes: int) -> None:
        """A file in flight is about to get its name: it leaves the number in the lock file first. When it raises, the
        file is in flight as before."""
        with self._state:
            if self._closing:
                raise self._lost("is closed")
            self._number_bytes -= amount_bytes
            self._committed_bytes += amount_bytes
        try:
            self._lower_number()
        except BaseException:
            self.uncommit(amount_bytes)
            raise

    def uncommit(self, amount_bytes: int) -> None:
        """It did not get its name, and is in flight again."""
        with self._state:
            self._number_bytes += amount_bytes
            self._committed_bytes -= amount_bytes

    def settle(self, amount_bytes: int) -> None:
        """It has its name; the write ends. Does not raise."""
        with self._state:
            self._settled_bytes += amount_bytes
        self._end(0)

    def cancel(self, amount_bytes: int) -> None:
        """A file in flight is gone, or was never made, or so much of it; the write ends. Does not raise."""
        self._end(amount_bytes)

    # Deleting

    def announce(self, amount_bytes: int) -> None:
        """Files of so many bytes are about to be deleted."""
        with self._state:
            if self._closing:
                raise self._lost("is closed")
            self._deleting_bytes += amount_bytes
            if self._is_active:
                return
        try:
            with self._turn(_LOCK_WAIT_S):
                self._write_number(active=True)
        except BaseException:
            with self._state:
                self._deleting_bytes -= amount_bytes
            raise

    def release(self, freed_bytes: int, announced_bytes: int) -> None:
        """Of `announced_bytes`, `freed_bytes` are gone from the device. Does not raise: what cannot be given back now is
        given back later."""
        with self._state:
            self._free(freed_bytes, announced_bytes)
            surplus = self._unused_bytes > self.step_bytes
            lags = self._number_bytes >= self._written_bytes + 2 * (self.step_bytes // _LAG)
        if surplus or lags:
            with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):
                if surplus:
                    self._give_back(self.step_bytes // 2)
                self._write_number()

    def return_dead(self) -> int:
        """Remove what processes that no longer live have left, and take over their numbers. Returns how many files.

        Raises OSError and TierUnavailable.
        """
        return self._owner.remove_dead(self._take_over)

    # The counter

    def refresh(self) -> bool:
        """Read what others did to the counter; False when one of them changes it at this moment: this does not wait for
        the file's lock."""
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
        """Give back what is not used any more. Called now and then while `is_behind`. Does not raise."""
        with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):
            with self._state:
                is_idle, self._spent = not self._spent, False
            keep_bytes = 0 if is_idle else self.step_bytes
            try:
                self._give_back(keep_bytes)
            except CounterLost:
                with self._state:
                    self._number_bytes -= self._take(self._unused_bytes)
            if is_idle:
                self._rest()

    def mark(self) -> Mark:
        """Note where the counter stands, before a scan begins."""
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            now, others = self._load(), self._owner.others()
            active = [record for record in others if record.is_active]
            numbers = sum(record.number_bytes for record in active if record.counter == now.identity)
            others_bytes = numbers + len(active) * (self.step_bytes // 2)
            with self._state:
                return Mark(
                    not active, now.changes - self._changes, self._settled_bytes, self._released_bytes, others_bytes
                )

    def recount(self, mark: Mark, found_bytes: int) -> int:
        """Correct the counter by a scan that began after `mark` and found so much; return by how much it was changed.

        Nothing is changed where another process used or deleted bytes meanwhile. What this process did is known: all that
        exists was seen, or got its name since, or is not counted among the unused yet.
        """
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            now = self._load()
            are_quiet = not any(record.is_active for record in self._owner.others())
            if not (mark.is_alone and are_quiet and now.changes - self._changes == mark.others_changes):
                return 0
            with self._state:
                there_bytes = found_bytes + self._number_bytes
                most_bytes = there_bytes + self._deleting_bytes + self._committed_bytes - mark.settled_bytes
                least_bytes = there_bytes - (self._released_bytes - mark.released_bytes)
            if now.trusted and least_bytes <= now.counted_bytes <= most_bytes:
                return 0
            self._store(now._replace(trusted=True).changed(most_bytes - now.counted_bytes))
            return most_bytes - now.counted_bytes

    def trust(self) -> None:
        """There is nothing that could be uncounted."""
        with self.locked():
            if not (now := self._load()).trusted:
                self._store(now._replace(trusted=True).changed(0))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which all processes change the counter."""
        with self._turn(_LOCK_WAIT_S), self._locked(_LOCK_WAIT_S):
            yield

    def close(self) -> None:
        """Give back the reservation and the lock file, at once or when the last write that is under way has ended.

        Waits a moment at most. Idempotent; does not raise.
        """
        with self._state:
            self._closing = True
        self._end_if_closing()

    def _take(self, most_bytes: int) -> int:
        """Under `_state`. Of the unused bytes, up to so many."""
        taken_bytes = min(self._unused_bytes, most_bytes)
        self._unused_bytes -= taken_bytes
        return taken_bytes

    def _free(self, freed_bytes: int, announced_bytes: int) -> None:
        """Under `_state`."""
        self._deleting_bytes -= announced_bytes
        self._released_bytes += freed_bytes
        self._number_bytes += freed_bytes
        self._unused_bytes += freed_bytes

    def _end(self, unused_bytes: int) -> None:
        """A write ends, and has not used so much."""
        with self._state:
            self._unused_bytes += unused_bytes
            self._operations -= 1
        self._end_if_closing()

    def _end_if_closing(self) -> None:
        if self._closing:
            with suppress(OSError, TierUnavailable), self._turn(_SHORT_WAIT_S):
                pass  # the last thread to leave it ends everything

    def _charge(self, missing_bytes: int, *, limited: bool) -> bool:
        """Take bytes that are missing for a write from the counter, and a step more for the next ones."""
        with self._turn(_LOCK_WAIT_S):
            with self._locked(_LOCK_WAIT_S):
                now = self._load()
                room_bytes = self.cap_bytes - now.counted_bytes
                if limited and missing_bytes > max(0, room_bytes):
                    return False
                step_bytes = max(missing_bytes, min(self.step_bytes, room_bytes // _SMALLEST_SHARE))
                self._write_number(active=True)
                self._store(now.changed(step_bytes))
                with self._state:
                    self._number_bytes += step_bytes
                    self._unused_bytes += step_bytes - missing_bytes
                    self._may_spend = True
            with suppress(OSError):
                self._write_number()
            return True

    def _give_back(self, keep_bytes: int) -> None:
        """Under `_files`. Leave the unused bytes to others, but for so many."""
        with self._locked(_SHORT_WAIT_S):
            now = self._load()
            with self._state:
                amount_bytes = self._take(max(0, self._unused_bytes - keep_bytes))
                self._number_bytes -= amount_bytes
            if not amount_bytes:
                return
            try:
                self._write_number()
                self._store(now.changed(-amount_bytes))
            except OSError:
                with suppress(OSError):
                    if self._load() == now:  # else it is given back, or nobody knows and it stays counted
                        with self._state:
                            self._number_bytes += amount_bytes
                            self._unused_bytes += amount_bytes
                raise

    def _rest(self) -> None:
        """Under `_files`. Where nothing is used or deleted here, say so."""
        with self._state:
            if not self._is_active or self._operations or self._deleting_bytes or self._unused_bytes:
                return
            self._is_active = self._may_spend = False
        try:
            self._write_number(active=False)
        except OSError:
            self._is_active = True
            raise

    def _lower_number(self) -> None:
        """See to it that the lock file does not say too much."""
        with self._state:
            if self._number_bytes >= self._written_bytes:
                return
        with self._turn(_LOCK_WAIT_S):
            self._write_number(self.step_bytes // _LAG)

    def _write_number(self, lag_bytes: int = 0, *, active: bool | None = None) -> None:
        """Under `_files`. Bring the lock file up to date, less `lag_bytes`."""
        if self._owner.lost:
            raise self._lost("has no lock file of this process beside it")
        with self._state:
            was_active = self._is_active
            active = was_active if active is None else active
            number_bytes = max(0, self._number_bytes - lag_bytes)
            before_bytes = self._written_bytes
            self._written_bytes = max(before_bytes, number_bytes)
        record = Record(number_bytes, self._count.identity, active)
        must_be_seen = number_bytes < before_bytes or (active and not was_active)
        self._owner.write(record, synced=self._synced and must_be_seen)
        with self._state:
            self._written_bytes, self._is_active = number_bytes, active

    def _look_for_dead(self) -> None:
        """As `return_dead`, for no more than a tenth of the time. Does not raise."""
        began_s = time.monotonic()
        if began_s >= self._next_look_s:
            with suppress(OSError, TierUnavailable):
                self.return_dead()
            now_s = time.monotonic()
            self._next_look_s = now_s + pause_s([now_s - began_s])

    def _take_over(self, record: Record, remove: Callable[[], bool]) -> None:
        """`remove` a dead process's lock file. Without room on the device to say so, its number stays counted."""
        amount_bytes = record.number_bytes if record.counter == self._count.identity else 0
        try:
            self.announce(amount_bytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            remove()
            return
        gone = False
        try:
            gone = remove()
        finally:
            self.release(amount_bytes if gone else 0, amount_bytes)

    def _load(self) -> Count:
        found = _read(self._descriptor)
        if found is None:
            raise self._lost("has no content")
        self._count = found
        return found

    def _store(self, count: Count) -> None:
        """A call that failed may have written all the same: a network file system lost the answer."""
        magic = _MAGIC if count.trusted else _UNTRUSTED_MAGIC
        try:
            os.pwrite(self._descriptor, _FILE.pack(magic, count.counted_bytes, count.changes, count.identity), 0)
        except OSError:
            if _read(self._descriptor) != count:
                raise
        self._changes += 1
        self._count = count

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Under `_files`. Hold the counter's lock."""
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
        """Hold `_files`. Once `close` was called and no write is under way, the last to leave gives everything back."""
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
            if self._unused_bytes:  # else nobody waits for the lock
                self._give_back(0)
        with suppress(OSError):
            if self._number_bytes:
                self._write_number(active=False)
        with suppress(OSError):
            os.close(self._descriptor)
        # A number that could not be given back stays in the lock file, for whoever finds that free.
        self._owner.leave(keep=self._number_bytes > 0)

    def _lost(self, why: str) -> CounterLost:
        return CounterLost(errno.ENOENT, f"the count of bytes {why}", str(self._path))


def _read(descriptor: int) -> Count | None:
    """The content of a counter; None where it has none. An earlier version's has other numbers in the last two places."""
    raw = os.pread(descriptor, _FILE.size, 0)
    if len(raw) < _COUNTED.size or raw[:8] not in (_MAGIC, _UNTRUSTED_MAGIC):
        return None
    magic, counted_bytes, changes, identity = _FILE.unpack(raw.ljust(_FILE.size, b"\0"))
    return Count(counted_bytes, changes, identity, magic == _MAGIC)


def counted_in(path: Path) -> int | None:
    """The bytes in a counter that this process has not open; None where there is no count."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = _read(descriptor)
    finally:
        os.close(descriptor)
    return found.counted_bytes if found is not None and found.trusted else None
