"""`tiercache top` over the control socket of a real cache."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.cli.conftest import tiercache
from tests.control.conftest import CHUNKS, LAYOUT, TOKENS
from tiercache import TierCache
from tiercache.control.families import figures_of
from tiercache.control.top import rows_of, tables_of
from tiercache.tables import fitting


@pytest.fixture
async def cache(cache: TierCache) -> TierCache:
    """Three chunks were read from disk and one of them again from RAM."""
    for number in (0, 1, 2, 2):
        async with cache.get(cache.keys(TOKENS)[number]) as lease:
            assert lease is not None
    return cache


def megabytes(chunks: int) -> str:
    return f"{chunks * LAYOUT.chunk_bytes / 1e6:,.1f}"


async def test_rows_are_what_the_cache_counts(cache: TierCache) -> None:
    cpu, disk = rows_of(figures_of(cache), None, 0.0)
    assert cpu[:3] == ("cpu", "1", "25.0")
    assert disk[:5] == ("disk", "3", "100.0", megabytes(3), "")
    assert float(disk[5]) > 0 and float(disk[8]) > 0, "reads and writes took some time"
    assert disk[6] == megabytes(CHUNKS)
    assert disk[9] == "0" and disk[11] == "0"
    assert disk[-2:] == ("closed", "closed")


async def test_rates_are_of_what_came_since_the_last_refresh(cache: TierCache) -> None:
    before = figures_of(cache)
    async with cache.get(cache.keys(TOKENS)[5]) as lease:
        assert lease is not None
    _, disk = rows_of(figures_of(cache), before, 0.5)
    assert disk[3:5] == (megabytes(4), f"{LAYOUT.chunk_bytes / 1e6 / 0.5:,.1f}")
    _, idle = rows_of(before, before, 0.5)
    assert (idle[4], idle[5]) == ("0.0", "")


async def test_one_refresh_shows_a_running_cache(cache: TierCache, tmp_path: Path) -> None:
    run = await asyncio.to_thread(tiercache, "top", "--once", "--socket", tmp_path / "c.sock")
    assert run.returncode == 0, run.stderr
    assert "c.sock: m, rank 0 of 1" in run.stdout
    (line,) = (line for line in run.stdout.splitlines() if "disk" in line)
    assert megabytes(CHUNKS) in line and line.count("closed") == 2


@pytest.mark.parametrize("columns", [80, 120])
async def test_every_figure_has_its_name_in_a_narrow_terminal(cache: TierCache, columns: int) -> None:
    console = Console(width=columns, force_terminal=True, color_system=None, file=io.StringIO())
    (table,) = tables_of({"c.sock": figures_of(cache)}, {}, 0.0)
    assert isinstance(table, Table)
    console.print(fitting(table, console))
    said = console.file.getvalue()
    assert "…" not in said and all(len(line) <= columns for line in said.splitlines())
    assert all(str(column.header) in " ".join(said.split()) for column in table.columns)
    assert "tier disk" in said and "c.sock: m, rank 0 of 1" in said and "slots in use" in said
