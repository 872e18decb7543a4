"""Runs the measurements one after the other and shows what came out."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiercache.bench.cache_figures import MIB, measure_cpu, measure_disk, measure_loop, measure_restart
from tiercache.bench.core_figures import measure_core
from tiercache.bench.figures import Figures, machine

PARTS = ("core", "cpu", "disk", "loop", "restart")
CHUNK_SIZES = (2 * MIB, 32 * MIB)


def bench_command(
    json_file: Path | None, directory: Path, pairs: int, total_bytes: int, only: str, peer: str, peer_python: Path | None
) -> int:
    """Exit status 2 for a wrong argument, said in one sentence."""
    parts = [part.strip() for part in only.split(",") if part.strip()] or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        return _complain(f"--only: expected a comma list of {', '.join(PARTS)}, found {unknown[0]!r}")
    if peer and peer != "lmcache":
        return _complain(f"--peer: expected lmcache, found {peer!r}")
    if peer and (peer_python is None or not peer_python.exists()):
        return _complain("--peer-python: name a Python in which the peer is installed")
    place = directory / "tiercache-bench"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _complain(f"--directory: {directory} cannot be used: {error.strerror}")
    console = Console(stderr=True)
    figures = Figures()
    try:
        with console.status("") as status:
            for part in parts:
                _measure(part, figures, pairs, total_bytes, place, lambda text: status.update(text))
            if peer and peer_python is not None:
                from tiercache.bench.peer import measure_peer

                asyncio.run(measure_peer(figures, pairs, total_bytes, place, peer_python, lambda text: status.update(text)))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    found = figures.to_dict()
    _show(found, Console())
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(directory), "figures": found}, indent=2) + "\n")
    return 0


def _measure(part: str, figures: Figures, pairs: int, total_bytes: int, place: Path, progress: Any) -> None:
    if part == "core":
        measure_core(figures, pairs, progress)
    elif part == "cpu":
        asyncio.run(measure_cpu(figures, pairs, total_bytes, progress))
    elif part == "disk":
        for chunk_bytes in CHUNK_SIZES:
            asyncio.run(measure_disk(figures, pairs, total_bytes, place, chunk_bytes, progress))
    elif part == "loop":
        asyncio.run(measure_loop(figures, min(pairs, 3), total_bytes, place, progress))
    else:
        asyncio.run(measure_restart(figures, place, progress))


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table()
    table.add_column("figure")
    for column in ("median", "min", "max", "count", "of ceiling"):
        table.add_column(column, justify="right")
    for name, row in sorted(found.items()):
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        table.add_row(name, *(f"{row[key]:,.4g}" for key in ("median", "min", "max")), str(row["count"]), ratio)
    console.print(table)


def _complain(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 2
