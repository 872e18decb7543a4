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
from tiercache.control.families import Figures, distribution_of
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
            table.add_row(tier, tenant, _megabytes(held["held_bytes"]), f"{held['chunks']:,}", f"{held['evicted']:,}")
    return table


def _columns(title: str, headers: Iterable[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption)
    for header in headers:
        table.add_column(header, justify="left" if header in ("tier", "tenant") else "right")
    return table


def rows_of(figures: Figures, before: Figures | None, elapsed_s: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tier, in the order of the cascade. A hit rate counts chunks that no tier above had."""
    now, then = figures["statistics"], {} if before is None else before["statistics"]
    hits = now["reader"]["hits"]
    asked = now["reader"]["misses"] + sum(hits.get(name, 0) for name in now["tiers"])
    for name, tier in now["tiers"].items():
        reads, writer = now["reads"].get(name, {}), now["writers"].get(name, {})
        old_tier, old_reads, old_writer = (then.get(part, {}).get(name, {}) for part in ("tiers", "reads", "writers"))
        hit = hits.get(name, 0)
        failed = reads.get("failed", 0) + writer.get("dropped", 0) + writer.get("skipped", 0)
        yield (
            name,
            f"{hit:,}",
            f"{100 * hit / asked:.1f}" if asked else "",
            _megabytes(tier["read_bytes"]),
            _megabytes_per_s(tier["read_bytes"], old_tier.get("read_bytes"), elapsed_s),
            _mean_ms(reads, old_reads),
            _megabytes(tier["written_bytes"]),
            _megabytes_per_s(tier["written_bytes"], old_tier.get("written_bytes"), elapsed_s),
            _mean_ms(writer, old_writer),
            f"{writer['queued'] + writer['writing']:,}" if writer else "",
            f"{tier['evicted']:,}",
            f"{failed:,}",
            _megabytes(tier["occupied_bytes"]),
            now["breakers"].get(name, ""),
            writer.get("breaker", ""),
        )
        asked -= hit


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.1f}"


def _megabytes_per_s(now_bytes: int, then_bytes: int | None, elapsed_s: float) -> str:
    return "" if then_bytes is None or not elapsed_s else _megabytes((now_bytes - then_bytes) / elapsed_s)


def _mean_ms(now: Figures, then: Figures) -> str:
    """Return the mean of the durations in `now["seconds"]` that came after `then`."""
    if not now:
        return ""
    seconds = distribution_of(now["seconds"])
    came = seconds.since(distribution_of(then["seconds"])) if then else seconds
    return f"{1000 * came.sum / came.count:.2f}" if came.count else ""
