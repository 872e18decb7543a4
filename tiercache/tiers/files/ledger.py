"""How many bytes a directory holds, counted across the processes that share it.

The count lies in a small file and changes under a file lock, so a cap is the directory's and not each process's. It is
charged before a write and credited after a deletion: what a crash leaves is an over-count, which `reckon` corrects. In
memory is what we last saw there.

Where many instances share a mount, one locked change a chunk would be what they all wait for. With an *allowance* an
instance charges the file in large steps and spends them alone, and credits it in small ones; what it does not spend, it
gives back.

Each instance also says, in a record of its own (`record.py`), how much of the count is not on the device yet, and how much
is gone from there and still in the count. That is what makes it possible to correct the count beside others that write.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tiercache.core.reckoning import reckoned_bytes
from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import OWNER, Access
from tiercache.tiers.files.count_file import Count, CountFile, LedgerLost
from tiercache.tiers.files.record import Record

_SMALLEST_SHARE = 8
"""A step takes at most one part in so many of the room that is left: instances that do not write must not hold it all."""
_STEPS = 16
"""Freed bytes are credited, and a record is renewed, each time that so small a part of an allowance has come together."""
_LOCK_WAIT_S = 5.0
_SHORT_WAIT_S = 0.25
"""For what can be made up for later."""


class _Done(NamedTuple):
    """What is over. Noted even while the lock is somebody else's, or it would stay counted for good."""

    settled_bytes: int = 0
    unspent_bytes: int = 0
    announced_bytes: int = 0
    freed_bytes: int = 0


