"""The figures of a cache in vLLM's `/metrics`: under vLLM's own names where it has one for the same thing, and under ours.

vLLM's are those of its offloading connector (vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py and
vllm/v1/kv_offload/tiering/spec.py): same units, same labels. Pure: no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tiercache.control.families import FAMILIES, Family, Figures, Row, reads_by_tier
from tiercache.tiers.cpu import CpuTier

_SIZES_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_DELAYS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
_OFFLOAD = "vllm:kv_offload_"

LOAD_BYTES = Family(f"{_OFFLOAD}load_bytes", "counter", "Bytes loaded into the engine's blocks.")
LOAD_TIME = Family(f"{_OFFLOAD}load_time", "counter", "Time that loads took from begin to end, in seconds.")
LOAD_SIZE = Family(f"{_OFFLOAD}load_size", "histogram", "Bytes of a load.", bounds=_SIZES_BYTES)
STORE_BYTES = Family(f"{_OFFLOAD}store_bytes", "counter", "Bytes stored from the engine's blocks.")
STORE_TIME = Family(f"{_OFFLOAD}store_time", "counter", "Time that stores took from begin to end, in seconds.")
STORE_SIZE = Family(f"{_OFFLOAD}store_size", "histogram", "Bytes of a store.", bounds=_SIZES_BYTES)
LOOKUP_DELAY = Family(
    f"{_OFFLOAD}lookup_async_delay_seconds",
    "histogram",
    "Time from when a request was first put off for its look-up until that was answered.",
    bounds=_DELAYS_S,
)
CHUNK_QUERIES = Family(
    f"{_OFFLOAD}tiering_chunk_queries", "counter", "Chunks of requests that no tier above this one had.", ("tier",)
)
CHUNK_HITS = Family(f"{_OFFLOAD}tiering_chunk_hits", "counter", "Chunks of requests that lay in a tier.", ("tier",))

QUERIED_TOKENS = Family(
    "tiercache_queried_tokens", "counter", "Tokens of requests that no tier above this one had.", ("tier",)
)
HIT_TOKENS = Family("tiercache_hit_tokens", "counter", "Tokens of requests that lay in a tier.", ("tier",))
LOOKUPS_FAILED = Family("tiercache_lookups_failed", "counter", "Look-ups of requests that failed or took too long.")
LOADS_SKIPPED = Family(
    "tiercache_loads_skipped", "counter", "Hits that were computed instead: shorter than min_retrieve_tokens."
)
LOADS = Family(
    "tiercache_loads",
    "counter",
    "Loads of each worker by how they ended: whole; in part, or failed, where the engine computed the rest.",
    ("outcome",),
)


def _below(part: str, key: str) -> Callable[[Figures], Iterator[Row]]:
    """Of the tiers below the hot cache, which is the primary tier in vLLM's words."""

    def rows(figures: Figures) -> Iterator[Row]:
        for tier, values in figures["statistics"][part].items():
            if tier != CpuTier.name:
                yield (tier,), values[key]

    return rows


def _reads(value: Callable[[Any], float]) -> Callable[[Figures], Iterator[Row]]:
    return lambda figures: (((tier,), value(read)) for tier, read in reads_by_tier(figures).items())


def _write_time(figures: Figures) -> Iterator[Row]:
    for tier, values in figures["statistics"]["writers"].items():
        yield (tier,), sum(values["seconds"]["sums"])


def _unwritten(figures: Figures) -> Iterator[Row]:
    for tier, values in figures["statistics"]["writers"].items():
        yield (tier,), values["queued"] + values["writing"]


def _tiering(name: str, kind: Any, text: str, rows: Callable[[Figures], Iterator[Row]]) -> Family:
    return Family(f"{_OFFLOAD}tiering_{name}", kind, text, ("tier",), rows)


SAMPLED = (
    *FAMILIES,
    _tiering("read_bytes", "counter", "Bytes read from a tier below the hot cache.", _below("tiers", "read_bytes")),
    _tiering(
        "read_time", "counter", "Time of reads from such a tier, in seconds.", _reads(lambda read: read["seconds"].sum)
    ),
    _tiering("write_bytes", "counter", "Bytes written to a tier below the hot cache.", _below("tiers", "written_bytes")),
    _tiering("write_time", "counter", "Time of writes to such a tier, in seconds.", _write_time),
    _tiering("promotion_job_failures", "counter", "Reads of such a tier that failed.", _reads(lambda read: read["failed"])),
    _tiering("cascade_job_failures", "counter", "Writes to such a tier that were given up.", _below("writers", "dropped")),
    _tiering("active_promotion_jobs", "gauge", "Reads under way.", _reads(lambda read: read["reading"])),
    _tiering("active_cascade_jobs", "gauge", "Chunks that wait to be written, or are being written.", _unwritten),
    Family(
        f"{_OFFLOAD}allocation_failure",
        "counter",
        "Chunks not stored: no memory came free in time.",
        (),
        lambda figures: [((), figures["statistics"]["puts_skipped"])],
    ),
)
"""What a worker's cache counts; see `WorkerFigures`."""

COUNTED = (
    *(LOAD_BYTES, LOAD_TIME, LOAD_SIZE, STORE_BYTES, STORE_TIME, STORE_SIZE, LOADS),
    *(LOOKUP_DELAY, CHUNK_QUERIES, CHUNK_HITS, QUERIED_TOKENS, HIT_TOKENS, LOOKUPS_FAILED, LOADS_SKIPPED),
)
"""What the two halves of the connector count."""

EXPORTED = {family.name: family for family in (*COUNTED, *SAMPLED)}
