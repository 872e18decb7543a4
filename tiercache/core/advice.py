"""The figures of `tiercache advise`, and the sentences that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercache.core.admission import DAY_S

AGES = {"1m": 60.0, "10m": 600.0, "1h": 3600.0, "1d": DAY_S, "more": float("inf")}
"""Bounds of the time between the last use of an evicted chunk and the request that missed it, in seconds."""

REASONS = {
    "never_stored": "the first request for a chunk, which no cache has",
    "evicted": "a chunk that was stored and has been evicted since",
    "declined": "a chunk that left RAM and that the admission had kept from flash",
    "partial_chunk": "tokens after the last whole chunk of a prompt that was found",
    "gap": "a chunk that is there, behind a chunk that is not",
    "tier_down": "a chunk of a tier whose circuit breaker is open",
    "too_slow": "a chunk of a tier that would take longer to load it than the engine to compute it",
    "deadline": "a chunk that did not arrive, or a tier that did not answer, in time",
    "failed": "a chunk that was found and then could not be read: damaged, or removed meanwhile",
}
"""The reasons of misses, each with its meaning."""

_LEAST_REQUESTS = 100
_LEAST_GAIN = 0.005
"""Smallest change of the hit rate that is worth a suggestion."""
_LEAST_SHARE = 0.1
"""Smallest share of the misses that is worth a sentence."""
_MOST_WRITTEN = 4.0
"""Bytes written to flash for each byte read again that are worth a suggestion."""

_ADMITTING = ("disk", "gds")
"""The tiers that `flash_admission` is for."""

_REMEDIES = {
    "never_stored": "asked for the first time: no cache of any size has those",
    "declined": "chunks that the admission kept from flash: consider `flash_admission: all`",
    "partial_chunk": "partial chunks: `save_unfull_chunk`, or a smaller `chunk_size`",
    "gap": "chunks behind a missing one, which only a larger cache avoids",
    "tier_down": "chunks of a tier that is down: `tiercache top` shows its circuit breaker",
    "too_slow": "chunks of a tier that is slower than computing: a faster tier would serve them",
    "deadline": "too late: see `lookup_timeout_ms` and `blocking_timeout_secs`",
    "failed": "chunks that could not be read: the log has the errors",
}


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


@dataclass(frozen=True)
class Usage:
    """What requests asked for, of one tenant or of all. The floats are estimates from the sample."""

    asked_tokens: int = 0
    found_tokens: int = 0
    missed_tokens: dict[str, float] = field(default_factory=dict)
    """By reason, a name in `REASONS`."""
    evicted_tokens: dict[str, float] = field(default_factory=dict)
    """Those of the reason "evicted" by the time since the last use, a name in `AGES`."""
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
    """By tag in hex, as in `TierStatistics.tenants`. Empty while there is only one tenant."""
    tiers: dict[str, TierAdvice]


def sentences(advice: Advice) -> list[str]:
    """Return what to change, in plain words, the most important first."""
    usage = advice.usage
    if advice.requests < _LEAST_REQUESTS:
        return [f"{advice.requests} requests so far: too few for advice, which begins at {_LEAST_REQUESTS}."]
    found = [*_ram(advice), *_flash(advice)]
    missed = sum(usage.missed_tokens.values())
    for reason, tokens in sorted(usage.missed_tokens.items(), key=lambda item: -item[1]):
        if tokens >= _LEAST_SHARE * missed:
            remedy = _evicted(usage) if reason == "evicted" else _REMEDIES[reason]
            found.append(f"{100 * tokens / missed:.0f} % of misses are {remedy}.")
    return [*found, _saved(advice)]


def _ram(advice: Advice) -> Iterator[str]:
    ram = advice.tiers.get("cpu")
    if ram is None:
        return
    gain, loss = ram.hit_rate_doubled - ram.hit_rate, ram.hit_rate - ram.hit_rate_halved
    beside = max((tier.hit_rate for name, tier in advice.tiers.items() if name != "cpu"), default=0.0)
    if gain >= _LEAST_GAIN:
        whole = max(0.0, ram.hit_rate_doubled - max(ram.hit_rate, beside))
        of = "of hit rate" if whole >= gain else f"of hits in RAM, {_points(whole)} of hit rate with the tiers below"
        yield f"{size(ram.capacity_bytes)} more RAM: {_points(gain)} {of}."
    elif loss >= _LEAST_GAIN:
        yield f"More RAM is not worth it: twice as much brings {_points(gain)} of hit rate."
    else:
        half = size(ram.capacity_bytes // 2)
        yield f"Less RAM would do: {half} less costs {_points(loss, '')} of hit rate."


def _flash(advice: Advice) -> Iterator[str]:
    ram = advice.tiers.get("cpu")
    above = 0.0 if ram is None else ram.hit_rate
    for name, tier in advice.tiers.items():
        if name == "cpu":
            continue
        daily = size(tier.written_bytes * DAY_S / max(1.0, advice.span_s))
        text = f"{name}: {_points(max(0.0, tier.hit_rate - above))}, {daily} written a day"
        if tier.read_bytes:
            text += f", {tier.written_bytes / tier.read_bytes:.1f} bytes for each byte read again"
        wasteful = tier.written_bytes > _MOST_WRITTEN * tier.read_bytes
        if wasteful and tier.admits_all and name in _ADMITTING:
            text += ": consider `flash_admission: second_touch`"
        yield f"{text}."
        gain = tier.hit_rate_doubled - tier.hit_rate
        if gain >= _LEAST_GAIN:
            yield f"{name}: {size(tier.capacity_bytes)} more would bring {_points(gain)}."


def _evicted(usage: Usage) -> str:
    """Return what evicted chunks need, with the age that covers half of them."""
    half, seen = sum(usage.evicted_tokens.values()) / 2, 0.0
    for age, tokens in usage.evicted_tokens.items():
        seen += tokens
        if seen >= half and age != "more":
            return f"evicted chunks, half of them used less than {age} before: a larger cache keeps them"
    return "evicted chunks, most of them not used for a day"


def _saved(advice: Advice) -> str:
    text = f"{advice.loaded_tokens:,} tokens were loaded instead of computed"
    if advice.saved_s is None:
        return f"{text}; how many seconds that saved is unknown: set `prefill_tokens_per_s`."
    return f"{text}: {advice.saved_s:,.0f} s of prefill saved in {advice.span_s:,.0f} s."


def _points(change: float, sign: str = "+") -> str:
    return f"{sign}{100 * change:.1f} points"


def size(size_bytes: float) -> str:
    """Return a size in the largest unit that leaves at least 1 before the point; a GB is 1024**3 bytes."""
    for power, unit in ((40, "TB"), (30, "GB"), (20, "MB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.3g} {unit}"
    return f"{size_bytes / 1024:.3g} KB"
