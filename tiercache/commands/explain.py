"""Run `tiercache config explain`: show the meaning of a configuration on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tiercache.assembly import try_remote
from tiercache.config.explanation import ExplainedValue, Explanation, as_text, explain
from tiercache.config.loading import Config
from tiercache.config.plan import ON, REFUSED, PlannedTier
from tiercache.config.schema import GB
from tiercache.errors import ConfigError
from tiercache.tables import INDENT, Line, say

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
    say(console, _tiers(explanation.tiers))
    given = [value for value in explanation.values if value.origin is not None]
    if given:
        say(console, _values("What was set", given))
    if defaults:
        say(console, _values("Defaults", [value for value in explanation.values if value.origin is None]))
    say(console, [(0, Text.assemble(("warning: ", "yellow"), warning)) for warning in explanation.warnings])


def _tiers(tiers: tuple[PlannedTier, ...]) -> Iterator[Line]:
    yield 0, "Tiers, in the order in which a get asks them"
    for order, tier in enumerate(tiers, start=1):
        state = Text(tier.state, style=_STATE_STYLES.get(tier.state, "yellow"))
        cap = "" if tier.cap_bytes is None else f" {tier.cap_bytes / GB:g} GB"
        yield _ITEM, Text.assemble(f"{order}  {tier.name}: ", state, cap)
        place = f"{tier.place} ({tier.note})" if tier.note else tier.place
        if place:
            yield _ITEM + INDENT, place


def _values(title: str, values: list[ExplainedValue]) -> Iterator[Line]:
    yield 0, title
    for value in values:
        origin = "default" if value.origin is None else str(value.origin)
        yield _ITEM, f"{value.key}: {as_text(value.value)} ({origin})"
        yield _ITEM + INDENT, Text(value.meaning, style="dim")
