"""Resource usage of a process, and whether it grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from tiercache.memory.arena import SHM_DIRECTORY
from tiercache.tiers.files.access import mounts

SOAK_S = 600.0
"""A campaign that lasts so long is a soak."""
SETTLED_S = 600.0
"""One-time allocations have ended by then, or by the first quarter of a shorter soak."""
GROWTH = 0.02
"""Allowed growth of resident memory, as a part of it, from the settled state to the last tenth of a soak."""
PARTS = 6
WARM_UP_BYTES = 24 << 20
"""Allowed growth in a shorter campaign: modules, threads and tables that are filled for the first time."""
DESCRIPTORS, THREADS = 8, 32
"""Allowed growth of their counts: threads are started when first needed."""


@dataclass(frozen=True)
class Usage:
    at_s: float
    """Since the campaign's beginning."""
    rss_bytes: int
    descriptors: int
    threads: int


def usage_of(pid: int, at_s: float) -> Usage | None:
    """None when it is gone."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None  # it is ending, or nobody has waited for it: then it has no memory any more
    return Usage(at_s, int(status["VmRSS"].split()[0]) * 1024, descriptors, int(status["Threads"]))


@dataclass(frozen=True)
class Growth:
    """From the end of the first tenth, in a soak from when it has settled, to the end. Memory in a soak is the median of the
    samples around each: what a process has at one moment depends on what it did last."""

    first: Usage
    last: Usage
    leaks: tuple[str, ...]
    course: tuple[int, ...] = ()
    """The median of the resident memory in each sixth of a soak, in bytes: what leaks grows in all of them."""


def growth(samples: Sequence[Usage], seconds: float, descriptors_kept: int = 0) -> Growth | None:
    """None with fewer than two samples."""
    if len(samples) < 2:
        return None
    soaks = seconds >= SOAK_S
    settled_s = min(SETTLED_S, seconds / 4) if soaks else seconds / 10
    early = [sample for sample in samples if sample.at_s <= settled_s]
    first, last = early[-1] if early else samples[0], samples[-1]
    allowed_bytes = WARM_UP_BYTES
    if soaks:
        first = _typical(first, [sample for sample in early if sample.at_s >= settled_s / 2])
        last = _typical(last, [sample for sample in samples if sample.at_s >= last.at_s - seconds / 10])
        allowed_bytes = int(GROWTH * first.rss_bytes)
    leaks = []
    if (more := last.rss_bytes - first.rss_bytes) > allowed_bytes:
        leaks.append(f"memory: {more / 2**20:.1f} MiB more than {first.rss_bytes / 2**20:.1f}")
    for name, was, now, allowed in (
        ("descriptors", first.descriptors, last.descriptors, DESCRIPTORS + descriptors_kept),
        ("threads", first.threads, last.threads, THREADS),
    ):
        if now - was > allowed:
            leaks.append(f"{name}: {was}, then {now}")
    return Growth(first, last, tuple(leaks), _course(samples, seconds) if soaks else ())


def _course(samples: Sequence[Usage], seconds: float) -> tuple[int, ...]:
    parts: list[list[int]] = [[] for _ in range(PARTS)]
    for sample in samples:
        parts[min(PARTS - 1, int(PARTS * sample.at_s / seconds))].append(sample.rss_bytes)
    return tuple(int(median(part)) for part in parts if part)


def _typical(sample: Usage, around: Sequence[Usage]) -> Usage:
    return replace(sample, rss_bytes=int(median(each.rss_bytes for each in around or [sample])))


def left_behind(directory: Path) -> list[str]:
    """Shared memory and mounts of a campaign in `directory`."""
    found = [f"shared memory: {entry}" for entry in shared_memory_of(directory)]
    return found + [f"mount: {mount.point}" for mount in mounts() if Path(mount.point).is_relative_to(directory)]


def shared_memory_of(directory: Path) -> list[Path]:
    return [entry for entry in SHM_DIRECTORY.glob("*") if directory.name in entry.name]
