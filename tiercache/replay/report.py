"""Report the rows of a replay as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from tiercache.core.admission import DAY_S
from tiercache.replay.bounds import Survey
from tiercache.replay.figures import QUANTILES, Figures, ttft_figures
from tiercache.replay.setting import UNBOUNDED, Setting


@dataclass
class Row:
    """The results of a simulation. Rates cover the measured requests; writes cover the whole run."""

    name: str
    ram: str = ""
    flash: str = ""
    policy: str = ""
    admission: str = ""
    prefetch: str = ""
    ram_blocks: int | None = None
    flash_blocks: int | None = None
    ram_gib: float | None = None
    flash_gib: float | None = None
    hit: float | None = None
    ram_hit: float | None = None
    flash_hit: float | None = None
    inserted_blocks: int | None = None
    flash_written_blocks: int | None = None
    flash_written_tib_per_day: float | None = None
    ready: float | None = None
    precision: float | None = None
    recall: float | None = None
    accounts: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p99_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", {})}


def row_of(name: str, figures: Figures, setting: Setting, block_bytes: int, ram: str = "", flash: str = "") -> Row:
    """Return the row of a simulation.

    Precision is the fraction of the settled prefetched bytes that was used. Recall is used prefetched bytes, divided by
    the sum of these and the bytes of demand reads from flash.
    """
    used = sum(account.used_bytes for account in figures.accounts.values())
    settled = sum(account.used_bytes + account.late_bytes + account.wasted_bytes for account in figures.accounts.values())
    wanted = used + figures.flash_blocks * block_bytes
    bounded = setting.ram_blocks < UNBOUNDED
    written_bytes = figures.flash_written_blocks * block_bytes
    with_flash = setting.flash_blocks != 0
    return Row(
        name,
        ram,
        flash if with_flash else "",
        setting.policy if bounded and setting.ram_blocks else "",
        setting.admission if with_flash else "",
        "+".join(setting.prefetch),
        setting.ram_blocks if bounded else None,
        setting.flash_blocks,
        setting.ram_blocks * block_bytes / 2**30 if bounded else None,
        None if setting.flash_blocks is None else setting.flash_blocks * block_bytes / 2**30,
        figures.hit,
        figures.ram_hit,
        figures.flash_blocks / figures.blocks if with_flash and figures.blocks else None,
        figures.inserted_blocks if setting.ram_blocks else None,
        figures.flash_written_blocks if with_flash else None,
        written_bytes / 2**40 * DAY_S / figures.span_s if with_flash and figures.span_s else None,
        figures.ready if with_flash else None,
        used / settled if settled else None,
        used / wanted if figures.accounts and wanted else None,
        {predictor: asdict(account) for predictor, account in figures.accounts.items()},
        figures.saved_s,
        **ttft_figures(figures.ttft_s),
    )


def table(title: str, rows: list[Row]) -> Table:
    """Return a table of the columns that have values."""
    with_flash = any(row.flash for row in rows)
    columns = {
        "cache": [row.name for row in rows],
        "RAM": [row.ram for row in rows],
        "flash": [row.flash for row in rows],
        "hit %": [_percent(row.hit) for row in rows],
        "in RAM %": [_percent(row.ram_hit) if with_flash else "" for row in rows],
        "into RAM k": [_thousands(row.inserted_blocks) for row in rows],
        "to flash k": [_thousands(row.flash_written_blocks) for row in rows],
        "TiB/day": [_number(row.flash_written_tib_per_day, 1) for row in rows],
        "ready %": [_percent(row.ready) for row in rows],
        "precision %": [_percent(row.precision) for row in rows],
        "recall %": [_percent(row.recall) for row in rows],
        "saved h": [_number(None if row.saved_s is None else row.saved_s / 3600, 2) for row in rows],
    }
    for part in QUANTILES:
        columns[f"TTFT p{part} s"] = [_number(getattr(row, f"ttft_p{part}_s"), 2) for row in rows]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    found = Table(title=title)
    for name in columns:
        found.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        found.add_row(*cells)
    return found


def title(path: str, found: Survey, measure_from: int) -> str:
    unique = "" if found.unique_blocks is None else f", {found.unique_blocks:,} unique"
    return (
        f"{path}: {found.requests:,} requests in {found.span_s:,.0f} s, {found.blocks:,} blocks{unique}, of "
        f"{found.block_tokens} tokens; measured from request {measure_from:,} on"
    )


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f}"


def _thousands(count: int | None) -> str:
    return "" if count is None else f"{count / 1000:,.1f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
