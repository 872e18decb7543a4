"""Memory of the machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def meminfo() -> dict[str, int]:
    """Return the sizes in kB and the counts of pages that the kernel reports; empty if it does not."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


@cache
def available_memory_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, or None if unknown.

    Reads them once per process: a cache that reads its configuration again has allocated much of them.
    """
    available_kb = meminfo().get("MemAvailable")
    return None if available_kb is None else available_kb * 1024
