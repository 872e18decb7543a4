"""`tiercache stat DIR`: chunks, bytes, layouts and ages, from headers alone."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiofiles

from tiercache.commands.directory import complain, problem_with
from tiercache.core.header import PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.tiers.ledger import counted_in
from tiercache.tiers.volume import CHUNK_NAME, TOP_LEVELS

_AT_ONCE = 32


def stat_command(directory: Path, as_json: bool) -> int:
    if (problem := problem_with(directory)) is not None:
        return complain(problem)
    try:
        found = asyncio.run(survey(directory))
    except OSError as error:
        return complain(f"{directory} cannot be read: {error}")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(directory, found)
    return 0


class _Read:
    """What was found in headers."""

    def __init__(self) -> None:
        self.layouts: dict[str, dict[str, int]] = defaultdict(
            lambda: {"chunks": 0, "payload_bytes": 0, "occupied_bytes": 0}
        )
        self.unreadable: list[str] = []
        self.ages: list[float] = []
        self._now_s = time.time()
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def look(self, path: str, status: os.stat_result) -> None:
        async with self._places:
            try:
                async with aiofiles.open(path, "rb") as file:
                    header = Header.unpack(await file.read(PACKED_BYTES))
            except FileNotFoundError:
                return  # evicted while we looked
            except (OSError, HeaderError) as error:
                self.unreadable.append(f"{path}: {error}")
                return
        if status.st_size != file_bytes(header.payload_bytes):
            expected = file_bytes(header.payload_bytes)
            self.unreadable.append(f"{path}: length: expected {expected} bytes, found {status.st_size}")
            return
        layout = self.layouts[header.fingerprint.hex()]
        layout["chunks"] += 1
        layout["payload_bytes"] += header.payload_bytes
        layout["occupied_bytes"] += status.st_blocks * 512
        self.ages.append(self._now_s - status.st_mtime)


async def survey(directory: Path) -> dict[str, Any]:
    """Counts and bytes of everything below `directory`, as the file system allocates them. Changes nothing.

    `counted_bytes` is what the ledger should say: chunks, quarantine and the directories they lie in; it differs from
    `ledger_bytes` while somebody writes, and after a crash until a cache has had the directory to itself.
    """
    read = _Read()
    counted_bytes = foreign = 0
    for top in TOP_LEVELS:
        part = await asyncio.to_thread(_files, directory / top)
        chunks = [(path, status) for path, status in part if CHUNK_NAME.fullmatch(os.path.basename(path))]
        foreign += len(part) - len(chunks)
        await asyncio.gather(*(read.look(path, status) for path, status in chunks))
        counted_bytes += sum(status.st_blocks * 512 for _, status in chunks)
        counted_bytes += await asyncio.to_thread(_own_bytes, directory / top)
    quarantine = await asyncio.to_thread(_files, directory / "quarantine")
    quarantined_bytes = sum(status.st_blocks * 512 for _, status in quarantine)
    temporary = await asyncio.to_thread(_files, directory / ".tiercache" / "tmp")
    strays = [status.st_blocks * 512 for path, status in temporary if not path.endswith((".lock", ".new"))]
    layouts, ages = read.layouts, sorted(read.ages)
    return {
        "directory": str(directory),
        "chunks": sum(layout["chunks"] for layout in layouts.values()),
        "occupied_bytes": sum(layout["occupied_bytes"] for layout in layouts.values()),
        "counted_bytes": counted_bytes + quarantined_bytes,
        "ledger_bytes": await asyncio.to_thread(counted_in, directory / ".tiercache" / "ledger"),
        "layouts": dict(layouts),
        "unreadable": sorted(read.unreadable),
        "quarantined": len(quarantine),
        "quarantined_bytes": quarantined_bytes,
        "unfinished": len(strays),
        "unfinished_bytes": sum(strays),
        "foreign": foreign,
        "newest_s": round(ages[0], 1) if ages else None,
        "median_age_s": round(ages[len(ages) // 2], 1) if ages else None,
        "oldest_s": round(ages[-1], 1) if ages else None,
    }


def _files(directory: Path) -> list[tuple[str, os.stat_result]]:
    """Files right below `directory`, with what the system says of them; those that vanish meanwhile are left out."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.path, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return []
    return found


def _own_bytes(directory: Path) -> int:
    try:
        return directory.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _show(directory: Path, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tiercache.tables import show_figures

    print(directory)
    table = Table()
    table.add_column("layout")
    for column in ("chunks", "payload", "on disk"):
        table.add_column(column, justify="right")
    for fingerprint, layout in sorted(found["layouts"].items()):
        sizes = (_mib(layout["payload_bytes"]), _mib(layout["occupied_bytes"]))
        table.add_row(fingerprint[:16], f"{layout['chunks']:,}", *sizes)
    show_figures(table, Console())
    ledger = "has no count" if found["ledger_bytes"] is None else f"counts {_mib(found['ledger_bytes'])}"
    print(f"{found['chunks']:,} chunks on {_mib(found['occupied_bytes'])}")
    print(f"the ledger {ledger}, there are {_mib(found['counted_bytes'])} (with quarantine and directories)")
    if found["chunks"]:
        print(f"ages: newest {found['newest_s']:,} s, median {found['median_age_s']:,} s, oldest {found['oldest_s']:,} s")
    if found["quarantined"]:
        size = _mib(found["quarantined_bytes"])
        print(f"{found['quarantined']} chunks in quarantine ({size}): they failed verification")
    if found["unfinished"]:
        size = _mib(found["unfinished_bytes"])
        print(f"{found['unfinished']} unfinished files ({size}): being written, or left by a crash until the next start")
    if found["foreign"]:
        print(f"{found['foreign']} files that are not chunks")
    for line in found["unreadable"]:
        print(f"unreadable: {line}")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
