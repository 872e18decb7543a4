"""Describe the machine that the figures depend on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from tiercache import __version__
from tiercache.commands.doctor import huge_page_mode
from tiercache.tiers.files.access import file_system_of
from tiercache.tiers.files.format import supports_direct_io


def machine(directory: Path) -> dict[str, Any]:
    """Return facts about this machine and the file system at `directory`."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    place = os.statvfs(directory)
    return {
        "tiercache": __version__,
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in ("numpy", "xxhash", "uvloop")},
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 2**30, 1),
        "transparent_huge_pages": huge_page_mode(),
        "file_system": file_system_of(directory),
        "direct_io": supports_direct_io(directory),
        "disk_free_gb": round(place.f_bavail * place.f_frsize / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
