"""A tier as the cascade sees it: with its breaker, its places, and what is known of its speed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.core.breaker import Breaker, BreakerSettings
from tiercache.core.estimate import TransferEstimate
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.places import Places
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache.reader")

_LEAST_S = 1.0


@dataclass(frozen=True)
class ReaderSettings:
    deadline_s: float = 10.0
    """For a caller that names none."""
    probe_deadline_s: float = 3.0
    """How long a look-up waits for a shared tier to say what it has."""
    recompute_s: float | None = None
    """What the engine takes to compute one chunk: what takes longer to load is left to it. None: not known."""


class Source:
    """Health of its own: a tier that is down, hung or slow costs its own hits and no others."""

    def __init__(self, tier: Tier, settings: ReaderSettings, most_slots: int | None = None) -> None:
        """`most_slots`: how much memory its reads may fill at a time, or hang in."""
        self.tier = tier
        self.settings = settings
        self.patience_s = min(tier.patience_s or settings.deadline_s, settings.deadline_s)
        self.breaker = Breaker(BreakerSettings(slow_s=settings.deadline_s))
        concurrency = tier.traits.read_concurrency
        self.places = Places(concurrency if most_slots is None else min(concurrency, most_slots))
        self.reading = 0
        """Reads that the tier has begun and not ended."""
        self.estimate = TransferEstimate(tier.traits.read_concurrency)

    @property
    def least_s(self) -> float:
        """Shorter waits do not count against the tier: a caller who gives up soon says nothing about it."""
        return min(_LEAST_S, self.patience_s)

    def until_s(self, deadline_s: float, began_s: float | None = None) -> float:
        """When to go on with the next tier, having begun then, or now."""
        began_s = asyncio.get_running_loop().time() if began_s is None else began_s
        return min(deadline_s, began_s + self.patience_s)

    def may_have(self, key: ChunkKey) -> bool:
        """Not while a chunk is being removed from it."""
        return not self.tier.traffic.refuses(key) and (self.tier.traits.shared or self.tier.contains(key))

    def contains(self, key: ChunkKey) -> bool:
        """As `Tier.contains`, without what is being removed."""
        return self.tier.contains(key) and not self.tier.traffic.refuses(key)

    def would_serve(self, chunks: int) -> bool:
        """Whether the tier is well, and quicker than the engine for so many chunks."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.would_allow(now_s)

    def serves(self, chunks: int, *, question: bool = False) -> bool:
        """As `would_serve`, of somebody who goes there now, to read or with a question: if he is let through to find out
        whether the tier is well, the breaker has to hear of it."""
        now_s = asyncio.get_running_loop().time()
        return self._worthwhile(chunks, now_s) and self.breaker.allows(now_s, question=question)

    def _worthwhile(self, chunks: int, now_s: float) -> bool:
        return self.estimate.worthwhile(chunks, self.settings.recompute_s, now_s)

    async def ask(self, keys: Sequence[ChunkKey], deadline_s: float) -> int | None:
        """As `Tier.probe`, by the deadline; None when there was no answer. The breaker hears of it.

        Cancelled, it leaves it to the next one to find out whether the tier is well.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asking = asyncio.current_task()
        self.tier.traffic.asks(asking)
        try:
            async with asyncio.timeout_at(self.until_s(deadline_s)):
                found = await self.tier.probe(keys)
        except TimeoutError:
            # Every look-up ends at this deadline: where it is short, nothing longer would ever count.
            self.waited_in_vain(began_s, self.settings.probe_deadline_s, question=True)
            return None
        except asyncio.CancelledError:
            self.called_off(began_s)
            raise
        except Exception as error:
            self.breaker.failed(loop.time(), began_s=began_s, question=True)
            logger.warning("%s: could not be asked what it has: %s", self.tier.name, error)
            return None
        finally:
            self.tier.traffic.asked(asking)
        self.breaker.answered(loop.time())
        return found

    def waited_in_vain(self, began_s: float, enough_s: float = _LEAST_S, *, question: bool = False) -> None:
        """No answer since `began_s`; `enough_s` is the wait that counts where it is shorter than the usual least."""
        now_s = asyncio.get_running_loop().time()
        if now_s - began_s >= 0.99 * min(enough_s, self.least_s):  # a timer may be early by its resolution
            self.breaker.failed(now_s, began_s=began_s, question=question)
        else:
            self.called_off(began_s)

    def called_off(self, began_s: float) -> None:
        """Whoever went there then never came to it, or gave up soon: another one may find out whether the tier is well."""
        self.breaker.abandoned(asyncio.get_running_loop().time(), began_s)
