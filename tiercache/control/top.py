"""Run `tiercache top`: show live figures of caches by tier, over their control sockets, as in /metrics."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiercache.control.client import Fleet
from tiercache.control.families import Figures, Samples, samples_of
from tiercache.control.messages import ControlError, Statistics
from tiercache.core.breaker import BreakerState
from tiercache.tables import fitting, show_figures

_HEADERS = (
    *("tier", "hits", "hit %", "read MB", "read MB/s", "read ms", "written MB", "write MB/s", "write ms"),
    *("queue", "evicted", "failed", "holds MB", "read breaker", "write breaker"),
)
_MOST_TENANTS = 8
"""Tenants shown for each tier."""

Answers = Mapping[str, "dict[str, Any] | ControlError"]


def top_command(sockets: list[Path], every_s: float, once: bool) -> int:
    """Show figures. Returns 2 if no cache answers, 1 if some of several do not, else 0."""
    fleet = Fleet(sockets)
    try:
        answers = asyncio.run(_watch(fleet, every_s, once, Console()))
    except ControlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    for problem in (missing := fleet.missing()):
        print(f"error: {problem}", file=sys.stderr)
    silent = [isinstance(answer, ControlError) for answer in answers.values()]
    return 2 if all(silent) else 1 if missing or any(silent) else 0


async def _watch(fleet: Fleet, every_s: float, once: bool, console: Console) -> Answers:
    """Show figures until cancelled, or `once`, and return those answers. Raises ControlError if no socket exists at first;
    shows later errors.
    """
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal and not once else None
    before: Answers = {}
    asked_s = 0.0
    with live or nullcontext():
        while True:
            try:
                answers: Answers = await fleet.ask_named(Statistics())
            except ControlError as error:
                if not before:
                    raise
                answers = dict.fromkeys(before, error)
            now_s = time.monotonic()
            tables = list(tables_of(answers, before, now_s - asked_s))
            if live is not None:
                parts = [fitting(table, console) if isinstance(table, Table) else table for table in tables]
                live.update(Group(*parts), refresh=True)
            else:
                for table in tables:
                    show_figures(table, console) if isinstance(table, Table) else console.print(table)
            if once:
                return answers
            before, asked_s = answers, now_s
            await asyncio.sleep(every_s)


def tables_of(answers: Answers, before: Answers, elapsed_s: float) -> Iterator[Table | Text]:
    """Yield the tables of each cache, or a sentence for a cache that does not answer.

    Rates and times cover the `elapsed_s` since `before`. Without it, times cover the life of the cache, and rates are
    empty.
    """
    for name, answer in answers.items():
        if isinstance(answer, ControlError):
            yield Text(f"{name}: {answer}", style="red")
            continue
        known = before.get(name)
        yield _table(name, answer, None if isinstance(known, ControlError) else known, elapsed_s)
        if any(tier["tenants"] for tier in answer["statistics"]["tiers"].values()):
            yield _tenants(name, answer)


def _table(name: str, figures: Figures, before: Figures | None, elapsed_s: float) -> Table:
    statistics = figures["statistics"]
    free, slots = statistics["slots_free"], statistics["slots"]
    table = _columns(
        f"{name}: {figures['model']}, rank {figures['rank']} of {figures['world_size']}",
        _HEADERS,
        f"{slots - free} of {slots} slots in use, {figures['pinned']} chunks pinned, "
        f"{statistics['stuck']} operations abandoned",
    )
    for row in rows_of(figures, before, elapsed_s):
        table.add_row(*row, style=None if set(row[-2:]) <= {BreakerState.CLOSED.value, ""} else "red")
    return table


def _tenants(name: str, figures: Figures) -> Table:
    """Return a table of the largest tenants, if tenants have quotas."""
    table = _columns(f"{name}: tenants", ("tier", "tenant", "holds MB", "chunks", "evicted"))
    for tier, values in figures["statistics"]["tiers"].items():
        for tenant, held in list(values["tenants"].items())[:_MOST_TENANTS]:
            table.add_row(
                tier, tenant, f"{held['held_bytes'] / 1e6:,.1f}", f"{held['chunks']:,}", f"{held['evicted']:,}"
            )
    return table


def _columns(title: str, headers: Iterable[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption)
    for header in headers:
        table.add_column(header, justify="left" if header in ("tier", "tenant") else "right")
    return table


class _TierFigures:
    """Cells about a tier, from the figures in /metrics now and at the last refresh. A total without a figure is 0."""

    def __init__(self, tier: str, now: Samples, then: Samples, elapsed_s: float) -> None:
        self._tier = tier
        self._now = now
        self._then = then
        self._elapsed_s = elapsed_s

    def total(self, *names: str) -> int:
        return sum(int(self._now.get((name, self._tier), 0)) for name in names)

    def count(self, *names: str) -> str:
        return f"{self.total(*names):,}" if (names[0], self._tier) in self._now else ""

    def megabytes(self, name: str) -> str:
        return f"{self.total(name) / 1e6:,.1f}"

    def rate(self, name: str) -> str:
        then = self._then.get((name, self._tier))
        return (
            f"{(self.total(name) - then) / 1e6 / self._elapsed_s:,.1f}" if then is not None and self._elapsed_s else ""
        )

    def mean_ms(self, name: str) -> str:
        seconds, then = self._now.get((name, self._tier)), self._then.get((name, self._tier))
        came = seconds.since(then) if seconds is not None and then is not None else seconds
        return f"{1000 * came.sum / came.count:.2f}" if came is not None and came.count else ""

    def breaker(self, name: str) -> str:
        return next((state.value for state in BreakerState if self._now.get((name, self._tier, state.value))), "")


def rows_of(figures: Figures, before: Figures | None, elapsed_s: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tier, in the order of the cascade. A hit rate counts chunks that no tier above had."""
    now, then = samples_of(figures), {} if before is None else samples_of(before)
    tiers = {tier: _TierFigures(tier, now, then, elapsed_s) for tier in figures["statistics"]["tiers"]}
    asked = now["reader_misses",] + sum(tier.total("hits") for tier in tiers.values())
    for name, tier in tiers.items():
        hits = tier.total("hits")
        yield (
            name,
            f"{hits:,}",
            f"{100 * hits / asked:.1f}" if asked else "",
            tier.megabytes("tier_read_bytes"),
            tier.rate("tier_read_bytes"),
            tier.mean_ms("read_seconds"),
            tier.megabytes("tier_written_bytes"),
            tier.rate("tier_written_bytes"),
            tier.mean_ms("write_seconds"),
            tier.count("writer_queued", "writer_writing"),
            tier.count("tier_evicted"),
            f"{tier.total('read_failures', 'writer_dropped', 'writer_skipped'):,}",
            tier.megabytes("tier_occupied_bytes"),
            tier.breaker("breaker"),
            tier.breaker("write_breaker"),
        )
        asked -= hits
