"""Run `tiercache advise`: show what live caches predict of other sizes, and why their requests missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiercache.commands.findings import complain
from tiercache.control.client import Fleet
from tiercache.control.messages import Advise, ControlError
from tiercache.core.advice import REASONS, size
from tiercache.replay.report import Row
from tiercache.tables import say, show_figures

Answer = Mapping[str, Any]
"""The answer of a cache to `Advise`."""

_MOST_TENANTS = 4
"""Tenants with a column: those that asked for most."""


def advise_command(sockets: list[Path], plot_file: Path | None, as_json: bool) -> int:
    """Ask the caches, and return the exit status: 2 after an error, 1 if a cache of several does not answer."""
    try:
        answers = asyncio.run(Fleet(sockets).ask_each(Advise()))
    except ControlError as error:
        return complain(str(error))
    good = {path.name: answer for path, answer in answers.items() if not isinstance(answer, ControlError)}
    for path, answer in answers.items():
        if isinstance(answer, ControlError):
            complain(f"{path}: {answer}")
    if as_json:
        print(json.dumps(good, indent=1))
    else:
        console = Console()
        for name, answer in good.items():
            say(console, [(0, summary(name, answer))])
            for table in tables_of(answer):
                show_figures(table, console)
            say(console, [(0, sentence) for sentence in answer["sentences"]])
    if plot_file is not None and good:
        try:
            from tiercache.replay.plot import plot

            plot({name: _rows(answer) for name, answer in good.items()}, plot_file)
        except ImportError as error:
            return complain(
                f"--plot needs matplotlib, which cannot be imported ({error}): pip install 'tiercache[replay]'"
            )
        except (OSError, ValueError) as error:
            return complain(f"{plot_file}: {error}")
    return 0 if len(good) == len(answers) else 1 if good else 2


def summary(name: str, answer: Answer) -> str:
    advice, usage = answer["advice"], answer["advice"]["usage"]
    asked, found = usage["asked_tokens"], usage["found_tokens"]
    return (
        f"{name}: {advice['requests']:,} requests for {asked:,} tokens, {_percent(found, asked) or '0'} % found; "
        f"estimates are from {advice['sampled_chunks']:,} chunks, {100 * advice['rate']:.3g} % of all"
    )


def tables_of(answer: Answer) -> Iterator[Table]:
    """Yield the tables of a cache: hit rates by size, tiers, and misses by reason."""
    advice = answer["advice"]
    usages = _usages(advice)
    sizes = Table()
    sizes.add_column("RAM or disk", justify="right")
    for tenant in usages:
        sizes.add_column(f"hit %, {tenant}", justify="right")
    for size_bytes in advice["usage"]["hit_tokens"]:
        cells = [_percent(usage["hit_tokens"][size_bytes], usage["sampled_tokens"]) for usage in usages.values()]
        sizes.add_row(size(int(size_bytes)), *cells)
    yield sizes
    tiers = Table()
    tiers.add_column("tier")
    for header in ("holds", "hit %, half of it", "as it is", "twice of it", "written", "read again"):
        tiers.add_column(header, justify="right")
    for tier, figures in advice["tiers"].items():
        rates = (figures["hit_rate_halved"], figures["hit_rate"], figures["hit_rate_doubled"])
        amounts = (size(figures["written_bytes"]), size(figures["read_bytes"]))
        tiers.add_row(tier, size(figures["capacity_bytes"]), *(_percent(rate, 1.0) for rate in rates), *amounts)
    yield tiers
    missed = {reason: tokens for reason, tokens in advice["usage"]["missed_tokens"].items() if tokens}
    reasons = Table()
    for header in ("misses", "%", "what was missing"):
        reasons.add_column(header, justify="right" if header == "%" else "left")
    for reason in sorted(missed, key=lambda reason: -missed[reason]):
        reasons.add_row(reason, _percent(missed[reason], sum(missed.values())), REASONS.get(reason, ""))
    if missed:
        yield reasons


def _usages(advice: Answer) -> dict[str, Any]:
    """Return the figures of all tenants together, and of those that asked for most."""
    largest = sorted(advice["tenants"].items(), key=lambda item: -item[1]["asked_tokens"])
    return {"all": advice["usage"], **dict(largest[:_MOST_TENANTS])}


def _rows(answer: Answer) -> list[Row]:
    """Return the points of the curves."""
    rows = []
    for tenant, usage in _usages(answer["advice"]).items():
        for size_bytes, tokens in usage["hit_tokens"].items():
            hit = tokens / usage["sampled_tokens"] if usage["sampled_tokens"] else 0.0
            rows.append(Row(tenant, ram_blocks=1, ram_gib=int(size_bytes) / 2**30, hit=hit))
    return rows


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else ""
