"""All rings of a tier, their memory, and what happens when the daemon behind them dies or hangs."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.hf3fs.ring import Buffers, Part, Piece, RegisteredMemory, Ring, RingSettings, Transfer, in_parts

logger = logging.getLogger("tiercache.hf3fs")

def load_library() -> ModuleType:
    """`hf3fs_fuse.io`. Raises ConfigError with what is missing."""
    try:
        import hf3fs_fuse.io
    except ImportError as error:
        raise ConfigError(
            f"the 3FS tier needs hf3fs_py_usrbio and hf3fs_fuse, which cannot be imported ({error}): build them from "
            "the 3FS sources"
        ) from error
    module: ModuleType = hf3fs_fuse.io
    return module


_JOIN_S = 2.0
_LET_GO_S = 1.0
"""How long a daemon may take to unmap what is not registered any more."""
DEAD_MOUNT = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)



@dataclass
class Equipment:
    """What one daemon knows of us."""

    rings: dict[bool, list[Ring]]
    """By direction: True reads."""
    buffers: Buffers
    registrations: int
    """A descriptor of the daemon's list of registrations: whether it can be read says whether that daemon is alive."""

    @property
    def works(self) -> bool:
        return all(ring.works for ring in self.all_rings)

    @property
    def all_rings(self) -> list[Ring]:
        return self.rings[True] + self.rings[False]


def equip(
    library: Any,
    mount: Path,
    settings: RingSettings,
    make_buffers: Callable[[], Buffers],
    loop: asyncio.AbstractEventLoop,
    settled: Callable[[list[Transfer]], None],
) -> Equipment:
    """Nothing is kept when it raises (OSError, ConfigError)."""
    registrations = os.open(mount / "3fs-virt" / "iovs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    rings: dict[bool, list[Ring]] = {True: [], False: []}
    buffers = None
    try:
        # Rings first: they cost little, and a mount that refuses them is found out before memory is touched.
        for read in (True, False):
            for number in range(settings.rings):
                name = f"hf3fs-{'read' if read else 'write'}-{number}"
                # No variable refers to the native ring: its thread takes it away, or this one if that cannot be started.
                rings[read].append(
                    Ring(
                        library.make_ioring(
                            str(mount), settings.entries, read, settings.io_depth, None, None, settings.numa
                        ),
                        settings, read=read, loop=loop, settled=settled, name=name,
                    )
                )  # fmt: skip
        buffers = make_buffers()
        buffers.registered.register(library, str(mount), settings.numa)
    except BaseException:
        _stop(rings[True] + rings[False])
        if buffers is not None:
            buffers.close()
        os.close(registrations)
        raise
    return Equipment(rings, buffers, registrations)


def is_dead(registrations: int, name: str) -> bool:
    """Whether the daemon behind this descriptor is dead, or another one is there that never knew memory of this name."""
    try:
        return not any(
            os.path.basename(os.readlink(link, dir_fd=registrations)) == name
            for link in os.listdir(registrations)
            if not link.startswith("submit-ios")
        )
    except OSError as error:
        return error.errno in DEAD_MOUNT


def has_died(registrations: int) -> bool:
    """Return True if the daemon behind this descriptor is dead, whoever serves the mount now."""
    try:
        os.listdir(registrations)
    except OSError as error:
        return error.errno in DEAD_MOUNT
    return False


def withdraw(arena: RegisteredMemory) -> bool:
    """Take the arena's registration away; whether nobody else has it mapped then."""
    arena.unregister()
    until_s = time.monotonic() + _LET_GO_S
    while not arena.is_ours_alone():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LET_GO_S / 100)
    return True


def take_away_and_look(equipment: Equipment | None) -> bool:
    """Whether the daemon died meanwhile. Looked at before the registrations go, by which it is known."""
    dead = equipment is not None and is_dead(equipment.registrations, equipment.buffers.registered.name)
    take_away(equipment)
    return dead


