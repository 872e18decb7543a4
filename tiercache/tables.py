"""Print figures as tables and sentences as lines. No cell is cut, and no word is broken."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

INDENT = 6

Line = tuple[int, str | Text]
"""The indentation of a line in columns, and its text."""


def show_figures(table: Table, console: Console) -> None:
    """Print a table of figures, in parts below one another if a terminal is too narrow."""
    if console.is_terminal:
        console.print(*fitting(table, console), sep="\n")
    else:
        Console(file=console.file, width=max(console.width, _columns(table, console))).print(table)


def fitting(table: Table, console: Console) -> list[Table | Text]:
    """Return the table, or parts of its columns that fit the console; all parts begin with the first column."""
    if _columns(table, console) <= console.width:
        return [table]
    widths = [_columns(_part(table, [column]), console) - 1 for column in table.columns]
    groups = _grouped(widths, console.width)
    for width in range(console.width - 1, max(widths), -1):  # parts of equal width look better than a short last part
        if len(narrower := _grouped(widths, width)) == len(groups):
            groups = narrower
    parts = [_part(table, [table.columns[number] for number in (0, *group)]) for group in groups]
    title, caption = ([Text(str(text))] if text else [] for text in (table.title, table.caption))
    return [*title, *parts, *caption]


def _grouped(widths: list[int], width: int) -> list[list[int]]:
    """Return the numbers of the columns after the first, in groups that fit `width` beside it."""
    groups: list[list[int]] = []
    for number in range(1, len(widths)):
        if groups and 1 + widths[0] + sum(widths[other] for other in groups[-1]) + widths[number] <= width:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _part(table: Table, columns: list[Column]) -> Table:
    part = Table()
    for column in columns:
        part.add_column(column.header, justify=column.justify)
    for row, cells in zip(table.rows, zip(*(list(column.cells) for column in columns), strict=True), strict=True):
        part.add_row(*cells, style=row.style)
    return part


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
