"""What a run has reached, so that who reads "no failure" knows what did not fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.torture.simulation.disk import Disk
from tiercache.cache import TierCache


class Coverage:
    """Counts of states, by their names. What is looked at from time to time counts once for each look."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()

    def look(self, cache: TierCache, disks: Iterable[Disk]) -> None:
        """Beside a cache that is open."""
        states = self.states
        for name, state in cache.parts.reader.breakers().items():
            if state != "closed":
                states[f"breaker of {name} {state}"] += 1
        for writer in cache.parts.fan_out.writers:
            if (state := writer.breaker.state.value) != "closed":
                states[f"breaker of writes of {writer.tier.name} {state}"] += 1
        if cache.parts.stuck:
            states["something stuck"] += 1
        if not cache.cpu.pool.free:
            states["no slot free"] += 1
        for disk in disks:
            if not disk.free_blocks:
                states[f"{disk.root.rpartition('/')[2]} full"] += 1

    def end(self, cache: TierCache) -> None:
        """What a cache has counted in its life."""
        if cache._parts is None:
            return  # its start had not come so far
        states = self.states
        reader = cache.parts.reader.counters
        found = {
            "get joined another": reader.joined,
            "get late": reader.late,
            "get overtaken": reader.overtaken,
            "puts skipped": cache.parts.ingest.skipped,
        }
        for tier in (cache.cpu, *cache.tiers):
            statistics = tier.statistics()
            found |= {
                f"{tier.name} evicted": statistics.evicted,
                f"{tier.name} corrupt": statistics.corrupt,
                f"{tier.name} strays removed": statistics.strays,
                f"{tier.name} failed to write": statistics.write_failures,
            }
        for writer in cache.parts.fan_out.writers:
            written = writer.statistics()
            found |= {
                f"{writer.tier.name} write skipped": written.skipped,
                f"{writer.tier.name} write replaced": written.replaced,
                f"{writer.tier.name} write dropped": written.dropped,
                f"{writer.tier.name} write retried": written.retried,
            }
        states.update({name: count for name, count in found.items() if count})
