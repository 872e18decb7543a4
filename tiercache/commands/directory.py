"""Walk a directory of chunk files without a cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiofiles
from aiofiles import ospath

from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.directory import CHUNK_NAME, MANIFEST, TOP_LEVELS, place_of


async def problem_with(directory: Path) -> str | None:
    """Return a sentence if `directory` is not a tiercache directory, else None."""
    if not await ospath.isdir(directory):
        return f"{directory} is not a directory"
    manifest = await asyncio.to_thread(place_of, directory) / MANIFEST
    if not await ospath.isfile(manifest):
        return f"{directory} is not a directory of chunks: it has no {MANIFEST}"
    try:
        async with aiofiles.open(manifest, encoding="utf-8") as file:
            json.loads(await file.read())
    except (OSError, ValueError, RecursionError) as error:
        return f"{manifest} cannot be read: {error}"
    return None


def chunk_files(directory: Path) -> Iterator[Path]:
    """Yield the paths with names of chunks. Raises OSError if a directory cannot be read."""
    place = place_of(directory)
    for top in TOP_LEVELS:
        with suppress(*ABSENT):
            yield from sorted(path for path in (place / top).iterdir() if CHUNK_NAME.fullmatch(path.name))
