"""The figures of `tiercache advise`, and the sentences that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercache.core.admission import DAY_S

EVICTED = {"evicted_10m": 600.0, "evicted_1h": 3600.0, "evicted_1d": DAY_S, "evicted_longer": float("inf")}
"""Reasons of evicted chunks, with the bound of the time between their last use and the request, in seconds."""

REASONS = {
    "never_stored": "asked for the first time: no cache of any size has those",
    "evicted_10m": "evicted chunks that were used less than 10 minutes before: a larger cache keeps them",
    "evicted_1h": "evicted chunks that were used less than an hour before: a larger cache keeps them",
    "evicted_1d": "evicted chunks that were used less than a day before: a larger cache keeps them",
    "evicted_longer": "evicted chunks that were not used for a day",
    "declined": "chunks that the admission kept from flash: consider `flash_admission: all`",
    "partial_chunk": "partial chunks: `save_unfull_chunk`, or a smaller `chunk_size`",
    "gap": "chunks behind a missing one, which only a larger cache avoids",
    "tier_down": "chunks of a tier that is down or detached: `tiercache top` shows its circuit breaker",
    "too_slow": "chunks of a tier that is slower than computing: a faster tier would serve them",
    "deadline": "too late: see `lookup_timeout_ms` and `blocking_timeout_secs`",
}
"""The reasons of misses, and how a sentence about them ends."""

_LEAST_REQUESTS = 100
_LEAST_GAIN = 0.005
"""Smallest change of the hit rate that is worth a suggestion."""
_LEAST_SHARE = 0.1
"""Smallest share of the misses that is worth a sentence."""
_MOST_WRITTEN = 4.0
"""Bytes written to flash for each byte read again that are worth a suggestion."""
_ADMITTING = ("disk", "gds")
"""The tiers that `flash_admission` is for."""


@dataclass(frozen=True)
class TierAdvice:
    """A tier whose size is known. The hit rates are those of an LRU cache of its size, half of it, and twice."""

    capacity_bytes: int
    hit_rate: float
    hit_rate_halved: float
    hit_rate_doubled: float
    written_bytes: int
    read_bytes: int
    admits_all: bool
    """False if an admission keeps chunks away. The hit rates are those of a tier that takes all."""
    slow_tokens: float = 0.0
    """Those of `Usage.sampled_tokens` that it had and that were missed, since computing them was faster."""


@dataclass(frozen=True)
class Usage:
    """What requests asked for, of one tenant or of all. The floats are estimates from the sample."""

    asked_tokens: int = 0
    found_tokens: int = 0
    missed_tokens: dict[str, float] = field(default_factory=dict)
    """By reason, a name in `REASONS`."""
    sampled_tokens: float = 0.0
    """The estimate of `asked_tokens`, less partial chunks."""
    hit_tokens: dict[str, float] = field(default_factory=dict)
    """Those of `sampled_tokens` that are in an LRU cache, by its size in bytes."""


@dataclass(frozen=True)
class Advice:
    """What a cache of another size would be worth, and why requests missed, since the cache was opened."""

    span_s: float
    requests: int
    loaded_tokens: int
    """Tokens that were delivered instead of computed."""
    saved_s: float | None
    """Seconds that the engine would have taken to compute them, at its present speed; None if that is not known."""
    sampled_chunks: int
    rate: float
    """The fraction of chunks that is sampled."""
    usage: Usage
    tenants: dict[str, Usage]
    """Those that asked for most, by tag in hex as in `TierStatistics.tenants`. Empty while there is only one tenant."""
    tiers: dict[str, TierAdvice]


def sentences(advice: Advice) -> list[str]:
    """Return what to change, in plain words, the most important first."""
    if advice.requests < _LEAST_REQUESTS:
        return [f"{advice.requests} requests so far: too few for advice, which begins at {_LEAST_REQUESTS}."]
    found = [said for name in advice.tiers for said in _tier(advice, name)]
    missed = advice.usage.missed_tokens
    whole = sum(missed.values())
    for reason in sorted(missed, key=lambda reason: -missed[reason]):
        if whole and missed[reason] >= _LEAST_SHARE * whole:
            found.append(f"{100 * missed[reason] / whole:.0f} % of misses are {REASONS[reason]}.")
    loaded = f"{advice.loaded_tokens:,} tokens were loaded instead of computed"
    if advice.saved_s is None:
        return [*found, f"{loaded}; how many seconds that saved is unknown: set `prefill_tokens_per_s`."]
    return [*found, f"{loaded}: {advice.saved_s:,.0f} s of prefill saved in {advice.span_s:,.0f} s."]


def _tier(advice: Advice, name: str) -> Iterator[str]:
    """Yield what a tier brings besides the hot cache, and what another size of it would."""
    tier, ram = advice.tiers[name], advice.tiers.get("cpu")
    title = "RAM" if tier is ram else name
    if tier is not ram:
        daily = size(tier.written_bytes * DAY_S / max(1.0, advice.span_s))
        brings = max(0.0, _served(advice, tier) - (0.0 if ram is None else ram.hit_rate))
        text = f"{name}: {_points(brings)}, {daily} written a day"
        if tier.read_bytes:
            text += f", {tier.written_bytes / tier.read_bytes:.1f} bytes for each byte read again"
        if tier.written_bytes > _MOST_WRITTEN * tier.read_bytes and tier.admits_all and name in _ADMITTING:
            text += ": consider `flash_admission: second_touch`"
        yield f"{text}."
        if tier.slow_tokens and not brings:
            yield f"More {name} is not worth it while loading from it is slower than computing."
            return
    gain, loss = tier.hit_rate_doubled - tier.hit_rate, tier.hit_rate - tier.hit_rate_halved
    if gain >= _LEAST_GAIN:
        whole = max(0.0, tier.hit_rate_doubled - max(_served(advice, other) for other in advice.tiers.values()))
        of = (
            "of hit rate" if whole >= gain else f"of hits in {title}, {_points(whole)} of hit rate with the other tiers"
        )
        yield f"{size(tier.capacity_bytes)} more {title}: {_points(gain)} {of}."
    elif loss >= _LEAST_GAIN:
        yield f"More {title} is not worth it: twice as much brings {_points(gain)} of hit rate."
    else:
        yield f"Less {title} would do: {size(tier.capacity_bytes / 2)} less costs {100 * loss:.1f} points of hit rate."


def _served(advice: Advice, tier: TierAdvice) -> float:
    """Return the hit rate of a tier, less the hits that it was too slow for."""
    return tier.hit_rate - tier.slow_tokens / max(1.0, advice.usage.sampled_tokens)


def _points(change: float) -> str:
    return f"+{100 * change:.1f} points"


def size(size_bytes: float) -> str:
    """Return a size in the largest unit that leaves at least 1 before the point; a GB is 1024**3 bytes."""
    for power, unit in ((40, "TB"), (30, "GB"), (20, "MB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.3g} {unit}"
    return f"{size_bytes / 1024:.3g} KB"