def take_away(equipment: Equipment | None) -> None:
    if equipment is not None:
        _stop(equipment.all_rings)
        equipment.buffers.close()
        os.close(equipment.registrations)


def _stop(rings: list[Ring]) -> None:
    for ring in rings:
        ring.close()
    for ring in rings:
        ring.join(_JOIN_S)


PART_BYTES = 4 << 20
_LOOK_S = 0.25
_SUSPECT_S = 1.0
"""After so long without an answer somebody looks whether the daemon is alive."""
_LONGEST_PAUSE_S = 5.0
_END_S = 5.0
_WORTH_IT = 16
"""Rings are made anew when a 16th of the arena is lost."""
_QUIET_AFTER_S = 10.0
"""So late nobody expects an answer any more: rings are made anew for a single slot, when nothing else is under way."""
_FIRST_TAKE_BACK_PAUSE_S = 10.0
_LONGEST_TAKE_BACK_PAUSE_S = 300.0


class StillInUse(TierUnavailable):
    """The daemon lives and may yet touch the transfer's memory and file: see `Transfer.over`."""


class RingEngine:
    """All methods belong to the event loop; what may block runs in threads of its own.

    `make_buffers` makes the tier's own shared memory; `arena` is registered beside it. `revive` is awaited before the
    rings of another daemon are used: descriptors of the mount that died are of no use any more. It may raise OSError or
    TierCacheError, and is called again later then.

    A transfer is over when its ring says so, when the daemon that had it is dead, or when the engine is closed. One that a
    living daemon never answers costs its place and its entries. When half of either is lost that way while others are
    served, rings and buffers are made anew; an arena's slot stays lost until the daemon has let go of the arena, or ends.
    """

    def __init__(
        self,
        library: Any,
        mount: Path,
        settings: RingSettings,
        make_buffers: Callable[[], Buffers],
        arena: RegisteredMemory | None = None,
        revive: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.library = library
        self.mount = mount
        self.settings = settings
        self.arena = arena
        self.restarts = 0
        """Times that rings were made anew."""
        self._make_buffers = make_buffers
        self._revive = revive
        self._died = False
        self._used_mount: int | None = None
        """A descriptor of the list of registrations on the mount that the tier's files were opened on. Rings come and go
        between: whether it can be read says whether those files are of any use. The thread's."""
        self._suspected = False
        self._draining = False
        self._workers = Workers("hf3fs-rings", 1)
        self._now: Equipment | None = None
        self._fresh: Equipment | None = None
        """Made by the thread, not yet in use."""
        self._unanswered: list[Transfer] = []
        """What a living daemon may yet be doing for rings that we gave up."""
        self._served_s = 0.0
        """When the youngest transfer began that was served."""
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._examination: asyncio.Task[None] | None = None
        self._examine_at_s = 0.0
        self._awaits_arena = False
        """Given up, and waiting for the arena."""
        self._took_back_s = -math.inf
        self._take_back_pause_s = _FIRST_TAKE_BACK_PAUSE_S
        self._look_s = min(_LOOK_S, settings.hang_s / 4)
        self._pause_s = self._look_s
        self._closed = False
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Register the memory and make the rings. Raises OSError when the mount refuses, ConfigError for a bad size."""
        try:
            await self._begin()
        except (Exception, asyncio.CancelledError):
            await self.close()
            raise

    async def close(self) -> None:
        """End the threads and give rings, registrations and memory back. What is in flight fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._examination is not None:
            self._examination.cancel()
            await asyncio.wait([self._examination], timeout=_END_S)  # what it began in a thread may hang with the mount
        left = self._give_up(TierUnavailable(f"3FS at {self.mount} is closed"), over=True)
        # In the one thread, so after whatever it may still be making.
        await asyncio.wait([self._workers.submit(self._end, left)], timeout=_END_S)
        self._workers.close()

    @property
    def serves(self) -> bool:
        """Whether a transfer may begin."""
        return self._now is not None and not self._draining

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what transfers that begin, end or come to be late, and rings that are made anew, make true. For tests."""
        while not condition():
            await self._changed.wait()

    @property
    def in_flight(self) -> int:
        """Transfers that the daemon is or may be working on."""
        return len(self._unfinished()) + len(self._unanswered)

    @property
    def buffers(self) -> Buffers:
        """Raises TierUnavailable while there is no daemon."""
        return self._equipment().buffers

    def suspect(self) -> None:
        """A call on the mount failed as on a dead one: look whether its daemon is alive, though nothing is in flight."""
        self._suspected = True
        self._watch_soon()

    def transfer(self, descriptor: int, pieces: Sequence[tuple[Piece, int]], *, read: bool) -> Transfer:
        """Move pieces of shared memory from or to a registered file; each has its offset in the file.

        Raises TierUnavailable when the memory is not registered any more. `ended` is StillInUse when nobody answers in time.
        """
        rings = self._equipment().rings[read]
        parts: list[Part] = []
        for (memory, start, length), offset in pieces:
            if memory.iov is None:
                raise TierUnavailable(f"3FS at {self.mount}: the daemon that knew this memory is gone")
            parts += in_parts(memory.iov, start, length, offset, PART_BYTES)
        loop = self._loop
        transfer = Transfer(descriptor, parts, loop.create_future(), loop.create_future(), loop.time())
        if read:
            transfer.arena_bytes = sum(length for (memory, _, length), _ in pieces if memory is self.arena)
        min(rings, key=lambda ring: len(ring.unfinished)).submit(transfer)
        self._watch_soon()
        self._tell()
        return transfer

    def _equipment(self) -> Equipment:
        if self._now is None or self._draining:
            raise TierUnavailable(f"3FS at {self.mount} is not there")
        return self._now

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _unfinished(self) -> list[Transfer]:
        return [] if self._now is None else [each for ring in self._now.all_rings for each in ring.unfinished]

    async def _begin(self) -> None:
        try:
            await self._workers.submit(self._make)
        except OSError as error:
            if error.errno in (*DEAD_MOUNT, errno.ENOENT):
                await self._on_daemon_death(None)  # it may have died since we looked
            raise
        try:
            # Only now: until rings could be made, what lies at the mount point may be the directory below it.
            if self._died:
                self._give_up(TierUnavailable(f"3FS at {self.mount} died"), over=True)
                if self._revive is not None:
                    await self._revive()
                await self._workers.submit(self._use, self._fresh)
        except BaseException:
            # The arena too: when we try again it may be with yet another daemon, which does not know it.
            fresh, self._fresh = self._fresh, None
            await self._workers.submit(self._close_dead, fresh)
            raise
        self._now, self._fresh = self._fresh, None
        self._died = self._draining = False

    def _give_up(self, error: TierUnavailable, *, over: bool) -> Equipment | None:
        """Fail all that is in flight. `over`: the daemon is dead, or nobody will use the memory again.

        Returns what is to be taken away, in a thread.
        """
        equipment, self._now = self._now, None
        if equipment is not None:
            for transfer in [each for ring in equipment.all_rings for each in ring.close()]:
                if not transfer.ended.done():
                    transfer.ended.set_exception(error)
                self._unanswered.append(transfer)
        if over:
            left, self._unanswered = self._unanswered, []
            for transfer in left:
                transfer.over.set_result(None)
        self._tell()
        return equipment

    def _settled(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._served_s = max(self._served_s, transfer.began_s)
            transfer.over.set_result(None)
            if transfer.ended.done():
                continue
            if transfer.error is not None:
                transfer.ended.set_exception(transfer.error)
            else:
                transfer.ended.set_result(transfer.moved_bytes)
        self._tell()

    # When nothing comes back

    def _watch_soon(self) -> None:
        if self._watch is None and not self._closed:
            self._watch = self._loop.call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._watch = None
        now_s, hang_s = self._loop.time(), self.settings.hang_s
        unfinished = self._unfinished()
        late = [each for each in unfinished if not each.ended.done() and now_s - each.began_s > hang_s]
        if late:
            logger.warning("3FS at %s: no answer to %d transfers for %.1f s", self.mount, len(late), hang_s)
        for transfer in late:
            transfer.ended.set_exception(StillInUse(f"3FS at {self.mount} did not answer for {hang_s:.1f} s"))
            self._tell()
        oldest_s = min((each.began_s for each in unfinished), default=now_s)
        suspect = (
            self._suspected or self._now is None or not self._now.works or now_s - oldest_s > min(_SUSPECT_S, hang_s)
        ) or (self._held_bytes > 0 and self._may_take_back())
        if not suspect:
            self._pause_s = self._look_s
        elif self._examination is None and now_s >= self._examine_at_s:
            self._suspected = False
            self._examination = self._loop.create_task(self._examine(), name="tiercache-hf3fs-examine")
            self._examination.add_done_callback(self._examined)
        if suspect or unfinished or self._held_bytes:
            self._watch_soon()

    def _examined(self, examination: asyncio.Task[None]) -> None:
        self._examination = None
        self._examine_at_s = self._loop.time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if not examination.cancelled() and (error := examination.exception()) is not None:
            logger.warning("3FS at %s cannot be used yet: %s", self.mount, str(error))  # its frames keep rings

    async def _examine(self) -> None:
        """Begin anew where the daemon that knew our memory is dead, and where too much was lost in a living one."""
        now = self._now
        if now is not None:
            if await self._workers.submit(is_dead, now.registrations, now.buffers.registered.name):
                logger.warning("3FS at %s: the daemon died", self.mount)
                await self._on_daemon_death(self._give_up(TierUnavailable(f"3FS at {self.mount} died"), over=True))
            elif not now.works or self._lost_too_much(now):
                logger.warning("3FS at %s: too many transfers were never answered; making the rings anew", self.mount)
                # What is still served is waited for: nobody would ever learn that it is over. The rest is late by then.
                self._draining = True
                served = self._serves_others(now)
                if in_time := [each.ended for each in self._unfinished() if not each.ended.done()]:
                    await asyncio.wait(in_time)
                silent = StillInUse(f"3FS at {self.mount} does not answer")
                left = self._give_up(silent, over=False)
                dead = await self._workers.submit(take_away_and_look, left)
                if dead:
                    await self._on_daemon_death(None)
                elif not await self._take_arena_back() and not served:
                    # New rings would only lose more of the arena: nobody was served by the old ones either.
                    self._awaits_arena = True
            else:
                return
        if self._awaits_arena and not await self._take_arena_back():
            return
        await self._begin()
        self.restarts += 1
        self._tell()
        logger.info("3FS at %s: rings made anew", self.mount)

    async def _on_daemon_death(self, equipment: Equipment | None) -> None:
        """The daemon is dead: nobody touches what it was given, and all that is open on its mount is of no use."""
        self._died = True
        self._give_up(TierUnavailable(f"3FS at {self.mount} died"), over=True)
        await self._workers.submit(self._close_dead, equipment)

    async def _take_arena_back(self) -> bool:
        """Whether nothing of the arena is lost any more.

        Reads that were never answered are over once the daemon has the arena mapped no more: 3FS keeps the memory of an
        operation for as long as that may write to it, also when it is not registered any more."""
        if self.arena is None or not self._held_bytes:
            self._awaits_arena = False
            return True
        self._took_back_s = self._loop.time()
        if not await self._workers.submit(withdraw, self.arena):
            logger.warning(
                "3FS at %s still has the arena mapped: what it never answered stays lost for now", self.mount
            )
            self._take_back_pause_s = min(2 * self._take_back_pause_s, _LONGEST_TAKE_BACK_PAUSE_S)
            return False
        self._take_back_pause_s = _FIRST_TAKE_BACK_PAUSE_S
        self._awaits_arena = False
        over = [transfer for transfer in self._unanswered if transfer.arena_bytes]
        self._unanswered = [transfer for transfer in self._unanswered if not transfer.arena_bytes]
        for transfer in over:
            transfer.over.set_result(None)
        self._tell()
        return True

    @property
    def _held_bytes(self) -> int:
        """Of the arena, by reads of rings that were given up."""
        return sum(transfer.arena_bytes for transfer in self._unanswered)

    def _lacks_slots(self, late: list[Transfer]) -> bool:
        """Whether so much of the arena is lost that it is worth an interruption, and how long ago the last one was."""
        if self.arena is None:
            return False
        held_bytes, lost_bytes = self._held_bytes, sum(transfer.arena_bytes for transfer in late)
        if held_bytes and not self._may_take_back():
            return False
        if _WORTH_IT * (held_bytes + lost_bytes) >= self.arena.memory.nbytes:
            return True
        # A slot is little, but its chunk cannot be removed: in a quiet moment it costs nobody anything.
        lost_s = [each.began_s for each in (*self._unanswered, *late) if each.arena_bytes]
        return self._is_quiet and self._loop.time() - min(lost_s, default=self._loop.time()) > _QUIET_AFTER_S

    def _may_take_back(self) -> bool:
        """Whether the last attempt was long enough ago, which may have interrupted others and freed nothing."""
        pause_s = min(self._take_back_pause_s, _QUIET_AFTER_S) if self._is_quiet else self._take_back_pause_s
        return self._loop.time() >= self._took_back_s + pause_s

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is under way that may still be answered in time."""
        return all(each.ended.done() for each in self._unfinished())

    def _lost_too_much(self, now: Equipment) -> bool:
        """Whether half of the places, or of a ring's entries, are lost, or too much of the arena. While nobody is served it
        may only hang."""
        late = {ring: [each for each in ring.unfinished if each.ended.done()] for ring in now.all_rings}
        lost = [(ring.lost_entries(late[ring]), ring.entries) for ring in late]
        lost.append((sum(map(len, late.values())), now.buffers.count))
        if self._serves_others(now):
            in_arena = self._lacks_slots([each for part in late.values() for each in part])
            return in_arena or any(2 * count >= room for count, room in lost)
        # Without any room nobody can be served.
        return any(count >= room for count, room in lost)

    def _serves_others(self, now: Equipment) -> bool:
        """Whether something was served that began after all that is late."""
        late_s = [each.began_s for ring in now.all_rings for each in ring.unfinished if each.ended.done()]
        return self._served_s > max(late_s, default=0.0)

    # In the thread

    def _make(self) -> None:
        """Nothing is kept when it raises."""
        fresh = equip(self.library, self.mount, self.settings, self._make_buffers, self._loop, self._settled)
        try:
            if self._used_mount is None:
                self._use(fresh)
            elif has_died(self._used_mount):
                self._died = True  # between two rounds of rings
            if self.arena is not None and self.arena.iov is not None:
                self._died = self._died or is_dead(fresh.registrations, self.arena.name)
                if self._died:
                    self.arena.unregister()
            if self.arena is not None and self.arena.iov is None:
                self.arena.register(self.library, str(self.mount), self.settings.numa)
        except BaseException:
            take_away(fresh)
            raise
        self._fresh = fresh

    def _end(self, equipment: Equipment | None) -> None:
        fresh, self._fresh = self._fresh, None
        for each in (equipment, fresh):
            take_away(each)
        self._use(None)
        if self.arena is not None:
            self.arena.release()

    def _use(self, equipment: Equipment | None) -> None:
        """Files are opened on the mount of this equipment from now on."""
        before, self._used_mount = self._used_mount, None if equipment is None else os.dup(equipment.registrations)
        if before is not None:
            os.close(before)

    def _close_dead(self, equipment: Equipment | None) -> None:
        """What a daemon left that died."""
        take_away(equipment)
        if self.arena is not None:
            self.arena.unregister()
