"""`python -m tests.bench.faults`: what caches on disk make of faults, in one table; `make bench-faults`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.faults.instance import prepare
from tests.bench.faults.matrix import FAULTS, Cell, measure
from tests.bench.faults.stores import STORES
from tiercache.signals import ended_by_signals


def table(cells: Sequence[Cell], chunks: int) -> Table:
    made = Table("fault", "store", title=f"{chunks} chunks each")
    for name in ("wrong", "errors", "hits kept", "missed"):
        made.add_column(name, justify="right")
    made.add_column("note", overflow="fold")
    for before, cell in zip([None, *cells], cells, strict=False):
        if before is not None and before.fault != cell.fault:
            made.add_section()
        if cell.cannot:
            made.add_row(cell.fault, cell.store, "", "", "", "", f"cannot be asked so: {cell.cannot}")
        else:
            wrong = f"[bold red]{cell.wrong}[/]" if cell.wrong else "0"
            note = "; ".join([*filter(None, [cell.note]), *dict.fromkeys(cell.errors)])
            counts = (str(count) for count in (len(cell.errors), cell.hits, cell.missed))
            made.add_row(cell.fault, cell.store, wrong, *counts, note)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.faults", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    parser.add_argument("--only", default=",".join(STORES), metavar="NAMES", help=f"stores, of {', '.join(STORES)}")
    parser.add_argument("--chunks", type=int, default=32, help="of 256 KiB; a multiple of 8 (default: 32)")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := sorted(set(names) - STORES.keys()):
        parser.error(f"--only: no store is called {', '.join(unknown)}")
    if arguments.chunks < 8 or arguments.chunks % 8:
        parser.error("--chunks: expected a multiple of 8")
    prepare(names)
    where = {"prefix": "tiercache-faults-", "dir": arguments.directory}
    cells: list[Cell] = []
    with ended_by_signals(), tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as place:
        for fault in FAULTS:
            for name in names:
                cells.append(measure(fault, name, arguments.chunks, Path(place)))
                print(f"{fault}: {name}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table(cells, arguments.chunks))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
