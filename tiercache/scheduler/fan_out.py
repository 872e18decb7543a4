"""Fan-out: what is put goes to all tiers that lack it, side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tiercache.core.keys import ChunkKey
from tiercache.core.queue import WaitBudget
from tiercache.errors import TierUnavailable
from tiercache.scheduler.together import all_or_none
from tiercache.scheduler.writer import TierWriter, WriterStatistics
from tiercache.tiers.cpu import CpuTier
from tiercache.tiers.leases import Lease


@dataclass(frozen=True)
class FlushReport:
    """What became of chunks while somebody waited for a flush or a close, by tier; `pending` were neither written nor given
    up at its end. `declined`: the tier was asked and did not take them, as what it admits or what lies there forbids."""

    written: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return not any(self.pending.values())


class FanOut:
    """All writers of a cache. `keeps` says of a key whether it is for this cache to write it: where several hold the same
    bytes above the same tiers, one does."""

    def __init__(self, writers: list[TierWriter], keeps: Callable[[ChunkKey], bool] = lambda key: True) -> None:
        self.writers = writers
        self._keeps = keeps

    async def offer(self, leases: Sequence[Lease], wait_budget: WaitBudget, staged: Sequence[Lease] = ()) -> None:
        """Queue chunks for every tier that lacks them. Uses up the leases, also when cancelled.

        Each writer gets a lease of its own: on device memory where a chunk is `staged` there and the tier writes from it.
        All are offered everything before anybody is waited for, and those with full queues are waited for side by side, as
        long as the put's `wait_budget` lasts. What does not fit then is skipped by that writer.
        """
        waiting: dict[TierWriter, deque[Lease]] = {}
        try:
            self._offer_now(leases, staged, waiting)
            if waiting:
                loop = asyncio.get_running_loop()
                began_s = loop.time()
                await all_or_none(
                    [asyncio.ensure_future(writer.enqueue(rest, wait_budget)) for writer, rest in waiting.items()]
                )
                wait_budget.waited(began_s, loop.time())
        finally:
            for writer, rest in waiting.items():
                writer.skip(rest)  # one that was cancelled before its first step has not come to it

    def _offer_now(
        self, leases: Sequence[Lease], staged: Sequence[Lease], waiting: dict[TierWriter, deque[Lease]]
    ) -> None:
        """Queue what there is room for. Leases for those with full queues go to `waiting`."""
        try:
            nearest = list({lease.key: lease for lease in (*leases, *staged)}.values()) if staged else leases
            for writer in self.writers:
                for lease in nearest if writer.tier.serves_device else leases:
                    if not self._keeps(lease.key):
                        continue
                    if writer.tier.offers(lease.key):
                        writer.tier.used([lease.key])
                        continue
                    own = lease.sibling()
                    if own is not None and (writer in waiting or not writer.enqueue_nowait(own)):
                        waiting.setdefault(writer, deque()).append(own)
        finally:
            for lease in (*leases, *staged):
                lease.release()

    def used(self, keys: Sequence[ChunkKey], cpu: CpuTier) -> None:
        """A request was served with `keys`: queue those that a tier wants by now and did not take when they were put, as far
        as they are hot."""
        for writer in self.writers:
            for key in filter(self._keeps, writer.tier.used(keys)):
                own = cpu.lease(key, writes=True)
                if own is not None and not writer.enqueue_nowait(own):
                    writer.skip(deque([own]))

    def continued(self, keys: Sequence[ChunkKey]) -> None:
        """A session that has come back needs `keys`."""
        for writer in self.writers:
            writer.tier.continued(keys)

    async def forget(
        self, keys: Sequence[ChunkKey], timeout_s: float, from_memory: Callable[[Sequence[ChunkKey]], None]
    ) -> None:
        """Remove chunks from every tier, waiting up to `timeout_s` for that; as `TierCache.forget`. `from_memory` is called
        with all of them. That takes effect before the first await: nothing that begins in between may find a chunk in a tier
        and bring it back, and a cancellation leaves none of them out."""
        keys = list(dict.fromkeys(keys))
        requests = {writer: writer.forget(keys) for writer in self.writers}
        from_memory(keys)
        try:
            if requests:
                await asyncio.wait([each.settled for each in requests.values()], timeout=max(0.0, timeout_s))
        finally:
            for writer, request in requests.items():
                writer.leave(request)
        for request in requests.values():
            if request.error is not None:
                raise request.error
        left = {writer.tier.name: request.left for writer, request in requests.items()}
        if any(left.values()):
            found = ", ".join(f"{name}: {count} of {len(keys)}" for name, count in left.items() if count)
            raise TierUnavailable(
                f"forget: not removed within {timeout_s:.1f} s ({found} chunks); nobody gets them from there any more, and "
                "they are removed when the tier answers"
            )

    async def flush(self, timeout_s: float) -> FlushReport:
        """Drain all queues, each for up to `timeout_s`, side by side. Cancelling it changes nothing."""
        before = self.counts()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drained()
        return self.report(before)

    async def drained(self) -> None:
        """Wait until all is written or given up. Cancelling it changes nothing."""
        for writer in self.writers:
            await writer.drained()

    async def removed(self) -> None:
        """Wait until what was forgotten is removed from every tier, or that has failed. Cancelling it changes nothing."""
        for writer in self.writers:
            await writer.removed()

    def counts(self) -> dict[str, WriterStatistics]:
        """By tier, what was counted up to now."""
        return {writer.tier.name: replace(writer.counters) for writer in self.writers}

    def report(self, before: dict[str, WriterStatistics]) -> FlushReport:
        """What has happened since `counts` gave `before`, and what is still to be written."""
        since = [(writer.tier.name, before[writer.tier.name], writer.counters) for writer in self.writers]
        return FlushReport(
            written={name: now.written - then.written for name, then, now in since},
            pending={writer.tier.name: writer.pending for writer in self.writers},
            dropped={name: now.dropped - then.dropped for name, then, now in since},
            declined={name: now.declined - then.declined for name, then, now in since},
        )

    async def close(self, until_s: float) -> None:
        """Stop all writers side by side; as `TierWriter.close`."""
        await asyncio.gather(*(writer.close(until_s) for writer in self.writers))
