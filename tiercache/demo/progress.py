"""Show progress: a spinner with the elapsed time on a terminal, a single line in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(what: str, console: Console) -> Iterator[None]:
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
