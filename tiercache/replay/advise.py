"""Run `tiercache advise`: show what live caches predict of other sizes, and why their requests missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from tiercache.commands.findings import complain
from tiercache.control.client import Fleet
from tiercache.control.messages import Advise, ControlError
from tiercache.core.advice import size
from tiercache.replay.plot import plot
from tiercache.replay.report import Row
from tiercache.tables import say, show_figures

_MOST_TENANTS = 4
"""Tenants with a column: those that asked for most."""


def advise_command(sockets: list[Path], plot_file: Path | None, as_json: bool) -> int:
    """Ask the caches, and return the exit status: 2 after an error, 1 if a cache of several does not answer."""
    fleet = Fleet(sockets)
    try:
        answers = asyncio.run(fleet.ask_named(Advise()))
    except ControlError as error:
        return complain(str(error))
    good = {name: answer for name, answer in answers.items() if not isinstance(answer, ControlError)}
    for name, answer in answers.items():
        if isinstance(answer, ControlError):
            complain(f"{name}: {answer}")
    for problem in (missing := fleet.missing()):
        complain(problem)
    if as_json:
        print(json.dumps(good, indent=1))
    else:
        console = Console()
        for name, answer in good.items():
            advice, usage = answer["advice"], answer["advice"]["usage"]
            asked, found = usage["asked_tokens"], usage["found_tokens"]
            text = f"{name}: {advice['requests']:,} requests for {asked:,} tokens, {_percent(found, asked)} % found; "
            text += f"estimates are from {advice['sampled_chunks']:,} chunks, {100 * advice['rate']:.3g} % of all"
            say(console, [(0, text)])
            for table in (_by_tenant(advice), _by_tier(advice)):
                show_figures(table, console)
            say(console, [(0, sentence) for sentence in answer["sentences"]])
    if plot_file is not None and good:
        curves = {name: list(_points(answer["advice"])) for name, answer in good.items()}
        if problem := plot(curves, plot_file):
            return complain(problem)
    return 0 if len(good) == len(answers) and not missing else 1 if good else 2


def _by_tenant(advice: Mapping[str, Any]) -> Table:
    """Return hit rates by size, and misses by reason."""
    usages = _usages(advice).items()
    table = _table("% of tokens", *(tenant for tenant, _ in usages))
    for size_bytes in advice["usage"]["hit_tokens"]:
        hits = (_percent(usage["hit_tokens"][size_bytes], usage["sampled_tokens"]) for _, usage in usages)
        table.add_row(f"found with {size(int(size_bytes))}", *hits)
    for reason, tokens in advice["usage"]["missed_tokens"].items():
        if tokens:
            misses = (_percent(usage["missed_tokens"][reason], usage["asked_tokens"]) for _, usage in usages)
            table.add_row(f"missed: {reason}", *misses)
    return table


def _by_tier(advice: Mapping[str, Any]) -> Table:
    table = _table("tier", "holds", "hit %, half of it", "as it is", "twice of it", "written", "read again")
    for tier, figures in advice["tiers"].items():
        rates = (figures["hit_rate_halved"], figures["hit_rate"], figures["hit_rate_doubled"])
        amounts = (size(figures["written_bytes"]), size(figures["read_bytes"]))
        table.add_row(tier, size(figures["capacity_bytes"]), *(_percent(rate, 1.0) for rate in rates), *amounts)
    return table


def _table(*headers: str) -> Table:
    return Table(headers[0], *(Column(header, justify="right") for header in headers[1:]))


def _usages(advice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of all tenants together, and of those that asked for most."""
    largest = sorted(advice["tenants"].items(), key=lambda item: -item[1]["asked_tokens"])
    return {"all": advice["usage"], **dict(largest[:_MOST_TENANTS])}


def _points(advice: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the points of the curves."""
    for tenant, usage in _usages(advice).items():
        for size_bytes, tokens in usage["hit_tokens"].items():
            hit = tokens / usage["sampled_tokens"] if usage["sampled_tokens"] else 0.0
            yield Row(tenant, ram_blocks=1, ram_gib=int(size_bytes) / 2**30, hit=hit)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f}"
