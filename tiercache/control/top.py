"""Run `tiercache top`: show live figures of caches by tier, over their control sockets, as in /metrics."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiercache.control.client import Fleet
from tiercache.control.families import Figures, distribution_of, hits_by_tier, reads_by_tier
from tiercache.control.messages import ControlError, Statistics
from tiercache.core.breaker import BreakerState
from tiercache.core.estimate import Distribution
from tiercache.tables import fitting, show_figures

_HEADERS = (
    ("tier", "hits", "hit %", "read MB", "read MB/s", "read ms", "written MB", "write MB/s", "write ms")
    + ("queue", "evicted", "failed", "holds MB", "reads", "writes")
)

_MOST_TENANTS = 8
"""Tenants shown for each tier."""

Answers = Mapping[Path, "dict[str, Any] | ControlError"]


def top_command(sockets: list[Path], every_s: float, once: bool) -> int:
    console = Console()
    try:
        asyncio.run(_watch(Fleet(sockets), every_s, once, console))
    except ControlError as error:
        print(f"tiercache top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(fleet: Fleet, every_s: float, once: bool, console: Console) -> None:
    """Raise ControlError if there is no socket at first. Keeps waiting for a socket that disappears later."""
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal and not once else None
    before: Answers = {}
    asked_s = 0.0
    with live or nullcontext():
        for turn in count():
            try:
                answers: Answers = await fleet.ask_each(Statistics())
            except ControlError as error:
                if turn == 0:
                    raise
                answers = dict.fromkeys(before, error)
            now_s = time.monotonic()
            tables = list(tables_of(answers, before, now_s - asked_s))
            if live is not None:
                live.update(Group(*_fitting(tables, console)), refresh=True)
            else:
                for table in tables:
                    if isinstance(table, Table):
                        show_figures(table, console)
                    else:
                        console.print(table)
            if once:
                return
            before, asked_s = answers, now_s
            await asyncio.sleep(every_s)


def _fitting(tables: Iterable[Table | Text], console: Console) -> Iterator[Table | Text]:
    for table in tables:
        yield from fitting(table, console) if isinstance(table, Table) else (table,)


def tables_of(answers: Answers, before: Answers, elapsed_s: float) -> Iterator[Table | Text]:
    """Yield a table for each cache, or a sentence for a cache that does not answer.

    Rates and times cover the period since `before`, `elapsed_s` ago, or since the cache was opened.
    """
    for path, answer in answers.items():
        if isinstance(answer, ControlError):
            yield Text(f"{path.name}: {answer}", style="red")
            continue
        known = before.get(path)
        yield _table(path.name, answer, None if isinstance(known, ControlError) else known, elapsed_s)
        if any(tier["tenants"] for tier in answer["statistics"]["tiers"].values()):
            yield _tenants(path.name, answer)


def _table(name: str, figures: Figures, before: Figures | None, elapsed_s: float) -> Table:
    statistics = figures["statistics"]
    free, slots = statistics["slots_free"], statistics["slots"]
    table = Table(
        title=f"{name}: {figures['model']}, rank {figures['rank']} of {figures['world_size']}",
        caption=f"{slots - free} of {slots} slots in use, {figures['pinned']} chunks pinned, "
        f"{statistics['stuck']} operations abandoned",
    )
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="left" if number == 0 else "right")
    for row in rows_of(figures, before, elapsed_s):
        style = None if set(row[-2:]) <= {BreakerState.CLOSED.value, ""} else "red"
        table.add_row(*row, style=style)
    return table


def _tenants(name: str, figures: Figures) -> Table:
    """Return a table of the largest tenants, if tenants have quotas."""
    table = Table(title=f"{name}: tenants")
    for number, header in enumerate(("tier", "tenant", "holds MB", "chunks", "evicted")):
        table.add_column(header, justify="left" if number < 2 else "right")
    for tier, values in figures["statistics"]["tiers"].items():
        for tenant, held in list(values["tenants"].items())[:_MOST_TENANTS]:
            table.add_row(
                tier, tenant, f"{held['held_bytes'] / 1e6:,.1f}", f"{held['chunks']:,}", f"{held['evicted']:,}"
            )
    return table


def rows_of(figures: Figures, before: Figures | None, elapsed_s: float) -> Iterable[tuple[str, ...]]:
    """Yield a row for each tier, in the order of the cascade. A tier's hit rate counts the misses of the tiers above."""
    statistics = figures["statistics"]
    then = before["statistics"] if before is not None else None
    hits = hits_by_tier(figures)
    asked = sum(hits.values()) + statistics["reader"]["misses"]
    reads, reads_then = reads_by_tier(figures), reads_by_tier(before) if before is not None else {}
    device = statistics["device"]
    breakers = statistics["breakers"] | (device["breakers"] if device is not None else {})
    for tier, values in statistics["tiers"].items():
        writer = statistics["writers"].get(tier)
        values_then = then["tiers"].get(tier) if then is not None else None
        found = hits.get(tier, 0)
        read = reads.get(tier)
        yield (
            tier,
            f"{found:,}",
            f"{100 * found / asked:.1f}" if asked else "",
            *_bytes_and_rate(values, values_then, "read_bytes", elapsed_s),
            _mean_ms(read["seconds"], _seconds_then(reads_then.get(tier))) if read is not None else "",
            *_bytes_and_rate(values, values_then, "written_bytes", elapsed_s),
            _mean_ms(*_write_seconds(statistics, then, tier)) if writer is not None else "",
            f"{writer['queued'] + writer['writing']:,}" if writer is not None else "",
            f"{values['evicted']:,}",
            f"{(read['failed'] if read else 0) + (writer['dropped'] + writer['skipped'] if writer else 0):,}",
            f"{values['occupied_bytes'] / 1e6:,.1f}",
            breakers.get(tier, ""),
            writer["breaker"] if writer is not None else "",
        )
        asked -= found


def _bytes_and_rate(
    values: Mapping[str, Any], then: Mapping[str, Any] | None, key: str, elapsed_s: float
) -> tuple[str, str]:
    rate = f"{(values[key] - then[key]) / 1e6 / elapsed_s:,.1f}" if then is not None and elapsed_s > 0 else ""
    return f"{values[key] / 1e6:,.1f}", rate


def _seconds_then(read: Mapping[str, Any] | None) -> Distribution | None:
    return None if read is None else read["seconds"]


def _write_seconds(
    now: Mapping[str, Any], then: Mapping[str, Any] | None, tier: str
) -> tuple[Distribution, Distribution | None]:
    known = then["writers"].get(tier) if then is not None else None
    seconds = distribution_of(now["writers"][tier]["seconds"])
    return seconds, None if known is None else distribution_of(known["seconds"])


def _mean_ms(seconds: Distribution, then: Distribution | None) -> str:
    came = seconds if then is None else seconds.since(then)
    return f"{1000 * came.sum / came.count:.2f}" if came.count else ""
