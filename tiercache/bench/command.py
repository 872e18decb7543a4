"""Run the measurements one after another and show the results."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tiercache.bench.core_figures import measure_core
from tiercache.bench.cpu_figures import measure_cpu
from tiercache.bench.disk_figures import measure_disk
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import measure_loop
from tiercache.bench.machine import machine
from tiercache.bench.prefetch_figures import measure_prefetch
from tiercache.bench.restart_figures import measure_restart
from tiercache.bench.workload import CHUNK_SIZES, Plan
from tiercache.commands.findings import complain
from tiercache.errors import TierCacheError
from tiercache.tables import show_figures

Measure = Callable[[Figures, Plan], None]
"""Measure one part and record its figures."""


def _disk(figures: Figures, plan: Plan) -> None:
    for chunk_bytes in CHUNK_SIZES:
        asyncio.run(measure_disk(figures, plan, chunk_bytes))


def _prefetch(figures: Figures, plan: Plan) -> None:
    for chunk_bytes in CHUNK_SIZES:
        asyncio.run(measure_prefetch(figures, plan, chunk_bytes))


PARTS: dict[str, Measure] = {
    "core": lambda figures, plan: asyncio.run(measure_core(figures, plan)),
    "cpu": lambda figures, plan: asyncio.run(measure_cpu(figures, plan)),
    "disk": _disk,
    "prefetch": _prefetch,
    "loop": lambda figures, plan: asyncio.run(measure_loop(figures, plan)),
    "restart": lambda figures, plan: asyncio.run(measure_restart(figures, plan)),
}
"""Parts that need only this machine."""


def bench_command(
    plan: Plan, only: str, json_file: Path | None, others: Mapping[str, Measure] | None = None
) -> tuple[int, Figures]:
    """Measure the parts that the comma list `only` names, by default `PARTS`.

    `others` are measured only if named, or in place of the part of the same name.

    Uses a new directory inside the plan's, and removes it. Returns the exit status and the figures. The status is 2 for a
    wrong argument and 1 if a measurement failed; both print a sentence.
    """
    figures, known = Figures(), {**PARTS, **(others or {})}
    parts = [part.strip() for part in only.split(",") if part.strip()] or list(PARTS)
    if unknown := [part for part in parts if part not in known]:
        return complain(f"--only: expected a comma list of {', '.join(known)}, found {unknown[0]!r}"), figures
    if json_file is not None and not json_file.resolve().parent.is_dir():
        return complain(f"--json: {json_file.parent} is not a directory"), figures
    if json_file is not None and json_file.is_dir():
        return complain(f"--json: {json_file} is a directory; expected the name of a file"), figures
    directory = plan.directory
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=directory))
    except OSError as error:
        return complain(f"--directory: {directory} cannot be used: {error.strerror}"), figures
    facts = machine(place)
    try:
        problem = _measure([known[part] for part in parts], figures, replace(plan, directory=place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if made and not any(directory.iterdir()):
            directory.rmdir()
    show_figures(figures.table(), Console())
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, **figures.to_dict()}, indent=2) + "\n")
    if problem is not None:
        print(f"error: not everything was measured: {problem}", file=sys.stderr)
    return 0 if problem is None else 1, figures


def _measure(parts: Sequence[Measure], figures: Figures, plan: Plan) -> str | None:
    """Measure `parts`. Return the reason if a part could not be measured, else None."""
    console = Console(stderr=True)
    with console.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        try:
            for measure in parts:
                measure(figures, replace(plan, progress=progress))
        except (TierCacheError, OSError) as error:
            return str(error)
    return None
