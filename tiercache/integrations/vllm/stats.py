"""What vLLM carries from its workers and its scheduler to whoever logs and exports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tiercache.control.families import Labels
from tiercache.core.breaker import BreakerState
from tiercache.core.estimate import Distribution
from tiercache.integrations.vllm import exported


@dataclass
class TierCacheStats(KVConnectorStats):  # type: ignore[misc]
    """`data`, which survives pickle and msgpack; names are those of `EXPORTED`:

        {"counters": {name: {labels: what came since the last time}},
         "distributions": {name: {labels: (counts, sums) of what came since the last time}},
         "gauges": {cache: {name: {labels: value}}}}

    A cache is a worker's, so what several workers say of theirs adds up, and what one says later replaces what it said.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "distributions": {}, "gauges": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def count(self, name: str, amount: float, labels: Labels = ()) -> None:
        if amount > 0:
            counts = self.data["counters"].setdefault(name, {})
            counts[labels] = counts.get(labels, 0) + amount

    def distribute(self, name: str, came: Distribution, labels: Labels = ()) -> None:
        if came.count:
            self._distribute(name, labels, came.counts, came.sums)

    def _distribute(self, name: str, labels: Labels, counts: list[int], sums: list[float]) -> None:
        known = self.data["distributions"].setdefault(name, {})
        if labels in known:
            before = known[labels]
            counts = [one + other for one, other in zip(before[0], counts, strict=True)]
            sums = [one + other for one, other in zip(before[1], sums, strict=True)]
        known[labels] = (list(counts), list(sums))

    def show(self, cache: str, gauges: dict[str, dict[Labels, float]]) -> None:
        """All gauges of a cache."""
        self.data["gauges"][cache] = gauges

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, counts in other.data["counters"].items():
            for labels, amount in counts.items():
                self.count(name, amount, labels)
        for name, distributions in other.data["distributions"].items():
            for labels, (counts, sums) in distributions.items():
                self._distribute(name, labels, counts, sums)
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what came since the last one, and how much waits now. Of tiers, only what is not nothing."""
        queried = self._counts(exported.QUERIED_TOKENS.name)
        line: dict[str, int | float] = {"Queried tokens": max(queried.values(), default=0)}
        for (tier,), tokens in self._counts(exported.HIT_TOKENS.name).items():
            line[f"Hit tokens ({tier})"] = tokens
        for word, size, time in (
            ("Loaded", exported.LOAD_BYTES, exported.LOAD_TIME),
            ("Stored", exported.STORE_BYTES, exported.STORE_TIME),
        ):
            payload_bytes = self._total(size.name)
            line[f"{word} MB"] = round(payload_bytes / 1e6, 3)
            if seconds := self._total(time.name):
                line[f"{word} MB/s"] = round(payload_bytes / 1e6 / seconds, 1)
        for name, words in (("read_bytes", "Read MB"), ("write_bytes", "Written MB")):
            for (tier,), payload_bytes in self._counts(f"vllm:kv_offload_tiering_{name}").items():
                line[f"{words} ({tier})"] = round(payload_bytes / 1e6, 3)
        for (tier,), chunks in self._counts("tiercache_tier_evicted").items():
            line[f"Evicted chunks ({tier})"] = chunks
        line["Queued chunks"] = self._gauge("tiercache_writer_queued")
        failures = {
            "Failed look-ups": self._total(exported.LOOKUPS_FAILED.name),
            "Incomplete loads": self._total(exported.LOADS.name) - self._counts(exported.LOADS.name).get(("whole",), 0),
            "Failed reads": self._total("tiercache_read_failures"),
            "Chunks not written": self._total("tiercache_writer_skipped") + self._total("tiercache_writer_dropped"),
            "Chunks not stored": self._total("tiercache_puts_skipped"),
            "Breakers not closed": self._breakers_not_closed(),
        }
        return line | {words: chunks for words, chunks in failures.items() if chunks}

    def _counts(self, name: str) -> dict[Labels, float]:
        counts: dict[Labels, float] = self.data["counters"].get(name, {})
        return counts

    def _total(self, name: str) -> float:
        return sum(self._counts(name).values())

    def _gauge(self, name: str) -> float:
        return float(sum(sum(gauges.get(name, {}).values()) for gauges in self.data["gauges"].values()))

    def _breakers_not_closed(self) -> float:
        return float(
            sum(
                value
                for gauges in self.data["gauges"].values()
                for name in ("tiercache_breaker", "tiercache_write_breaker")
                for (_, state), value in gauges.get(name, {}).items()
                if state != BreakerState.CLOSED.value
            )
        )
