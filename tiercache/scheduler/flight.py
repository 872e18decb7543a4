"""A chunk on its way into memory, and those who wait for it."""

from __future__ import annotations

import asyncio

from tiercache.core.budget import Purpose
from tiercache.core.keys import ChunkKey
from tiercache.core.tombstones import Operation
from tiercache.tiers.leases import Lease


class Flight:
    __slots__ = ("begun", "deadline_s", "key", "operation", "parent", "purpose", "task", "time", "waiters")

    def __init__(
        self,
        key: ChunkKey,
        operation: Operation,
        purpose: Purpose,
        deadline_s: float,
        parent: ChunkKey | None,
        time: int | None,
    ) -> None:
        self.key = key
        self.operation = operation
        self.purpose = purpose
        self.parent = parent
        """The chunk before it in its prefix, if that is known."""
        self.time = time
        """The time of the access that it serves, if the hot cache has noted it."""
        self.deadline_s = deadline_s
        """The latest of those who wait for it; moves when somebody joins."""
        self.begun = False
        """Whether a tier has begun to read. Until then a prefetch can be overtaken."""
        self.waiters: list[tuple[asyncio.Future[Lease | None], Purpose]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def forgotten(self) -> bool:
        """Its key was forgotten since it began: it must not land, and nobody who comes later may join it."""
        return self.operation.forgot(self.key)

    async def arrival(self, purpose: Purpose, deadline_s: float) -> Lease | None:
        """A lease on the chunk; None on a miss. Raises TimeoutError at the deadline. Cancelled, it holds nothing."""
        arrival: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self.waiters.append((arrival, purpose))
        try:
            async with asyncio.timeout_at(deadline_s):
                return await arrival
        except TimeoutError:
            if not arrival.done() or arrival.cancelled():
                raise
            return arrival.result()  # it came at this very moment
        except BaseException:
            if not arrival.done():
                if not arrival.get_loop().is_closed():
                    arrival.cancel()  # this was closed and not cancelled: it could still come
            elif not arrival.cancelled() and (landed := arrival.result()) is not None:
                landed.release()
            raise

    def end(self, landed: Lease | None) -> None:
        """Give everybody who waits a lease of their own on the chunk that has `landed`, or None.

        What was read because somebody asked came in with that use: it is not counted a second time.
        """
        noted = self.purpose is Purpose.READ
        for arrival, purpose in self.waiters:
            if not arrival.done():
                lease = None
                if landed is not None:
                    lease = landed.another(purpose, noted=noted)
                    noted = noted and purpose is not Purpose.READ
                arrival.set_result(lease)
