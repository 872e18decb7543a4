"""All rings of a tier, their memory, and what happens when the daemon behind them dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError, TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.hf3fs.ring import Ring, Transfer, in_parts
from tiercache.tiers.hf3fs.segments import Buffers, Piece, Segment

logger = logging.getLogger("tiercache.hf3fs")

_PART_BYTES = 4 << 20
_WATCH_S = 0.25
_JOIN_S = 2.0
_END_S = 5.0


@dataclass(frozen=True)
class RingSettings:
    entries: int = 256
    io_depth: int = 0
    rings: int = 4
    """In each direction, with two threads each."""
    numa: int = -1
    hang_s: float = 5.0
    """A transfer that takes longer means that the daemon hangs: the next ones fail at once."""


class StillInUse(TierUnavailable):
    """The daemon lives and may yet write to the transfer's memory: nobody may use it for anything else."""


class RingEngine:
    """All methods belong to the event loop; what may block runs in threads of its own.

    `make_buffers` makes the tier's own shared memory, anew when the daemon lost track of what it does in the old one;
    `arena` is registered beside it, and cannot be replaced.
    """

    def __init__(
        self,
        library: Any,
        mount: Path,
        settings: RingSettings,
        make_buffers: Callable[[], Buffers],
        arena: Segment | None = None,
    ) -> None:
        self.library = library
        self.mount = mount
        self.settings = settings
        self.arena = arena
        self.hung = False
        self.restarts = 0
        """Times that rings were made anew."""
        self.gone = asyncio.Event()
        """Set while no daemon that may still write to old memory is known to live."""
        self._make_buffers = make_buffers
        self._workers = Workers("hf3fs-rings", 1)
        self._rings: dict[bool, list[Ring]] = {True: [], False: []}
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._closed = False
        self.buffers: Buffers
        if settings.io_depth > 1:
            logger.warning(
                "hf3fs_io_depth: %d makes 3FS issue exact batches only: every partial one is filled up with repeated "
                "requests; 0 serves each request at once",
                settings.io_depth,
            )

    async def open(self) -> None:
        """Register the memory and make the rings. Raises OSError when the mount refuses, ConfigError for a bad size."""
        await self._workers.submit(self._begin)

    async def close(self) -> None:
        """End the threads and give rings, registrations and memory back. What is in flight fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._end(TierUnavailable("the tier is closed"))
        self.gone.set()
        if self.arena is not None:
            self.arena.release()
        self._workers.close()

    @property
    def in_flight(self) -> int:
        return sum(len(ring.unfinished) for rings in self._rings.values() for ring in rings)

    def transfer(
        self, descriptor: int, pieces: Sequence[tuple[Piece, int]], *, read: bool
    ) -> asyncio.Future[list[int]]:
        """Move pieces of shared memory from or to a registered file; each has its offset in the file.

        The future has the bytes moved for each piece, in order. It fails with OSError when any of them did, with
        TierUnavailable when the daemon is gone, and with StillInUse when it is not and yet does not answer. Cancelling
        it changes nothing for the daemon.
        """
        if self.hung or self._closed or not self._rings[read]:
            raise TierUnavailable(f"3FS at {self.mount} does not answer")
        parts = [in_parts(piece, offset, _PART_BYTES) for piece, offset in pieces]
        future: asyncio.Future[list[int]] = self._loop.create_future()
        transfer = Transfer(descriptor, [part for each in parts for part in each], self._loop.create_future())
        transfer.future.add_done_callback(lambda done: _join_parts(done, [len(each) for each in parts], future))
        min(self._rings[read], key=lambda ring: len(ring.unfinished)).submit(transfer)
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_S, self._look)
        return future

    def _begin(self) -> None:
        """Blocks. Nothing is kept when it raises."""
        settings, mount = self.settings, str(self.mount)
        buffers = self._make_buffers()
        rings: dict[bool, list[Ring]] = {True: [], False: []}
        try:
            buffers.segment.register(self.library, mount, settings.numa)
            if self.arena is not None and self.arena.iov is None:
                self.arena.register(self.library, mount, settings.numa)
            for read in (True, False):
                for number in range(settings.rings):
                    ring = Ring(
                        self.library,
                        mount,
                        read=read,
                        entries=settings.entries,
                        io_depth=settings.io_depth,
                        numa=settings.numa,
                        loop=self._loop,
                        settled=self._settled,
                        name=f"hf3fs-{'read' if read else 'write'}-{number}",
                    )
                    rings[read].append(ring)
        except BaseException:
            _close_all([ring for each in rings.values() for ring in each], buffers)
            raise
        self.buffers, self._rings = buffers, rings

    async def _end(self, error: TierUnavailable) -> None:
        """Give up what is in flight, and the memory of ours that it uses."""
        rings = [ring for each in self._rings.values() for ring in each]
        self._rings = {True: [], False: []}
        left = [transfer for ring in rings for transfer in ring.close()]
        for transfer in left:
            if not transfer.future.done():
                transfer.future.set_exception(error)
        if rings:
            await asyncio.wait([self._workers.submit(_close_all, rings, self.buffers)], timeout=_END_S)

    def _settled(self, transfers: list[Transfer]) -> None:
        if self.hung:
            logger.info("3FS at %s answers again", self.mount)
            self.hung = False
        for transfer in transfers:
            if transfer.future.done():
                continue
            if transfer.error is not None:
                transfer.future.set_exception(transfer.error)
            else:
                transfer.future.set_result(transfer.results)

    # When nothing comes back

    def _look(self) -> None:
        self._watch = None
        waited_s = self._longest_wait_s()
        if waited_s > self.settings.hang_s:
            if not self.hung:
                self.hung = True
                logger.warning("3FS at %s has not answered for %.1f s", self.mount, self.settings.hang_s)
            if self._recovery is None or self._recovery.done():
                self._recovery = self._loop.create_task(self._recover(waited_s), name="tiercache-hf3fs-recover")
        if waited_s or self.hung:
            self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _longest_wait_s(self) -> float:
        began_s = [next(iter(ring.unfinished)).began_s for each in self._rings.values() for ring in each if ring.unfinished]
        return max(self._loop.time() - min(began_s), 1e-9) if began_s else 0.0

    async def _recover(self, waited_s: float) -> None:
        """Begin anew where the daemon that knew our memory is dead, and, later, also where it lives and forgot us."""
        gone = not self._rings[True] or await self._workers.submit(_is_gone, self.mount, self.buffers.segment.name)
        if not gone and waited_s < 2 * self.settings.hang_s:
            return
        if gone:
            self.gone.set()
            if self.arena is not None:
                self.arena.iov = None
            error = TierUnavailable(f"3FS at {self.mount} died")
        else:
            self.gone.clear()
            error = StillInUse(f"3FS at {self.mount} did not answer for {waited_s:.1f} s")
        await self._end(error)
        try:
            await self._workers.submit(self._begin)
        except (OSError, ConfigError) as refusal:
            logger.warning("3FS at %s cannot be used yet: %s", self.mount, refusal)
        else:
            self.restarts += 1
            self.hung = False
            logger.info("3FS at %s: rings made anew", self.mount)


def _is_gone(mount: Path, name: str) -> bool:
    """Whether no living daemon has memory of this name registered."""
    try:
        with os.scandir(mount / "3fs-virt" / "iovs") as entries:
            return not any(os.path.basename(os.readlink(entry.path)) == name for entry in entries if entry.is_symlink())
    except OSError:
        return True  # ENOTCONN: the mount has lost its daemon


def _close_all(rings: list[Ring], buffers: Buffers) -> None:
    for ring in rings:
        ring.close()
    for ring in rings:
        ring.join(_JOIN_S)
    buffers.close()


def _join_parts(done: asyncio.Future[list[int]], counts: list[int], future: asyncio.Future[list[int]]) -> None:
    error = done.exception()
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        return
    moved = iter(done.result())
    future.set_result([sum(next(moved) for _ in range(count)) for count in counts])
