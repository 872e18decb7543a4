"""Run `tiercache config diff`: show what differs between two configurations."""

from __future__ import annotations

import sys
from pathlib import Path

from tiercache.config import Config
from tiercache.config.changes import Change, changes
from tiercache.errors import ConfigError


def diff_command(old: Path, new: Path) -> int:
    """Print the keys that differ, both files read in this environment. Return 1 if a file cannot be used."""
    try:
        found = changes(Config.load(old, quiet=True), Config.load(new, quiet=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for change in found:
        print(f"{change} ({_how(change)})")
    return 0


def _how(change: Change) -> str:
    if not change.live:
        return "needs a restart"
    if change.key == "max_local_cpu_size" and change.after > change.before:
        return "needs a restart, unless the cache was started with as much"
    return "live"
