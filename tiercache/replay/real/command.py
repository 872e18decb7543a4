"""Run `tiercache replay --real`: show measured figures beside simulated figures."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tiercache.replay.bounds import Survey
from tiercache.replay.figures import ttft_figures
from tiercache.replay.formats import Request
from tiercache.replay.real.calibration import Speeds, calibrated
from tiercache.replay.real.contents import Contents, Renamed
from tiercache.replay.real.place import check_room, opened
from tiercache.replay.real.serial import Serial, play_serial
from tiercache.replay.real.timed import Player, Timed, compressed, simulate_timed
from tiercache.replay.setting import Setting, SettingError


@dataclass(frozen=True)
class RealOptions:
    directory: Path
    chunk_bytes: int
    """Bytes per block of the trace, in place of the size of its KV."""
    speed_up: float


@dataclass
class Compared:
    """Results of one trace."""

    speed_up: float
    serial: Serial
    speeds: Speeds
    measured: Timed
    simulated: Timed

    def to_dict(self) -> dict[str, Any]:
        return {
            "speed_up": self.speed_up,
            "serial": asdict(self.serial),
            "speeds": asdict(self.speeds),
            "timed": {"measured": _timed_dict(self.measured), "simulated": _timed_dict(self.simulated)},
        }


def compare(requests: Iterable[Request], known: Survey, setting: Setting, options: RealOptions) -> Compared:
    """Replay `requests` one by one, then at the times of the trace, through caches of `setting`'s size.

    Removes its files from the directory at the end. Raises SettingError for a setting that cannot be replayed, and
    ReplayFailed if the cache fails.
    """
    _check(setting, known, options)
    return asyncio.run(_compare(requests, known, setting, options))


async def _compare(requests: Iterable[Request], known: Survey, setting: Setting, options: RealOptions) -> Compared:
    chunk_bytes, unique = options.chunk_bytes, known.unique_blocks
    assert unique is not None
    hardware = replace(setting.hardware, bytes_per_token=chunk_bytes // known.block_tokens)
    setting = replace(setting, hardware=hardware)
    contents = await asyncio.to_thread(Contents, chunk_bytes)
    with tempfile.TemporaryDirectory(prefix="replay-", dir=options.directory) as name:
        place = Path(name)
        for part in ("serial", "calibration", "timed"):
            (place / part).mkdir()
        async with opened(setting, chunk_bytes, unique, place / "serial", one_at_a_time=True) as cache:
            serial = await play_serial(cache, contents, Renamed(requests), setting, known.block_tokens)
        speeds = await calibrated(chunk_bytes, place / "calibration")
        fast, quick = compressed(setting, options.speed_up, speeds), Renamed(requests, options.speed_up)
        async with opened(setting, chunk_bytes, unique, place / "timed", one_at_a_time=False) as cache:
            measured = await Player(cache, contents, fast, known.block_tokens).play(quick)
        simulated = simulate_timed(quick, fast, known.block_tokens)
    return Compared(options.speed_up, serial, speeds, measured, simulated)


def comparison_table(title: str, found: Compared) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in ("measured", "simulated", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    serial = found.serial
    for name, field in _SERIAL_ROWS:
        measured, simulated = getattr(serial.measured, field), getattr(serial.simulated, field)
        table.add_row(f"one by one: {name}", f"{measured:,}", f"{simulated:,}", f"{measured - simulated:+,}")
    table.add_section()
    for name, measured, simulated, digits in _timed_rows(found):
        row = f"{measured:,.{digits}f}", f"{simulated:,.{digits}f}", f"{measured - simulated:+,.{digits}f}"
        table.add_row(f"{found.speed_up:g} times as fast: {name}", *row)
    speeds = found.speeds
    table.caption = (
        f"RAM {speeds.ram_bytes_per_s / 1e9:.2f} GB/s, flash {speeds.flash_bytes_per_s / 1e9:.2f} GB/s and "
        f"{1e6 * speeds.flash_latency_s:.0f} us; begun up to {1e3 * found.measured.late_s:.0f} ms late, "
        f"{found.measured.moved} after their turn had come, when the last answer of their session was there; "
        + (f"DIFFERS: {serial.differs}" if serial.differs else "one by one: equal, request by request")
    )
    return table


_SERIAL_ROWS = (
    ("blocks hit in RAM", "ram_blocks"),
    ("blocks hit on flash", "flash_blocks"),
    ("blocks that came into RAM", "inserted_blocks"),
    ("blocks written to flash", "flash_written_blocks"),
)


def _timed_rows(found: Compared) -> list[tuple[str, float, float, int]]:
    """Return (name, measured, simulated, digits) for each row."""
    one, other = found.measured, found.simulated
    blocks = max(1, one.blocks)
    rows: list[tuple[str, float, float, int]] = [
        ("hit in RAM %", 100 * one.ram_blocks / blocks, 100 * other.ram_blocks / blocks, 2),
        ("hit on flash %", 100 * one.flash_blocks / blocks, 100 * other.flash_blocks / blocks, 2),
        ("blocks written to flash", one.written_blocks, other.written_blocks, 0),
        ("blocks skipped or lost", one.skipped_blocks + one.lost_blocks, 0, 0),
    ]
    simulated = ttft_figures(other.ttft_s)
    for name, measured_s in ttft_figures(one.ttft_s).items():
        rows.append((f"TTFT {name.split('_')[1]} ms", 1e3 * measured_s, 1e3 * simulated[name], 2))
    return rows


def _timed_dict(timed: Timed) -> dict[str, Any]:
    found = asdict(timed)
    return found | ttft_figures(found.pop("ttft_s"))


def _check(setting: Setting, known: Survey, options: RealOptions) -> None:
    if options.chunk_bytes % 4096 or options.chunk_bytes % known.block_tokens:
        raise SettingError(
            f"--real-chunk-kib: expected a multiple of 4 KiB and of the {known.block_tokens} tokens of a block, found "
            f"{options.chunk_bytes / 1024:g} KiB"
        )
    if setting.prefetch:
        raise SettingError(f"--real: expected --prefetch none, found {'+'.join(setting.prefetch)}")
    assert known.unique_blocks is not None
    check_room(setting, options.chunk_bytes, known.unique_blocks, options.directory)
