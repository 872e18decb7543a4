"""Eviction from a directory that several instances share: by one of them at a time, in the background, in its own order."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tiercache.core.keys import ChunkKey
from tiercache.core.sharing import eviction_goal_bytes
from tiercache.errors import TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.files.changes import Victims
from tiercache.tiers.files.election import Election
from tiercache.tiers.files.listing import answered
from tiercache.tiers.files.scanning import Shelf

logger = logging.getLogger("tiercache.weka")

T = TypeVar("T")

_BATCH_BYTES = 256 << 20
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_IDLE_PAUSE_S = 5.0


@dataclass(frozen=True)
class EvictorSettings:
    high: float = 0.95
    """Part of the cap at which eviction begins."""
    low: float = 0.90
    """Part of the cap down to which it goes."""
    takeover_s: float = 10.0
    """How long the elected instance may be silent before another one takes its place."""


class Evictor:
    """Keeps a shelf below its cap. All methods belong to the event loop; `run` is a task of its own.

    Every instance has one; what they do to the same directory is done by whoever is elected, and the others watch the count
    fall. When the elected one dies, its lock is free at the next look; when it hangs, it is replaced after `takeover_s`.
    """

    def __init__(
        self,
        shelf: Shelf,
        workers: Workers,
        settings: EvictorSettings,
        on_evict: Callable[[list[ChunkKey]], None],
        on_doubt: Callable[[], None],
    ) -> None:
        """`on_evict` is called with keys that are about to be deleted, `on_doubt` when the count seems to be too high."""
        self.shelf = shelf
        self.settings = settings
        self.evicted = 0
        """Chunks that this instance deleted."""
        self.elections = 0
        """How often it tried to be elected."""
        self._workers = workers
        self._on_evict = on_evict
        self._on_doubt = on_doubt
        self._goals: list[int] = []
        self._call = asyncio.Event()
        self._changed = asyncio.Event()
        self._election: Election | None = None
        self._failing = False
        self._beat = b""
        self._beat_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the count is too high, or a tenant has more than his quota."""
        volume = self.shelf.volume
        return (
            volume.ledger.counted_bytes > volume.cap_bytes * self.settings.high or self.shelf.index.excess_bytes > 0
        )

    def evict_if_due(self) -> None:
        """Begin to evict if it is time."""
        if self.is_due:
            self._call.set()

    def look_again(self) -> None:
        """The count was corrected."""
        self._tell()
        self.evict_if_due()

    async def room(self, goal_bytes: int, timeout_s: float) -> bool:
        """Wait until at most `goal_bytes` are in use; whether they are. Cancelling it changes nothing for others."""
        self._goals.append(goal_bytes)
        self._call.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self.shelf.volume.ledger.used_bytes > goal_bytes:
                    await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._goals.remove(goal_bytes)
        return True

    async def run(self) -> None:
        """Evict whenever it is time, until cancelled."""
        try:
            while True:
                await self._call.wait()
                self._call.clear()
                try:
                    await self._keep_below()
                except (OSError, TierUnavailable) as error:
                    logger.warning("%s: eviction failed: %s", self.shelf.volume.root, error)
                    await self._rest(_IDLE_PAUSE_S)
                    self._call.set()  # who called is still there, and who called meanwhile as well
        finally:
            self._resign()

    async def _keep_below(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while self._goals or self.is_due:
            await self._ask(self.shelf.volume.ledger.refresh)
            self._tell()
            if self._goal_bytes() and self.shelf.scanned and await self._elected() and await self._evict():
                pause_s = _FIRST_PAUSE_S
            await self._rest(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S if self._goals else _IDLE_PAUSE_S)

    async def _elected(self) -> bool:
        election = Election(self.shelf.volume.root / ".tiercache" / "evictor", self.shelf.volume.access)
        self._election = election
        self.elections += 1
        if await self._ask(election.campaign):
            return True
        now_s = asyncio.get_running_loop().time()
        beat = await self._ask(election.heartbeat)
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        if now_s - self._beat_s < self.settings.takeover_s:
            return False
        logger.warning("%s: the instance that evicts does not move; taking its place", self.shelf.volume.root)
        self._beat_s = now_s
        return await self._ask(election.take_over)

    async def _evict(self) -> bool:
        """As the elected one; whether anything was freed."""
        shelf, election = self.shelf, self._election
        assert election is not None
        freed_bytes = 0
        try:
            if await self._ask(shelf.volume.remove_stale_writers) or shelf.is_doubtful:
                self._on_doubt()
            while (goal_bytes := self._goal_bytes()) and (victims := shelf.index.evict(min(goal_bytes, _BATCH_BYTES))):
                self._on_evict([key for key, _ in victims])
                parts = [victims[start :: self._workers.threads] for start in range(self._workers.threads)]
                with shelf.leaving(Victims(victims)):
                    done = await asyncio.gather(*(self._ask(shelf.volume.delete_all, part) for part in parts if part))
                self.evicted += sum(part.chunks for part in done)
                freed_bytes += sum(part.freed_bytes for part in done)
                self._tell()
                errors = [part.error for part in done if part.error is not None]
                for key, occupied_bytes in itertools.chain.from_iterable(part.left for part in done):
                    shelf.index.add(key, occupied_bytes)  # as the newest: all others go before it is tried again
                if errors and not self._failing:
                    logger.warning("%s: chunks could not be evicted: %s", shelf.volume.root, errors[0])
                self._failing = bool(errors)
                if errors or not await self._ask(election.beat):
                    break
        finally:
            self._resign()
        if not freed_bytes:
            self._on_doubt()
        return freed_bytes > 0

    def _goal_bytes(self) -> int:
        volume = self.shelf.volume
        goal_bytes = eviction_goal_bytes(volume.ledger.counted_bytes, volume.cap_bytes, self.settings.low, self._goals)
        return max(goal_bytes, self.shelf.index.excess_bytes)

    def _tell(self) -> None:
        """Let those who wait for room look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _resign(self) -> None:
        election, self._election = self._election, None
        if election is not None:
            self._workers.submit(election.resign)

    async def _rest(self, pause_s: float) -> None:
        """A pause that ends when somebody begins to wait for room."""
        try:
            async with asyncio.timeout(pause_s):
                await self._call.wait()
        except TimeoutError:
            return
        self._call.clear()

    async def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        return await answered(self._workers.submit(call, *arguments), str(self.shelf.volume.root))
