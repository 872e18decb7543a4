"""Available memory of the machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that can be allocated without swapping, read once per process, or None if unknown."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
