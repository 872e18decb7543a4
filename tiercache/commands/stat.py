"""Run `tiercache stat DIR`: report chunks, bytes, layouts and ages, from headers alone."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import aiofiles
from aiofiles import ospath
from rich.console import Console
from rich.table import Column, Table

from tiercache.commands.findings import complain
from tiercache.core.header import PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.tables import show_figures
from tiercache.tiers.files.access import ABSENT, open_file
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.directory import CHUNK_NAME, MANIFEST, TOP_LEVELS, place_of
from tiercache.tiers.files.owners import PENDING_NAME


def stat_command(directory: Path, as_json: bool) -> int:
    if (problem := asyncio.run(problem_with(directory))) is not None:
        return complain(problem)
    try:
        found = survey(directory)
    except OSError as error:
        return complain(f"{directory} cannot be read: {error}")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(directory, found)
    return 0


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


def survey(directory: Path) -> dict[str, Any]:
    """Count the chunks below `directory`, and the bytes that the file system allocates to them. Read-only.

    `counted_bytes` is the expected value of the capacity counter (chunks and their directories);
    `ledger_bytes` is its actual value. They differ while a process writes, and after a crash until a recount.
    """
    place, now_s = place_of(directory), time.time()
    layouts: dict[str, dict[str, int]] = defaultdict(lambda: {"chunks": 0, "payload_bytes": 0, "occupied_bytes": 0})
    foreign, counted_bytes = 0, sum(_own_bytes(place / top) for top in TOP_LEVELS)
    ages: list[float] = []
    unreadable: list[str] = []
    unfinished_bytes = [
        _allocated_bytes(status)
        for path, status in _files(place / ".tiercache" / "tmp")
        if not path.endswith((".lock", ".new"))
    ]
    with ThreadPoolExecutor() as threads:
        for path, status, header in chain.from_iterable(threads.map(headers_in, [place / top for top in TOP_LEVELS])):
            name, occupied_bytes = os.path.basename(path), _allocated_bytes(status)
            if PENDING_NAME.fullmatch(name):
                unfinished_bytes.append(occupied_bytes)
                continue
            if not CHUNK_NAME.fullmatch(name):
                foreign += 1
                continue
            counted_bytes += occupied_bytes
            if isinstance(header, Header):
                layout = layouts[header.fingerprint.hex()]
                layout["chunks"] += 1
                layout["payload_bytes"] += header.payload_bytes
                layout["occupied_bytes"] += occupied_bytes
                ages.append(now_s - status.st_mtime)
            elif header is not None:
                unreadable.append(f"{path}: {header}")
    ages.sort()
    return {
        "directory": str(directory),
        "chunks": len(ages),
        "occupied_bytes": sum(layout["occupied_bytes"] for layout in layouts.values()),
        "counted_bytes": counted_bytes,
        "ledger_bytes": counted_in(place / ".tiercache" / "ledger"),
        "layouts": dict(sorted(layouts.items())),
        "unreadable": sorted(unreadable),
        "unfinished": len(unfinished_bytes),
        "unfinished_bytes": sum(unfinished_bytes),
        "foreign": foreign,
        "newest_s": round(ages[0], 1) if ages else None,
        "median_age_s": round(ages[len(ages) // 2], 1) if ages else None,
        "oldest_s": round(ages[-1], 1) if ages else None,
    }


def headers_in(directory: Path) -> list[tuple[str, os.stat_result, Header | str | None]]:
    """Return the files of a directory with their headers or errors."""
    return [(path, status, header_of(path)) for path, status in _files(directory)]


def header_of(path: Path | str) -> Header | str | None:
    """Return the header of a chunk or an error; None for other files, and for a file that has vanished."""
    if not CHUNK_NAME.fullmatch(os.path.basename(path)):
        return None
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
            length_bytes = os.fstat(file.fileno()).st_size
            header = Header.unpack(file.read(PACKED_BYTES))
    except FileNotFoundError:
        return None  # evicted meanwhile
    except (OSError, HeaderError) as error:
        return str(error)
    expected = file_bytes(header.payload_bytes)
    return header if length_bytes == expected else f"length: expected {expected} bytes, found {length_bytes}"


def _files(directory: Path) -> list[tuple[str, os.stat_result]]:
    """Return the files directly in `directory` with their status. Leaves out files that vanish meanwhile."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.path, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    except ABSENT:
        return []
    return found


def _own_bytes(directory: Path) -> int:
    try:
        status = directory.stat()
    except FileNotFoundError:
        return 0
    return _allocated_bytes(status) if stat.S_ISDIR(status.st_mode) else 0


def _allocated_bytes(status: os.stat_result) -> int:
    return status.st_blocks * 512


def _show(directory: Path, found: dict[str, Any]) -> None:
    print(directory)
    table = Table("layout", *(Column(name, justify="right") for name in ("chunks", "payload", "on disk")))
    for fingerprint, layout in found["layouts"].items():
        sizes = (_mib(layout["payload_bytes"]), _mib(layout["occupied_bytes"]))
        table.add_row(fingerprint[:16], f"{layout['chunks']:,}", *sizes)
    show_figures(table, Console())
    counter = "says nothing" if found["ledger_bytes"] is None else f"says {_mib(found['ledger_bytes'])}"
    print(f"{found['chunks']:,} chunks on {_mib(found['occupied_bytes'])}")
    print(f"the counter {counter}, there are {_mib(found['counted_bytes'])} (with directories)")
    if found["chunks"]:
        print(f"ages: newest {found['newest_s']:,} s, median {found['median_age_s']:,} s, oldest {found['oldest_s']:,} s")
    if found["unfinished"]:
        size = _mib(found["unfinished_bytes"])
        print(f"{found['unfinished']} unfinished files ({size}): being written, or left by a crash until the next start")
    if found["foreign"]:
        print(f"{found['foreign']} files that are not chunks")
    for line in found["unreadable"]:
        print(f"unreadable: {line}")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
