"""Run `tiercache stat DIR`: report chunks, bytes, layouts and ages, from headers alone."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tiercache.commands.directory import problem_with
from tiercache.commands.findings import complain
from tiercache.core.header import PACKED_BYTES, Header, HeaderError, file_bytes
from tiercache.tiers.files.access import ABSENT
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.directory import CHUNK_NAME, QUARANTINED_NAME, TOP_LEVELS, found_place
from tiercache.tiers.files.owners import PENDING_NAME


def stat_command(directory: Path, as_json: bool) -> int:
    return asyncio.run(_stat(directory, as_json))


async def _stat(directory: Path, as_json: bool) -> int:
    if (problem := await problem_with(directory)) is not None:
        return complain(problem)
    try:
        found = await survey(directory)
    except OSError as error:
        return complain(f"{directory} cannot be read: {error}")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(directory, found)
    return 0


class _Found:
    """Sums over the headers of chunks, added directory by directory."""

    def __init__(self) -> None:
        self.layouts: dict[str, dict[str, int]] = defaultdict(
            lambda: {"chunks": 0, "payload_bytes": 0, "occupied_bytes": 0}
        )
        self.counted_bytes = 0
        self.foreign = 0
        self.unfinished_bytes: list[int] = []
        """Sizes of temporary files, whether their writers are alive or dead."""
        self.unreadable: list[str] = []
        self.ages: list[float] = []
        self._now_s = time.time()

    def add(self, files: list[tuple[str, os.stat_result, Header | str | None]], own_bytes: int) -> None:
        self.counted_bytes += own_bytes
        for path, status, header in files:
            name = os.path.basename(path)
            if PENDING_NAME.fullmatch(name):
                self.unfinished_bytes.append(status.st_blocks * 512)
                continue
            if not CHUNK_NAME.fullmatch(name):
                self.foreign += 1
                continue
            self.counted_bytes += status.st_blocks * 512
            if isinstance(header, Header):
                layout = self.layouts[header.fingerprint.hex()]
                layout["chunks"] += 1
                layout["payload_bytes"] += header.payload_bytes
                layout["occupied_bytes"] += status.st_blocks * 512
                self.ages.append(self._now_s - status.st_mtime)
            elif header is not None:
                self.unreadable.append(f"{path}: {header}")


async def survey(directory: Path) -> dict[str, Any]:
    """Count the chunks below `directory`, and the bytes that the file system allocates to them. Read-only.

    `counted_bytes` is the expected value of the capacity counter (chunks, quarantine and their directories);
    `ledger_bytes` is its actual value. They differ while a process writes, and after a crash until a recount.
    """
    found = _Found()
    place = await asyncio.to_thread(found_place, directory)
    for part in asyncio.as_completed([asyncio.to_thread(headers_in, place / top) for top in TOP_LEVELS]):
        found.add(*await part)
    quarantine = await asyncio.to_thread(_files, place / "quarantine")
    quarantine = [(path, status) for path, status in quarantine if QUARANTINED_NAME.fullmatch(os.path.basename(path))]
    quarantined_bytes = sum(status.st_blocks * 512 for _, status in quarantine)
    temporary = await asyncio.to_thread(_files, place / ".tiercache" / "tmp")
    strays = [status.st_blocks * 512 for path, status in temporary if not path.endswith((".lock", ".new"))]
    strays += found.unfinished_bytes
    layouts, ages = found.layouts, sorted(found.ages)
    return {
        "directory": str(directory),
        "chunks": sum(layout["chunks"] for layout in layouts.values()),
        "occupied_bytes": sum(layout["occupied_bytes"] for layout in layouts.values()),
        "counted_bytes": found.counted_bytes + quarantined_bytes,
        "ledger_bytes": await asyncio.to_thread(counted_in, place / ".tiercache" / "ledger"),
        "layouts": dict(sorted(layouts.items())),
        "unreadable": sorted(found.unreadable),
        "quarantined": len(quarantine),
        "quarantined_bytes": quarantined_bytes,
        "unfinished": len(strays),
        "unfinished_bytes": sum(strays),
        "foreign": found.foreign,
        "newest_s": round(ages[0], 1) if ages else None,
        "median_age_s": round(ages[len(ages) // 2], 1) if ages else None,
        "oldest_s": round(ages[-1], 1) if ages else None,
    }


def headers_in(directory: Path) -> tuple[list[tuple[str, os.stat_result, Header | str | None]], int]:
    """Return the files of a directory with their headers or errors, and the bytes of the directory itself."""
    return [(path, status, _header(path, status)) for path, status in _files(directory)], _own_bytes(directory)


def _header(path: str, status: os.stat_result) -> Header | str | None:
    """Return the header of a chunk or an error; None for other files, and for a file that has vanished."""
    if not CHUNK_NAME.fullmatch(os.path.basename(path)):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            header = Header.unpack(file.read(PACKED_BYTES))
    except FileNotFoundError:
        return None  # evicted meanwhile
    except (OSError, HeaderError) as error:
        return str(error)
    expected = file_bytes(header.payload_bytes)
    return header if status.st_size == expected else f"length: expected {expected} bytes, found {status.st_size}"


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
    return status.st_blocks * 512 if stat.S_ISDIR(status.st_mode) else 0


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
    counter = "says nothing" if found["ledger_bytes"] is None else f"says {_mib(found['ledger_bytes'])}"
    print(f"{found['chunks']:,} chunks on {_mib(found['occupied_bytes'])}")
    print(f"the counter {counter}, there are {_mib(found['counted_bytes'])} (with quarantine and directories)")
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
