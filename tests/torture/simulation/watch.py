"""What is looked at in a cache while it runs, step by step: what is wrong for a moment leaves no trace at the end."""

from __future__ import annotations

from collections.abc import Callable

from tests.torture.simulation.oracle import Violation
from tiercache.cache import TierCache
from tiercache.core.breaker import _FIRST_PAUSE_S, Breaker, BreakerState
from tiercache.memory.slots import Purpose
from tiercache.tiers.cpu import CpuTier


class Watch:
    """Of one cache that has started. `after_each` belongs behind each callback of its loop."""

    def __init__(self, cache: TierCache, fail: Callable[[Violation], None]) -> None:
        self._cpu: CpuTier = cache.cpu
        self._fail = fail
        for name, breaker in breakers_of(cache).items():
            _BreakerWatch(name, breaker, fail)

    def after_each(self) -> None:
        """No waiter waits for a slot that its budget allows: it gets the slot in the step in which it comes free, so no
        later waiter can overtake it."""
        cpu = self._cpu
        if not any(cpu.wait_queue.waiting):
            return
        for purpose in Purpose:
            waiting = [key for _, key in cpu.wait_queue.waiting[purpose] if not cpu._blocks_only_itself(purpose, key)]
            if waiting and cpu.budget.allows(purpose, cpu.obtainable):
                self._fail(
                    Violation(
                        f"a call waits for a slot to {purpose.name} and may have one: "
                        f"{cpu.obtainable} can be had, {cpu.budget}"
                    )
                )


class _BreakerWatch:
    """How long a pause of a breaker may be."""

    def __init__(self, name: str, breaker: Breaker, fail: Callable[[Violation], None]) -> None:
        self.name = name
        self.breaker = breaker
        self._fail = fail
        self._first_s = 0.0
        """When it left the closed state."""
        self._open = breaker._open
        breaker._open = self.open  # type: ignore[method-assign]

    def open(self, now_s: float) -> None:
        """A pause grows with the time for which the tier has been bad, and not with how many have found that out."""
        breaker = self.breaker
        if breaker.state is BreakerState.CLOSED:
            self._first_s = now_s
        self._open(now_s)
        pause_s = breaker._probe_at_s - now_s
        most_s = now_s - self._first_s + _FIRST_PAUSE_S + 0.001
        if pause_s > most_s:
            self._fail(
                Violation(f"{self.name}: a pause of {pause_s:.3f} s, {now_s - self._first_s:.3f} s after the first one")
            )


def breakers_of(cache: TierCache) -> dict[str, Breaker]:
    found = {f"reads of {source.tier.name}": source.breaker for source in cache.parts.reader.tiers}
    if (on_device := cache.parts.on_device) is not None:
        found |= {f"reads of {each.tier.name} into the device": each.breaker for each in on_device.reader.tiers}
    return found | {f"writes of {writer.tier.name}": writer.breaker for writer in cache.parts.fan_out.writers}
