"""Tables for people: whole where they fit, as lines where they do not. Nothing is cut, and no word is broken."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

INDENT = 6

Line = tuple[int, str | Text]
"""The columns by which a line is indented, and its text."""


def show(table: Table, console: Console, lines: Iterable[Line]) -> None:
    """A table of sentences: as it is in a terminal that is wide enough, as `lines` in a narrower one, a file or a pipe."""
    if console.is_terminal and _columns(table, console) <= console.width:
        console.print(table)
    else:
        say(console, lines)


def show_figures(table: Table, console: Console) -> None:
    """A table of figures: as it is in a file or a pipe, too; a line a row in a terminal that is too narrow for it."""
    columns = _columns(table, console)
    if columns <= console.width:
        console.print(table)
    elif not console.is_terminal:
        Console(file=console.file, width=columns).print(table)
    else:
        if table.title:
            say(console, [(0, str(table.title))])
        say(console, _figure_lines(table))
        if table.caption:
            say(console, [(0, str(table.caption))])


def say(console: Console, lines: Iterable[Line]) -> None:
    """Lines that break between words in a terminal, and not at all in a file or a pipe."""
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


def _figure_lines(table: Table) -> Iterable[Line]:
    headers = [str(column.header) for column in table.columns]
    for row in zip(*(list(column.cells) for column in table.columns), strict=True):
        name, *cells = map(str, row)
        figures = ", ".join(f"{header} {cell}".strip() for header, cell in zip(headers[1:], cells, strict=True) if cell)
        yield 0, name
        yield INDENT, figures
