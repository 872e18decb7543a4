"""What a simulated device or server is like at the moment: how slow, and what goes wrong how often."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter

from tests.torture.simulation.files import Disk, Torn
from tests.torture.simulation.inodes import SECTOR_BYTES
from tests.torture.simulation.world import Strand, World

KINDS_OF_DISKS = ("eio", "short", "torn", "slow", "hung", "full")
KINDS_OF_SERVERS = ("refused", "partial", "flip", "torn", "lost-answer", "lie", "slow", "hung")

_CALM_S = 40e-6
_SLOW_S = 0.03
_WRITES = frozenset({"pwrite", "pwritev", "write"})
_READS = frozenset({"pread", "preadv", "read"})
_SMALL = ("/ledger", ".lock")
"""What is read and written in one call within one sector: all of it or nothing, as every file system does it."""
_SMALL_CALLS = _WRITES | _READS
_MAY_FAIL = (
    _WRITES | _READS | {"open", "fdatasync", "fsync", "fallocate", "rename", "rename_new", "link", "unlink", "scandir"}
)


class Weather:
    """`rates` says how often each kind of fault strikes; "slow" and "hung" are states. All of it belongs to the world's
    one thread."""

    def __init__(self, world: World, name: str, *, slow_is_fault: bool = True) -> None:
        self.world = world
        self.far_s = _CALM_S
        """How long a request to a server takes at most, when nothing is wrong."""
        self._slow_is_fault = slow_is_fault
        """Whether who is slow may be given up: where a call is many requests, those add up."""
        self.name = name
        self.rates: dict[str, float] = {}
        self.slow = False
        self.hung = False
        self.met: Counter[str] = Counter()
        self.last_fault_s = float("-inf")
        self.last_failure_s = world.now_s - 1e6
        """The last fault that was not just a full device."""
        self.spoilt: set[tuple[str, int]] = set()
        """Files that cannot be read: roots of their disks, and their numbers."""
        self._held: list[Strand] = []
        self._asking: list[asyncio.Future[None]] = []

    @property
    def calm(self) -> bool:
        return not (self.rates or self.hung or (self.slow and self._slow_is_fault))

    @property
    def faultless(self) -> bool:
        """Whether nothing has ever gone wrong."""
        return not self.met and not self.spoilt

    @property
    def fails(self) -> bool:
        """Whether it is more than full."""
        return self.slow or self.hung or bool(self.rates.keys() - {"full"})

    def turn(self, kind: str, rate: float) -> None:
        """Faults of one kind from now on."""
        if kind != "slow" or self._slow_is_fault:
            self.last_fault_s = self.world.now_s
            if kind != "full":
                self.last_failure_s = self.world.now_s
        if kind == "slow":
            self.slow = True
        elif kind == "hung":
            self.hung = True
        else:
            self.rates[kind] = rate

    def clear(self) -> None:
        """No faults any more; what hung goes on."""
        if not self.calm:
            self.last_fault_s = self.world.now_s
            if self.fails:
                self.last_failure_s = self.world.now_s
        self.rates.clear()
        self.slow = self.hung = False
        held, self._held = self._held, []
        for strand in held:
            self.world.wake(strand)
        asking, self._asking = self._asking, []
        for answer in asking:
            loop = answer.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, answer)

    def strikes(self, kind: str) -> bool:
        rate = self.rates.get(kind)
        if rate is None or self.world.chance.random() >= rate:
            return False
        self.met[kind] += 1
        self.last_fault_s = self.world.now_s
        return True

    def below(self, end: int) -> int:
        return int(self.world.chance.random() * end)

    # For threads

    def hold(self) -> None:
        """The current strand waits for as long as a call takes."""
        chance = self.world.chance.random()
        if self.hung or self.slow:
            self._hold(chance)
        elif chance < 0.2:
            self.world.pause(chance * 5 * _CALM_S)

    def _hold(self, chance: float) -> None:
        world = self.world
        if self.hung:
            self.met["hung"] += 1
            while self.hung:
                strand = world.current
                assert strand is not None
                self._held.append(strand)
                world.wait()
        else:
            self.met["slow"] += 1
            world.pause(chance * _SLOW_S)

    def before(self, name: str, disk: Disk, target: object) -> int | Torn | None:
        """At the beginning of each call to a disk: as `FileCalls` wants it."""
        self.hold()
        if not self.rates and not self.spoilt:
            return None
        if self.spoilt and name in _READS and self.is_spoilt(disk, _number(disk, target)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        is_small = name in _SMALL_CALLS and isinstance(target, str) and target.endswith(_SMALL)
        if name == "mmap" and self.strikes("no-memory"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if name in _MAY_FAIL and self.strikes("eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name in _WRITES and self.strikes("torn"):
            return Torn(SECTOR_BYTES * self.below(2) if is_small else self.below(8192))
        if name in _WRITES and self.strikes("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if (name in _WRITES or name in _READS) and not is_small and self.strikes("short"):
            return 4096 * self.below(3)
        return None

    def is_spoilt(self, disk: Disk, number: int | None) -> bool:
        """Whether a read of the file with that number meets that it can be read no more."""
        if (disk.root, number) not in self.spoilt:
            return False
        self.met["spoilt"] += 1
        return True

    # For coroutines

    async def moment(self) -> None:
        """What a request takes."""
        while self.hung:
            self.met["hung"] += 1
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._asking.append(answer)
            await answer
        chance = self.world.chance.random()
        if self.slow:
            self.met["slow"] += 1
            await asyncio.sleep(chance * _SLOW_S)
        elif chance < 0.7:
            await asyncio.sleep(chance * self.far_s)


def _number(disk: Disk, target: object) -> int | None:
    try:
        return disk.find(str(target)).number
    except OSError:
        return None


def _set(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)
