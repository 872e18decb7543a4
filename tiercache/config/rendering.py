"""An Explanation for people, in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercache.config.explanation import ExplainedValue, Explanation
from tiercache.config.schema import GB
from tiercache.config.tiers import PlannedTier

_STATE_STYLES = {"on": "green", "off": "dim"}


def render(explanation: Explanation, console: Console) -> None:
    """Print tiers first, since they are what most people came for, then what was set, then the defaults."""
    console.print(_tiers(explanation.tiers))
    given = [value for value in explanation.values if value.origin is not None]
    if given:
        console.print(_values("What was set", given))
    # The many keys of tiers that nobody asked for would bury the rest; --json has them all.
    asked_for = {"", "cpu", *(tier.kind for tier in explanation.tiers)}
    defaults = [value for value in explanation.values if value.origin is None and value.tier in asked_for]
    console.print(_values("Defaults", defaults))
    for warning in explanation.warnings:
        # Text and not markup: a path may hold square brackets.
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)


def _tiers(tiers: tuple[PlannedTier, ...]) -> Table:
    table = Table(title="Tiers, in the order in which a get asks them", title_justify="left")
    for heading in ("#", "tier", "state", "cap", "place"):
        table.add_column(heading, overflow="fold")
    for order, tier in enumerate(tiers, start=1):
        state = Text(tier.state, style=_STATE_STYLES.get(tier.state, "yellow"))
        place = f"{tier.place} ({tier.note})" if tier.note else tier.place
        table.add_row(str(order), Text(tier.name), state, _gigabytes(tier.cap_bytes), Text(place))
    return table


def _values(title: str, values: list[ExplainedValue]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("key", no_wrap=True)
    for heading in ("value", "from", "meaning"):
        table.add_column(heading, overflow="fold")
    for value in values:
        origin = "default" if value.origin is None else str(value.origin)
        meaning = value.meaning if value.effective else f"{value.meaning} (no effect in this version)"
        table.add_row(Text(value.key), Text(_text(value.value)), Text(origin), Text(meaning, style="dim"))
    return table


def _gigabytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / GB:g} GB"


def _text(value: Any) -> str:
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