class Ledger:
    """Thread-safe. Whatever waits for the file's lock raises TierUnavailable after some seconds; LedgerLost says that the
    file is gone."""

    def __init__(
        self, path: Path, cap_bytes: int, allowance_bytes: int = 0, pledge: int = -1, access: Access = OWNER
    ) -> None:
        """`pledge` is the descriptor of the file for our record, which nobody else writes; not closed here. Needed with an
        allowance."""
        self.cap_bytes = cap_bytes
        self.allowance_bytes = allowance_bytes
        """How much of the count may be charged and not used, at most; 0: every change goes to the file."""
        self._lock = threading.Lock()
        self._closing = self._closed = False
        self._on_end: Callable[[], None] = lambda: None
        self._spare_bytes = 0
        self._in_flight_bytes = 0
        """Charged for files that do not have their names yet."""
        self._announced_bytes = 0
        """Of files that are being deleted."""
        self._freed_bytes = 0
        """Of files that are deleted, and not yet taken off the count."""
        self._done: deque[_Done] = deque()
        self._spent = False
        self.missing = False
        """Whether `refresh` found that the file is lost."""
        self._record = Record(pledge, allowance_bytes // _STEPS, synced=allowance_bytes > 0)
        self._file = CountFile(path, access, _LOCK_WAIT_S)
        self._count = self._file.found

    @property
    def counted_bytes(self) -> int:
        """What the file said when we last looked, our own unspent allowance and that of others included."""
        return self._count.counted_bytes

    @property
    def used_bytes(self) -> int:
        """As `counted_bytes`, without what of it we know to be unused. From memory, at once."""
        return max(0, self._count.counted_bytes - self._spare_bytes - self._freed_bytes)

    @property
    def trusted(self) -> bool:
        """Whether everything there is counted, as far as we know."""
        return self._count.trusted

    @property
    def is_behind(self) -> bool:
        """Whether the files say less, or more, than they should by now: what was due could not be written, and will be with
        the next change, or with `catch_up`. At once, from any thread."""
        return bool(self._done) or self._owes_credit or not self._record.is_certain

    def catch_up(self, *, falls: bool = True) -> None:
        """Try again what could not be written. `falls`: as for `Record.update`. Does not raise."""
        with suppress(TierUnavailable, OSError), self._open_lock(_SHORT_WAIT_S):
            if self._owes_credit:
                self._credit()
            self._note(eager=False, falls=falls)

    def is_lost(self) -> bool:
        return self._file.is_lost()

    def charge(self, amount_bytes: int, freed_bytes: int = 0, announced_bytes: int = 0) -> bool:
        """Count `amount_bytes` for a file that is about to be made, if they fit under the cap; whether they did.

        `freed_bytes` of `announced_bytes` (see `announce`) were deleted to make room for it. They are taken off in any
        case, and suffice for as much even above the cap, where it was lowered: the count does not grow.
        """
        with self._open_lock(_LOCK_WAIT_S, _Done(announced_bytes=announced_bytes, freed_bytes=freed_bytes)):
            missing_bytes = amount_bytes - self._spare_bytes
            if missing_bytes > 0 and not self._charge_file(missing_bytes, freed_bytes):
                return False
            self._note(spare_bytes=self._spare_bytes - amount_bytes, falls=False)
            self._spare_bytes -= amount_bytes
            self._in_flight_bytes += amount_bytes
            self._spent = True
            self._note(eager=False, falls=False)
            if self._owes_credit:
                self._credit()
            return True

    def correct(self, difference_bytes: int) -> None:
        """What was charged for a file turns out to be more, or less; less by all of it when there will be no file.

        More is counted cap or no cap. Less never raises: what cannot be taken off now is taken off later.
        """
        if difference_bytes < 0:
            self._done.append(_Done(unspent_bytes=-difference_bytes))
            self.catch_up()
        if difference_bytes <= 0:
            return
        with self._open_lock(_LOCK_WAIT_S):
            missing_bytes = difference_bytes - self._spare_bytes
            if missing_bytes > 0:
                self._note(outstanding_bytes=self._outstanding_bytes + missing_bytes)
                with self._file.locked(_LOCK_WAIT_S):
                    self._store(self._current().changed(charged_bytes=missing_bytes))
                self._spare_bytes += missing_bytes
            self._note(spare_bytes=self._spare_bytes - difference_bytes)
            self._spare_bytes -= difference_bytes
            self._in_flight_bytes += difference_bytes
            self._note(eager=False)

    def settle(self, amount_bytes: int) -> None:
        """A file that was charged for has its name now. Does not raise."""
        self._done.append(_Done(settled_bytes=amount_bytes))
        self.catch_up(falls=False)

    def add(self, amount_bytes: int) -> None:
        """Something is there that was not charged for, cap or no cap."""
        with self.locked():
            self._store(self._current().changed(charged_bytes=amount_bytes))

    def announce(self, amount_bytes: int) -> None:
        """Files of so many bytes are about to be deleted: `release` or `charge` say which were."""
        with self._open_lock(_LOCK_WAIT_S):
            self._announced_bytes += amount_bytes
            try:
                self._note(falls=False)
            except BaseException:
                self._announced_bytes -= amount_bytes
                raise

    def release(self, freed_bytes: int, announced_bytes: int = 0) -> None:
        """Of `announced_bytes`, `freed_bytes` are gone from the device: credit them to everybody.

        Does not raise: what cannot be taken off now is taken off later.
        """
        self._done.append(_Done(announced_bytes=announced_bytes, freed_bytes=freed_bytes))
        self.catch_up()

    def refresh(self) -> bool:
        """See what others did, and give back what was not touched since the last time.

        False when somebody changes the count at this moment: nothing here waits for the file's lock.
        """
        with self._open_lock(_LOCK_WAIT_S):
            self.missing = self._file.is_lost()
            idle_bytes = 0 if self._spent else self._spare_bytes
            self._spent = False
            changes = bool(idle_bytes or self._freed_bytes)
            try:
                with self._file.locked_now(exclusive=changes):
                    self._count = self._current()
                    if changes:
                        self._give_back(idle_bytes)
            except BlockingIOError:
                return False
            self._note(eager=False)
            return True

    def mark(self) -> Count:
        """Where the count stands before files are looked at: for `reckon`, once they were."""
        with self.locked():
            self._count = self._current()
            return self._count

    @property
    def outstanding_bytes(self) -> int:
        """What this instance has charged and that is not, for certain, on the device under its name."""
        with self._open_lock(_LOCK_WAIT_S):
            return self._outstanding_bytes

    def reckon(self, marked: Count, found_bytes: int, outstanding_bytes: int, others_owe: Callable[[], int]) -> int:
        """Correct the count: everything was looked at since `marked`, and `found_bytes` were there.

        `outstanding_bytes` is what was charged and not there yet, by anybody, when that began. `others_owe` says what other
        instances have deleted, or may have, and not taken off; it is called under the file's lock. Returns by how much the
        count was changed. See `core/reckoning.py` for why that is safe beside others.
        """
        with self._open_lock(_LOCK_WAIT_S), self._file.locked(_LOCK_WAIT_S):
            now = self._current()
            owed_bytes = others_owe() + self._announced_bytes + self._freed_bytes
            right_bytes = reckoned_bytes(
                now.counted_bytes if now.trusted else None,
                found_bytes=found_bytes,
                outstanding_bytes=outstanding_bytes,
                owed_bytes=owed_bytes,
                charged_bytes=now.charged_bytes - marked.charged_bytes,
                credited_bytes=now.credited_bytes - marked.credited_bytes,
            )
            self._store(now._replace(counted_bytes=right_bytes, trusted=True))
            return right_bytes - now.counted_bytes

    def trust(self) -> None:
        """There is nothing that could be uncounted."""
        with self.locked():
            if not (now := self._current()).trusted:
                self._store(now._replace(trusted=True))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that all processes take to change the count."""
        with self._open_lock(_LOCK_WAIT_S), self._file.locked(_LOCK_WAIT_S):
            yield

    def close(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Give back what is not spent, if that can be done at once, and call `on_end`. Idempotent; does not raise.

        Waits a moment at most. Who is still at work here, as he waits for the file's lock, does both when he ends.
        """
        self._on_end = on_end
        self._closing = True
        with suppress(TierUnavailable), self._lock_within(_SHORT_WAIT_S):
            pass  # whoever leaves the lock last ends it

    @property
    def _outstanding_bytes(self) -> int:
        return self._spare_bytes + self._in_flight_bytes

    @property
    def _owes_credit(self) -> bool:
        """More than may come together before it is taken off the count."""
        return self._freed_bytes > self.allowance_bytes // _STEPS

    def _take_up(self) -> None:
        """What ended meanwhile."""
        while self._done:
            done = self._done.popleft()
            self._announced_bytes = max(0, self._announced_bytes - done.announced_bytes)
            self._in_flight_bytes = max(0, self._in_flight_bytes - done.settled_bytes - done.unspent_bytes)
            spare_bytes = min(self._spare_bytes + done.unspent_bytes, max(self.allowance_bytes, self._spare_bytes))
            surplus_bytes = self._spare_bytes + done.unspent_bytes - spare_bytes
            self._spare_bytes = spare_bytes
            self._freed_bytes += done.freed_bytes + surplus_bytes

    def _charge_file(self, missing_bytes: int, freed_bytes: int) -> bool:
        with self._file.locked(_LOCK_WAIT_S):
            now = self._count = self._current()
            self._drop_unseen()
            after = now.changed(credited_bytes=self._freed_bytes)
            room_bytes = self.cap_bytes - after.counted_bytes
            fits = missing_bytes <= room_bytes or missing_bytes <= freed_bytes
            step_bytes = max(missing_bytes, min(self.allowance_bytes, room_bytes // _SMALLEST_SHARE)) if fits else 0
            if fits:
                # Before it counts: whoever sees the charge must see what it is for.
                self._note(outstanding_bytes=self._outstanding_bytes + step_bytes, falls=False)
            elif after == now:
                return False
            self._store_crediting(after.changed(charged_bytes=step_bytes))
            self._spare_bytes += step_bytes
        if not fits:
            self._note(eager=False)
        return fits

    def _credit(self) -> None:
        """Take off what was freed, if that can be done at once; else it is tried again with the next change."""
        with suppress(TierUnavailable, OSError), self._file.locked(_SHORT_WAIT_S):
            self._count = self._current()
            self._give_back(0)

    def _give_back(self, spare_bytes: int) -> None:
        """Under the file's lock, with `_count` as it stands there."""
        if self._drop_unseen():
            return
        self._note(spare_bytes=self._spare_bytes - spare_bytes)
        self._store_crediting(self._count.changed(credited_bytes=spare_bytes + self._freed_bytes), spare_bytes)

    def _drop_unseen(self) -> bool:
        """Where our record was deleted, others have perhaps taken off already what it said. What we owe then stays counted
        until the count is reckoned anew; whether that is so."""
        is_lost = self._record.is_lost
        if is_lost:
            self._spare_bytes = self._freed_bytes = 0
        return is_lost

    def _store_crediting(self, count: Count, spare_bytes: int = 0) -> None:
        """Store a count from which what was freed and so much of what is spare is taken off: never twice. A call that
        fails may have written all the same (a network file system lost the answer); what is not known stays counted."""
        freed_bytes, self._freed_bytes = self._freed_bytes, 0
        self._spare_bytes -= spare_bytes
        try:
            self._store(count)
        except OSError:
            standing = None
            with suppress(OSError):
                standing = self._file.load()
            if standing == count:
                self._count = count
                return
            if standing == self._count:
                self._freed_bytes += freed_bytes
                self._spare_bytes += spare_bytes
            raise

    def _note(
        self,
        spare_bytes: int | None = None,
        outstanding_bytes: int | None = None,
        *,
        eager: bool = True,
        falls: bool = True,
    ) -> None:
        """Keep our record true. `eager`: before something changes, so it has to be written; else it may be late. `falls`: as
        for `Record.update`; a chunk that is written does not change the record twice, where the next one is on its way."""
        spare_bytes = self._spare_bytes if spare_bytes is None else min(spare_bytes, self._spare_bytes)
        outstanding_bytes = self._outstanding_bytes if outstanding_bytes is None else outstanding_bytes
        try:
            owed_bytes = self._announced_bytes + self._freed_bytes
            self._record.update(max(0, spare_bytes), outstanding_bytes, owed_bytes, falls=falls)
        except OSError:
            if eager:
                raise

    def _store(self, count: Count) -> None:
        self._file.store(count)
        self._count = count

    def _current(self) -> Count:
        return self._file.load() or self._count

    @contextmanager
    def _open_lock(self, wait_s: float, done: _Done | None = None) -> Iterator[None]:
        """`done` is noted in any case, and not before it is our turn: whoever came first would give what it freed to a file
        of his own, and it would suffice for ours as well."""
        try:
            with self._lock_within(wait_s):
                if done is not None:
                    self._done.append(done)
                    done = None
                if self._closing:
                    raise LedgerLost(errno.ENOENT, "the ledger is closed", str(self._file.path))
                self._take_up()
                yield
        finally:
            if done is not None:
                self._done.append(done)

    @contextmanager
    def _lock_within(self, wait_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=wait_s + _SHORT_WAIT_S):
            raise TierUnavailable(f"{self._file.path}: a change of the count has not ended for {wait_s:g} s")
        try:
            yield
        finally:
            ended = self._closing and not self._closed
            try:
                if ended:
                    self._finish()
            finally:
                self._lock.release()
                if ended:
                    self._on_end()

    def _finish(self) -> None:
        self._closed = True
        self._take_up()
        with suppress(OSError, TierUnavailable):  # it stays counted until the count is reckoned anew
            if self._spare_bytes or self._freed_bytes:
                with self._file.locked(_SHORT_WAIT_S):
                    self._count = self._current()
                    self._give_back(self._spare_bytes)
        self._file.close()
