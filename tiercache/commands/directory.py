"""Walking a directory of the disk tier without a cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tiercache.tiers.volume import CHUNK_NAME, TOP_LEVELS


def problem_with(directory: Path) -> str | None:
    """One sentence when `directory` is not one of ours."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    manifest = directory / "tiercache.json"
    if not manifest.is_file():
        return f"{directory} is not a directory of the disk tier: it has no tiercache.json"
    try:
        json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        return f"{manifest} cannot be read: {error}"
    return None


def complain(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 2


def chunk_files(directory: Path) -> Iterator[Path]:
    for top in TOP_LEVELS:
        for path in sorted((directory / top).glob("*")):
            if CHUNK_NAME.fullmatch(path.name):
                yield path
