"""What the machine has, as far as a configuration depends on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What the system could give without swapping, once per process; None where it does not say."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
