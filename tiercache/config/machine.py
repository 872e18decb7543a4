"""Memory of the machine, which a configuration may depend on."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return what the system could give without swapping, read once per process; None if it does not say."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
