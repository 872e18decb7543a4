"""`tiercache stat DIR`: chunks, bytes, layouts and ages, from headers alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from tiercache.commands.directory import chunk_files, complain, problem_with
from tiercache.core.header import PACKED_BYTES, Header, HeaderError
from tiercache.tiers.ledger import Ledger

_AT_ONCE = 32


def stat_command(directory: Path, as_json: bool) -> int:
    if (problem := problem_with(directory)) is not None:
        return complain(problem)
    found = asyncio.run(survey(directory))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(directory, found)
    return 0


async def survey(directory: Path) -> dict[str, Any]:
    """Counts and bytes of everything below `directory`. Changes nothing."""
    layouts: dict[str, dict[str, int]] = defaultdict(lambda: {"chunks": 0, "payload_bytes": 0, "occupied_bytes": 0})
    unreadable: list[str] = []
    ages: list[float] = []
    occupied = 0
    places = asyncio.Semaphore(_AT_ONCE)

    async def look(path: Path) -> None:
        nonlocal occupied
        async with places:
            try:
                status = await aiofiles.os.stat(path)
                async with aiofiles.open(path, "rb") as file:
                    header = Header.unpack(await file.read(PACKED_BYTES))
            except (OSError, HeaderError) as error:
                unreadable.append(f"{path}: {error}")
                return
        layout = layouts[header.fingerprint.hex()]
        layout["chunks"] += 1
        layout["payload_bytes"] += header.payload_bytes
        layout["occupied_bytes"] += status.st_blocks * 512
        occupied += status.st_blocks * 512
        ages.append(time.time() - status.st_mtime)

    batch: list[Path] = []
    for path in chunk_files(directory):
        batch.append(path)
        if len(batch) == 1024:
            await asyncio.gather(*map(look, batch))
            batch.clear()
    await asyncio.gather(*map(look, batch))
    ages.sort()
    quarantine = [path for path in (directory / "quarantine").glob("*") if path.is_file()]
    return {
        "directory": str(directory),
        "chunks": sum(layout["chunks"] for layout in layouts.values()),
        "occupied_bytes": occupied,
        "ledger_bytes": _counted(directory),
        "layouts": dict(layouts),
        "unreadable": unreadable,
        "quarantined": len(quarantine),
        "quarantined_bytes": sum(path.stat().st_blocks * 512 for path in quarantine),
        "oldest_s": round(ages[-1], 1) if ages else None,
        "median_age_s": round(ages[len(ages) // 2], 1) if ages else None,
    }


def _counted(directory: Path) -> int | None:
    path = directory / ".tiercache" / "ledger"
    if not path.exists():
        return None
    ledger = Ledger(path, 0)
    try:
        return ledger.used_bytes if ledger.trusted else None
    finally:
        ledger.close()


def _show(directory: Path, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=str(directory))
    table.add_column("layout")
    for column in ("chunks", "payload", "on disk"):
        table.add_column(column, justify="right")
    for fingerprint, layout in sorted(found["layouts"].items()):
        table.add_row(
            fingerprint[:16], f"{layout['chunks']:,}", _mib(layout["payload_bytes"]), _mib(layout["occupied_bytes"])
        )
    console.print(table)
    counted = "none" if found["ledger_bytes"] is None else _mib(found["ledger_bytes"])
    console.print(
        f"{found['chunks']:,} chunks on {_mib(found['occupied_bytes'])}; the ledger counts {counted} (with directories)"
    )
    if found["chunks"]:
        console.print(f"median age {found['median_age_s']:,} s, oldest {found['oldest_s']:,} s")
    if found["quarantined"]:
        console.print(
            f"{found['quarantined']} chunks in quarantine ({_mib(found['quarantined_bytes'])}): they failed verification"
        )
    for line in found["unreadable"]:
        console.print(f"unreadable: {line}", soft_wrap=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
