"""Print figures as tables and sentences as lines. No cell is cut, and no word is broken."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

INDENT = 6

Line = tuple[int, str | Text]
"""The indentation of a line in columns, and its text."""


def show_figures(table: Table, console: Console) -> None:
    """Print a table of figures, or a list if a terminal is too narrow for it."""
    if console.is_terminal:
        console.print(fitting(table, console))
    else:
        Console(file=console.file, width=max(console.width, _columns(table, console))).print(table)


def fitting(table: Table, console: Console) -> Table | Group:
    """Return the table, or a list of its rows with the names of their cells if the console is too narrow for it."""
    if _columns(table, console) <= console.width:
        return table
    parts: list[Text | Padding] = [Text(str(table.title))] if table.title else []
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        first, *others = (f"{column.header} {cell or '-'}" for column, cell in zip(table.columns, cells, strict=True))
        style = row.style or ""
        parts += [Text(first, style), Padding(Text(", ".join(others), style), (0, 0, 0, INDENT))]
    return Group(*parts, *([Text(str(table.caption))] if table.caption else []))


def say(console: Console, lines: Iterable[Line]) -> None:
    """Print lines that break between words in a terminal, and do not break in a file or a pipe."""
    for indent, line in lines:
        text = Text(line) if isinstance(line, str) else line
        if console.is_terminal:
            console.print(Padding(text, (0, 0, 0, indent)))
        else:
            console.print(Text(" " * indent).append_text(text), soft_wrap=True)


def _columns(table: Table, console: Console) -> int:
    """Return the width of the table with every cell on one line; its title may take more lines."""
    unlimited = console.options.update(width=1 << 20)
    return table.__rich_measure__(console, unlimited).maximum
