"""What deserves flash: which chunks a tier is willing to write, and how many bytes a day.

Flash wears by writing. Most chunks of a prompt are never asked for again, and a chunk that was asked for twice probably will
be a third time; docs/policies.md has the figures. An admission is told of every use and asked before every write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from tiercache.core.bucket import TokenBucket
from tiercache.core.keys import ChunkKey

DAY_S = 86400.0
REMEMBERED_KEYS = 1 << 20
"""How far back a tier looks for uses, in keys. A million of them take 130 MB, where so many are used."""


class Admission(ABC):
    """Whether a chunk is worth writing. O(1) a call; memory is bounded by the number of keys that are remembered."""

    @abstractmethod
    def used(self, key: ChunkKey) -> None:
        """A request needed the chunk, wherever it came from (computed, read or hot). Once a request."""

    def continued(self, key: ChunkKey) -> None:  # noqa: B027 - most need not know
        """The chunk is needed by a request that continues an earlier one."""

    @abstractmethod
    def admits(self, key: ChunkKey) -> bool:
        """Whether the chunk may be written now. Changes nothing."""


class AdmitAll(Admission):
    """Write-through."""

    def used(self, key: ChunkKey) -> None:
        pass

    def admits(self, key: ChunkKey) -> bool:
        return True


class SecondTouch(Admission):
    """Chunks that two requests needed, as far back as `limit` other keys ago. A key costs about 130 bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._uses: OrderedDict[ChunkKey, bool] = OrderedDict()

    def used(self, key: ChunkKey) -> None:
        uses = self._uses
        if key in uses:
            uses[key] = True
            uses.move_to_end(key)
        else:
            uses[key] = False
            if len(uses) > self.limit:
                uses.popitem(last=False)

    def admits(self, key: ChunkKey) -> bool:
        return self._uses.get(key, False)


class LiveSession(Admission):
    """Chunks of sessions that have come back at least once, those of their newest turns included.

    Which chunks belong together is said by `continued`: whoever sees whole requests calls it with what a request needs,
    when that request continues an earlier one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._live: OrderedDict[ChunkKey, None] = OrderedDict()

    def used(self, key: ChunkKey) -> None:
        if key in self._live:
            self._live.move_to_end(key)

    def continued(self, key: ChunkKey) -> None:
        self._live[key] = None
        self._live.move_to_end(key)
        if len(self._live) > self.limit:
            self._live.popitem(last=False)

    def admits(self, key: ChunkKey) -> bool:
        return key in self._live


ADMISSIONS = ("all", "second_touch", "live_session")


def make_admission(name: str, limit: int) -> Admission:
    """The admission called `name` in the configuration (`flash_admission`), remembering up to `limit` keys."""
    if name == "all":
        return AdmitAll()
    return SecondTouch(limit) if name == "second_touch" else LiveSession(limit)


class Governor:
    """So many bytes a day.

    Unspent ones are kept for up to `burst_s`, so that a busy hour may use what a quiet one left, and no span of a day ever
    sees more than `bytes_per_day`, its burst included: in the long run 4 % less is written. 0 lets everything through.
    """

    def __init__(self, bytes_per_day: float, burst_s: float = 3600.0) -> None:
        self.bytes_per_day = bytes_per_day
        bytes_per_s = bytes_per_day / (DAY_S + burst_s)
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s * burst_s, bytes_per_s * burst_s)

    def allows(self, amount_bytes: int, now_s: float) -> bool:
        """Take `amount_bytes` at `now_s` (monotonic) if they are there; whether they were."""
        if self.bytes_per_day <= 0:
            return True
        if not self._bucket.has(amount_bytes, now_s):
            return False
        self._bucket.take(amount_bytes)
        return True

    def give_back(self, amount_bytes: int) -> None:
        """What was taken was not written after all."""
        self._bucket.give_back(amount_bytes)
