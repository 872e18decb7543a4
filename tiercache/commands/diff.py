"""Run `tiercache config diff`: show what differs between two configurations."""

from __future__ import annotations

import sys
from pathlib import Path

from tiercache.config import Config
from tiercache.config.changes import changes
from tiercache.errors import ConfigError


def diff_command(old: Path, new: Path) -> int:
    """Print the keys that differ, both files read in this environment. Return 1 if a file cannot be used."""
    try:
        found = changes(Config.load(old, quiet=True), Config.load(new, quiet=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for change in found:
        print(f"{change} ({'live' if change.live else 'needs a restart'})")
    return 0
