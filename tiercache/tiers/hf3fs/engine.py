"""All rings of a tier and their memory, remade when the daemon behind them dies or stops answering."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.arena import Arena
from tiercache.memory.workers import Workers, retrieve_exception
from tiercache.tiers.hf3fs.ring import Buffers, Part, Piece, RegisteredMemory, Ring, RingSettings, Transfer, in_parts

logger = logging.getLogger("tiercache.hf3fs")

PART_BYTES = 4 << 20
DEAD_MOUNT = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
"""Bounds in seconds of the pause between two examinations of a daemon that may be dead or hang."""
_SUSPECT_S = 1.0
"""Age of an unanswered transfer at which the daemon is examined."""
_JOIN_S = 2.0
_CLOSE_S = 5.0


def load_library() -> ModuleType:
    """Return `hf3fs_fuse.io`. Raises ConfigError that names what is missing."""
    try:
        import hf3fs_fuse.io
    except ImportError as error:
        raise ConfigError(
            f"the 3FS tier needs hf3fs_py_usrbio and hf3fs_fuse, which cannot be imported ({error}): build them from "
            "the 3FS sources"
        ) from error
    module: ModuleType = hf3fs_fuse.io
    return module


def is_dead(registrations: int, name: str | None = None) -> bool:
    """Return True if the daemon behind a descriptor of its directory of registrations is dead.

    With `name`, also if the memory of that name is not registered, since another daemon has replaced it then. Blocks
    while the mount hangs.
    """
    try:
        links = os.listdir(registrations)
        return name is not None and not any(
            os.path.basename(os.readlink(link, dir_fd=registrations)) == name
            for link in links
            if not link.startswith("submit-ios")
        )
    except OSError as error:
        return error.errno in DEAD_MOUNT


@dataclass
class RingSet:
    """The current rings, all of the same daemon."""

    reads: list[Ring]
    writes: list[Ring]
    registrations: int
    """Descriptor of the daemon's directory of registrations. Reading it shows if that daemon is alive."""

    @property
    def all(self) -> list[Ring]:
        return self.reads + self.writes

    def stop(self) -> None:
        """End the threads of the rings and drop the rings. Blocks while the mount hangs."""
        for ring in self.all:
            ring.close()
        for ring in self.all:
            ring.join(_JOIN_S)


