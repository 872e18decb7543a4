"""Run `tiercache config explain`: show the meaning of a configuration on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercache.assembly import try_remote
from tiercache.config.explanation import ExplainedValue, Explanation, as_text, explain
from tiercache.config.loading import Config
from tiercache.config.plan import ON, REFUSED, PlannedTier
from tiercache.config.schema import GB
from tiercache.errors import ConfigError
from tiercache.tables import INDENT, Line, show

_ITEM = 2
_STATE_STYLES = {"on": "green", "off": "dim", "refused": "red"}


def explain_command(path: Path | None, as_json: bool, defaults: bool = False) -> int:
    """Print the effective configuration of `path` (or of the file that the environment names) and this environment.

    Returns the exit status: 0, or 1 with the problems on stderr if the configuration cannot be used here.
    """
    try:
        config = Config.load(path, quiet=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    explanation = explain(config)
    refused = {}
    for tier in explanation.tiers:
        try:
            if tier.remote is not None and tier.state == ON:
                try_remote(config, tier)
        except ConfigError as error:
            refused[tier.name] = str(error)
    tiers = [
        replace(tier, state=REFUSED, note=refused[tier.name]) if tier.name in refused else tier
        for tier in explanation.tiers
    ]
    explanation = replace(explanation, tiers=tuple(tiers))
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        render(explanation, Console(), defaults=defaults)
    for problem in refused.values():
        print(f"error: {problem}", file=sys.stderr)
    return 1 if refused else 0


def render(explanation: Explanation, console: Console, *, defaults: bool = False) -> None:
    """Print the tiers, then the given values, then the `defaults` if asked for."""
    _tiers(explanation.tiers, console)
    given = [value for value in explanation.values if value.origin is not None]
    if given:
        _values("What was set", given, console)
    if defaults:
        _values("Defaults", [value for value in explanation.values if value.origin is None], console)
    for warning in explanation.warnings:
        # Text and not markup, since a path may contain square brackets.
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)


def _tiers(tiers: tuple[PlannedTier, ...], console: Console) -> None:
    title = "Tiers, in the order in which a get asks them"
    table = Table(title=title, title_justify="left")
    for heading in ("#", "tier", "state", "cap", "place"):
        table.add_column(heading)
    lines: list[Line] = [(0, title)]
    for order, tier in enumerate(tiers, start=1):
        state = Text(tier.state, style=_STATE_STYLES.get(tier.state, "yellow"))
        place = f"{tier.place} ({tier.note})" if tier.note else tier.place
        table.add_row(str(order), Text(tier.name), state, _gigabytes(tier.cap_bytes), Text(place))
        lines.append((_ITEM, Text.assemble(f"{order}  {tier.name}: ", state, f" {_gigabytes(tier.cap_bytes)}".rstrip())))
        if place:
            lines.append((_ITEM + INDENT, place))
    show(table, console, lines)


def _values(title: str, values: list[ExplainedValue], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("key", "value", "from", "meaning"):
        table.add_column(heading)
    lines: list[Line] = [(0, title)]
    for value in values:
        origin = "default" if value.origin is None else str(value.origin)
        table.add_row(Text(value.key), Text(as_text(value.value)), Text(origin), Text(value.meaning, style="dim"))
        lines.append((_ITEM, f"{value.key}: {as_text(value.value)} ({origin})"))
        lines.append((_ITEM + INDENT, Text(value.meaning, style="dim")))
    show(table, console, lines)


def _gigabytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / GB:g} GB"