class RingEngine:
    """Moves data between registered memory and registered files.

    All methods belong to the event loop; calls that may block run in a thread of the engine's own.

    A transfer fails after `settings.timeout_s` without an answer. The daemon may still use its memory and its file, so
    both stay reserved until the transfer is over: its ring answers after all, or the engine is closed with the cache, or
    the rings were dropped and no other process has the registered memory mapped any more. 3FS keeps the memory of an
    operation mapped for as long as the operation may use it.

    Rings are dropped, and the memory is unregistered, when the daemon dies, when the thread of a ring fails, and when a
    transfer has no answer within twice the timeout. All transfers in flight are abandoned then, and new rings are made
    when these are over. So a lost answer does not lose memory for good, and only one set of rings ever has abandoned
    transfers.
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
        """`make_buffers` is called once, in the engine's thread; `arena` is registered beside these buffers.

        `revive` is awaited before rings of another daemon are used, since descriptors on the mount of a dead daemon are
        useless. It may raise OSError or TierCacheError, and is called again later then.
        """
        self.library = library
        self.mount = mount
        self.settings = settings
        self.arena = arena
        self.restarts = 0
        """Number of times that rings were remade."""
        self._make_buffers = make_buffers
        self._revive = revive
        self._loop = asyncio.get_running_loop()
        self._workers = Workers("hf3fs-rings", 1)
        self._memories: list[RegisteredMemory] = [] if arena is None else [arena]
        self._buffers: Buffers | None = None
        self._rings: RingSet | None = None
        self._fresh: RingSet | None = None
        """New rings from the thread that are not in use yet."""
        self._registrations: int | None = None
        """The directory of registrations at the time when the tier's files were opened.

        It is kept while there are no rings, because it answers ENOTCONN if that daemon dies in the meantime.
        """
        self._died = False
        """True from the death of a daemon until the files are open on the mount of the next daemon."""
        self._abandoned: list[Transfer] = []
        """Transfers of dropped rings, until they are over."""
        self._first_pause_s = min(_FIRST_PAUSE_S, settings.timeout_s / 4)
        self._pause_s = self._first_pause_s
        self._examine_at_s = 0.0
        self._suspected = False
        self._watch: asyncio.TimerHandle | None = None
        self._examination: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Register the memory and make the rings. Raises OSError if the mount refuses, ConfigError for a bad size."""
        try:
            await self._make_rings()
        except (Exception, asyncio.CancelledError):
            await self.close()
            raise

    async def close(self, *, detached: bool = False) -> None:
        """End the threads and release rings, registrations and buffers. Transfers in flight fail. Idempotent.

        Waits at most 10 s for calls that hang with the mount; they continue in their thread. `detached` means that the
        arena stays in use: transfers that were not answered are over once no other process has it mapped any more, and
        the arena is `lent` until then.
        """
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._examination is not None:
            self._examination.cancel()
            await asyncio.wait([self._examination], timeout=_CLOSE_S)
        rings = self._drop_rings(f"3FS at {self.mount} is closed")
        # The engine has a single thread, so this runs after any call that an examination began.
        release = self._workers.submit(self._release, rings)
        if detached and self.arena is not None and self._abandoned:
            self._returning = self._loop.create_task(self._end_when_returned(self.arena.arena))
        else:
            self._end_abandoned()
        await asyncio.wait([release], timeout=_CLOSE_S)
        if self._returning is None:
            self._workers.close()

    async def _end_when_returned(self, arena: Arena) -> None:
        """End the abandoned transfers once no other process has the arena mapped."""
        arena.lent, pause_s = True, self._first_pause_s
        while not await self._workers.submit(arena.is_ours_alone):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        arena.lent = False
        self._end_abandoned()
        self._workers.close()

    @property
    def serves(self) -> bool:
        """True if a transfer may begin."""
        return self._rings is not None

    @property
    def in_flight(self) -> int:
        """Number of transfers that the daemon may be working on."""
        return len(self._unfinished()) + len(self._abandoned)

    @property
    def buffers(self) -> Buffers:
        """The transfer buffers. Raises TierUnavailable while there are no rings."""
        self._require_rings()
        assert self._buffers is not None
        return self._buffers

    def suspect(self) -> None:
        """Examine the daemon soon although no transfer is late: a call on the mount failed as on a dead mount."""
        self._suspected = True
        self._watch_soon()

    def transfer(self, descriptor: int, pieces: Sequence[tuple[Piece, int]], *, read: bool) -> Transfer:
        """Begin to move pieces of registered memory from or to a registered file. Each piece has its offset in the
        file.

        Returns at once; `Transfer.ended` has the outcome. Raises TierUnavailable while there are no rings.
        """
        rings = self._require_rings()
        parts: list[Part] = []
        for (memory, start, length), offset in pieces:
            parts += in_parts(memory.iov, start, length, offset, PART_BYTES)
        loop = self._loop
        transfer = Transfer(descriptor, parts, loop.create_future(), loop.create_future(), loop.time())
        min(rings.reads if read else rings.writes, key=lambda ring: len(ring.unfinished)).submit(transfer)
        self._watch_soon()
        return transfer

    def _require_rings(self) -> RingSet:
        if self._rings is None:
            raise TierUnavailable(f"3FS at {self.mount} does not serve")
        return self._rings

    def _unfinished(self) -> list[Transfer]:
        return [] if self._rings is None else [each for ring in self._rings.all for each in ring.unfinished]

    def _settled(self, transfers: list[Transfer]) -> None:
        """Called by a ring with transfers that were answered."""
        for transfer in transfers:
            transfer.over.set_result(None)
            if transfer.ended.done():
                continue
            if transfer.error is not None:
                transfer.ended.set_exception(transfer.error)
            else:
                transfer.ended.set_result(transfer.moved_bytes)

    async def _make_rings(self) -> None:
        try:
            await self._workers.submit(self._make)
        except OSError as error:
            if error.errno in (*DEAD_MOUNT, errno.ENOENT):
                self._died = True
            raise
        try:
            # Reopen files only once rings could be made: until then the mount point may be the directory below it.
            if self._died and self._revive is not None:
                await self._revive()
            await self._workers.submit(self._use)
        except BaseException:
            # Do not await the call, which may hang with the mount. The single thread runs it before any later call.
            self._workers.submit(self._discard).add_done_callback(retrieve_exception)
            raise
        self._rings, self._fresh = self._fresh, None
        self._died = False

    def _drop_rings(self, reason: str) -> RingSet | None:
        """Abandon all transfers in flight. Return the rings, which a thread has to stop."""
        rings, self._rings = self._rings, None
        for transfer in [] if rings is None else [each for ring in rings.all for each in ring.close()]:
            if not transfer.ended.done():
                transfer.ended.set_exception(TierUnavailable(reason))
            self._abandoned.append(transfer)
        return rings

    def _end_abandoned(self) -> None:
        """Release the resources of abandoned transfers. Called when no other process has their memory, and at a close."""
        abandoned, self._abandoned = self._abandoned, []
        for transfer in abandoned:
            transfer.over.set_result(None)

    # Examination of the daemon

    def _watch_soon(self) -> None:
        if self._watch is None and not self._closed:
            self._watch = self._loop.call_later(self._first_pause_s, self._look)

    def _look(self) -> None:
        """Fail transfers that are late, and begin an examination if there is a reason for it."""
        self._watch = None
        now_s, timeout_s = self._loop.time(), self.settings.timeout_s
        unfinished = self._unfinished()
        late = [each for each in unfinished if not each.ended.done() and now_s - each.began_s > timeout_s]
        for transfer in late:
            transfer.ended.set_exception(TierUnavailable(f"3FS at {self.mount} did not answer for {timeout_s:.1f} s"))
        if late:
            logger.warning("3FS at %s: no answer to %d transfers for %.1f s", self.mount, len(late), timeout_s)
        is_suspect = (
            self._suspected
            or self._rings is None
            or not all(ring.works for ring in self._rings.all)
            or self._has_unanswered(min(_SUSPECT_S, timeout_s))
        )
        if not is_suspect:
            self._pause_s = self._first_pause_s
        elif self._examination is None and now_s >= self._examine_at_s:
            self._suspected = False
            self._examination = self._loop.create_task(self._examine(), name="tiercache-hf3fs-examine")
            self._examination.add_done_callback(self._examined)
        if is_suspect or unfinished:
            self._watch_soon()

    def _has_unanswered(self, age_s: float) -> bool:
        """Return True if the daemon has a transfer that is older than `age_s`."""
        return any(self._loop.time() - transfer.began_s > age_s for transfer in self._unfinished())

    def _examined(self, examination: asyncio.Task[None]) -> None:
        self._examination = None
        self._examine_at_s = self._loop.time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if not examination.cancelled() and (error := examination.exception()) is not None:
            # Log text only, since the frames of the exception would keep rings alive.
            logger.warning("3FS at %s cannot be used yet: %s", self.mount, str(error))

    async def _examine(self) -> None:
        """Drop useless rings, and make new rings as soon as no other process uses the memory."""
        if (rings := self._rings) is not None:
            assert self._buffers is not None
            dead = await self._workers.submit(is_dead, rings.registrations, self._buffers.registered.name)
            if dead:
                self._died = True
                reason = "the daemon died"
            elif not all(ring.works for ring in rings.all):
                reason = "the thread of a ring ended"
            elif self._has_unanswered(2 * self.settings.timeout_s):
                reason = f"the daemon did not answer for {2 * self.settings.timeout_s:.1f} s"
            else:
                return
            logger.warning("3FS at %s: %s; making the rings anew", self.mount, reason)
            self._drop_rings(f"3FS at {self.mount}: {reason}")
            await self._workers.submit(self._stop, rings)
        if self._abandoned:
            if not await self._workers.submit(self._is_released):
                logger.warning("3FS at %s: a daemon still has the memory of abandoned transfers mapped", self.mount)
                return
            self._end_abandoned()
        await self._make_rings()
        self.restarts += 1
        logger.info("3FS at %s: rings made anew", self.mount)

    # Calls of the thread

    def _make(self) -> None:
        """Make rings and register the memory. Keeps nothing if it raises (OSError, ConfigError)."""
        settings = self.settings
        registrations = os.open(self.mount / "3fs-virt" / "iovs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fresh = fresh = RingSet([], [], registrations)
        try:
            # Rings come first: they are cheap, and a mount that refuses them is found before memory is touched.
            for rings, read in ((fresh.reads, True), (fresh.writes, False)):
                for number in range(settings.rings):
                    name = f"hf3fs-{'read' if read else 'write'}-{number}"
                    # No variable refers to the native ring: its thread drops it, or this thread if that fails to start.
                    rings.append(
                        Ring(
                            self.library.make_ioring(
                                str(self.mount), settings.entries, read, settings.io_depth, None, None, settings.numa
                            ),
                            settings, read=read, loop=self._loop, settled=self._settled, name=name,
                        )
                    )  # fmt: skip
            if self._buffers is None:
                self._buffers = self._make_buffers()
                self._memories.insert(0, self._buffers.registered)
            for memory in self._memories:
                memory.register(self.library, str(self.mount), settings.numa)
            if self._registrations is not None and is_dead(self._registrations):
                self._died = True
        except BaseException:
            self._discard()
            raise

    def _use(self) -> None:
        """Use the mount of the fresh rings for files from now on."""
        assert self._fresh is not None
        stale, self._registrations = self._registrations, self._fresh.registrations
        if stale is not None:
            os.close(stale)

    def _discard(self) -> None:
        """Stop fresh rings. The memory is unregistered as well, since the next attempt may meet another daemon."""
        fresh, self._fresh = self._fresh, None
        self._stop(fresh)
        if fresh is not None and fresh.registrations != self._registrations:
            os.close(fresh.registrations)

    def _stop(self, rings: RingSet | None) -> None:
        """Stop rings and unregister the memory."""
        if rings is not None:
            rings.stop()
        for memory in self._memories:
            memory.unregister()

    def _is_released(self) -> bool:
        return all(memory.arena.is_ours_alone() for memory in self._memories)

    def _release(self, rings: RingSet | None) -> None:
        self._discard()
        self._stop(rings)
        if self._registrations is not None:
            os.close(self._registrations)
        if self.arena is not None:
            self.arena.release()
        if self._buffers is not None:
            self._buffers.close()
