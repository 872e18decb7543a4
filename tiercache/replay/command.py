"""Run `tiercache replay`: compare simulations with each other and with their bounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tiercache.commands.findings import complain
from tiercache.core.admission import ADMISSIONS
from tiercache.core.eviction import RANKS
from tiercache.errors import TierCacheError
from tiercache.replay.bounds import Survey, optimal_hits, survey
from tiercache.replay.formats import Trace
from tiercache.replay.plot import plot
from tiercache.replay.real.command import RealOptions, compare, comparison_table
from tiercache.replay.report import Row, row_of, table, title
from tiercache.replay.setting import UNBOUNDED, Setting, SettingError, parse_size
from tiercache.replay.simulator import Simulator
from tiercache.tables import show_figures

PREDICTORS = ("hints", "sessions")
_PICTURES = (".png", ".svg", ".pdf")


@dataclass
class Options:
    """Arguments of the command. Lists are run in all combinations."""

    traces: list[Path]
    ram: list[str]
    flash: list[str]
    policies: list[str]
    admissions: list[str]
    prefetch: list[str]
    bounds: bool
    measure_from: float
    strict: bool
    limit: int | None
    repeat: int
    noisy: float
    """Blocks that an extra scanning tenant stores per block of the trace, in twice the memory; 0 for no tenant."""
    session_interval_s: float
    json_file: Path | None
    plot_file: Path | None
    real: RealOptions | None
    """Options of a real replay; None for simulation only. Allows only one setting."""
    base: Setting
    """Speeds, and other values that are the same in all simulations."""


def replay_command(options: Options) -> int:
    """Run the replay and return the exit status.

    The status is 2 after an error, for example a trace that cannot be replayed, and 1 if lines were skipped or the real
    replay differs from the simulation.
    """
    sections: dict[str, list[Row]] = {}
    found: list[dict[str, Any]] = []
    skipped = unequal = 0
    output = Console()
    try:
        _check(options)
        for path in options.traces:
            trace = Trace(path, options.strict, options.session_interval_s, options.repeat, options.limit)
            try:
                looked = survey(trace, unique=options.bounds or options.real is not None or _needs_unique(options))
            finally:
                for problem in trace.problems:
                    print(f"skipped: {problem}", file=sys.stderr)
                if trace.skipped > len(trace.problems):
                    print(f"skipped: {trace.skipped - len(trace.problems)} more lines of {path}", file=sys.stderr)
            measure_from = int(looked.requests * options.measure_from)
            skipped += trace.skipped
            if options.real is not None:
                ((_, _, setting),) = _settings(options, looked)
                compared = compare(trace, looked, setting, options.real)
                unequal += bool(compared.serial.differs)
                name = f"{path.name}: {looked.requests:,} requests, {_name(options, setting)}"
                show_figures(comparison_table(name, compared), output)
                found.append({"trace": path.name, "requests": looked.requests, "real": compared.to_dict()})
                continue
            rows = list(_rows(options, trace, looked, measure_from))
            sections[str(path) if path.name in sections else path.name] = rows
            show_figures(table(title(path.name, looked, measure_from), rows), output)
            found.append({
                "trace": path.name, "format": trace.format, "requests": looked.requests, "blocks": looked.blocks,
                "unique_blocks": looked.unique_blocks, "block_tokens": looked.block_tokens, "span_s": looked.span_s,
                "measure_from": measure_from, "skipped_lines": trace.skipped,
                "bytes_per_token": options.base.hardware.bytes_per_token, "rows": [row.to_dict() for row in rows],
            })  # fmt: skip
    except TierCacheError as error:
        return complain(str(error))
    except OSError as error:
        return complain(f"{error.filename or 'the trace'}: {error.strerror or error}")
    if options.json_file is not None:
        try:
            options.json_file.write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            return complain(f"{options.json_file}: {error.strerror or error}")
    if options.plot_file is not None and sections and (problem := plot(sections, options.plot_file)):
        return complain(problem)
    return 1 if skipped or unequal else 0


def _settings(options: Options, looked: Survey) -> list[tuple[str, str, Setting]]:
    """Return all combinations, each as (size of RAM as given, size of flash as given, setting)."""
    block_bytes = looked.block_tokens * options.base.hardware.bytes_per_token
    settings = []
    for ram in options.ram:
        ram_blocks = parse_size(ram, block_bytes, looked.unique_blocks)
        ram_blocks = UNBOUNDED if ram_blocks is None else ram_blocks
        for flash in options.flash:
            flash_blocks = parse_size(flash, block_bytes, looked.unique_blocks)
            for setting in _variants(options, ram_blocks, flash_blocks):
                settings.append((ram, flash, setting))
    return settings


def _rows(options: Options, trace: Trace, looked: Survey, measure_from: int) -> Iterator[Row]:
    block_bytes = looked.block_tokens * options.base.hardware.bytes_per_token
    settings = _settings(options, looked)
    sizes: dict[int, str] = {}
    for ram, flash, setting in settings:
        total = UNBOUNDED if setting.flash_blocks is None else setting.ram_blocks + setting.flash_blocks
        sizes[total] = ram if not setting.flash_blocks else f"{ram}+{flash}"
    if options.bounds:
        yield _simulated("no cache", options.base, trace, looked, measure_from)
    for ram, flash, setting in settings:
        yield _simulated(_name(options, setting), setting, trace, looked, measure_from, ram, flash)
        for quotas in (False, True) if options.noisy else ():
            name = f"{_name(options, setting)}, noisy{', quotas' if quotas else ''}"
            shared = _beside_a_scan(setting, options.noisy, quotas)
            yield _simulated(name, shared, trace, looked, measure_from, f"2 x {ram}", f"2 x {flash}")
    if options.bounds:
        bounded = {total for total in sizes if total < UNBOUNDED}
        for total, hit in sorted(optimal_hits(trace, bounded, measure_from).items()):
            yield Row("optimal", sizes[total], ram_blocks=total, ram_gib=total * block_bytes / 2**30, hit=hit)
        unbounded = replace(options.base, ram_blocks=UNBOUNDED)
        yield _simulated("infinite", unbounded, trace, looked, measure_from)


def _beside_a_scan(setting: Setting, noisy: float, quotas: bool) -> Setting:
    flash_blocks = None if setting.flash_blocks is None else 2 * setting.flash_blocks
    return replace(
        setting, ram_blocks=2 * setting.ram_blocks, flash_blocks=flash_blocks, noisy=noisy, quotas=quotas
    )


def _variants(options: Options, ram_blocks: int, flash_blocks: int | None) -> Iterator[Setting]:
    """Yield the settings for these sizes. Admission and prefetch do not vary without flash."""
    with_flash = flash_blocks != 0
    for policy in options.policies:
        for admission in options.admissions if with_flash else ["all"]:
            for prefetch in options.prefetch if with_flash else ["none"]:
                yield replace(
                    options.base,
                    ram_blocks=ram_blocks,
                    flash_blocks=flash_blocks,
                    policy=policy.upper(),
                    admission=admission,
                    prefetch=() if prefetch == "none" else tuple(prefetch.split("+")),
                )


def _simulated(
    name: str, setting: Setting, trace: Trace, looked: Survey, measure_from: int, ram: str = "", flash: str = ""
) -> Row:
    simulator = Simulator(setting, looked.block_tokens)
    figures = simulator.run(trace, measure_from)
    return row_of(name, figures, setting, simulator.block_bytes, ram, flash)


def _name(options: Options, setting: Setting) -> str:
    parts = [setting.policy]
    if setting.flash_blocks != 0:
        if len(options.admissions) > 1 or setting.admission != "all":
            parts.append(setting.admission)
        if setting.prefetch:
            parts.append("+".join(setting.prefetch))
    return ", ".join(parts)


def _needs_unique(options: Options) -> bool:
    return any("%" in size for size in (*options.ram, *options.flash))


def _check(options: Options) -> None:
    lists = {
        "--sweep": options.ram,
        "--flash": options.flash,
        "--policy": options.policies,
        "--admission": options.admissions,
        "--prefetch": options.prefetch,
    }
    for option, values in lists.items():
        if not values:
            raise SettingError(f"{option}: expected at least one value, found none")
    for option, found, known in (
        ("--policy", [name.upper() for name in options.policies], tuple(RANKS)),
        ("--admission", options.admissions, ADMISSIONS),
        ("--prefetch", [part for name in options.prefetch for part in name.split("+")], ("none", *PREDICTORS)),
    ):
        for name in found:
            if name not in known:
                raise SettingError(f"{option}: expected one or more of {', '.join(known)}, found {name!r}")
    for name in options.prefetch:
        if "none" in (parts := name.split("+")) and len(parts) > 1:
            raise SettingError(f"--prefetch: none goes with no other, found {name!r}")
    if options.real is not None and any(len(values) != 1 for values in lists.values()):
        raise SettingError("--real: expected one setting, found lists of sizes, policies, admissions or prefetches")
    if options.real is not None and options.plot_file is not None:
        raise SettingError("--real: no picture is made of it; expected no --plot")
    if options.noisy and (options.real is not None or "all" in options.ram):
        raise SettingError("--noisy: expected a size of the hot cache, and no --real")
    if not 0 <= options.measure_from < 1:
        raise SettingError(f"--measure-from: expected a part from 0 to below 1, found {options.measure_from:g}")
    for file in (options.json_file, options.plot_file):
        if file is not None and not file.resolve().parent.is_dir():
            raise SettingError(f"{file.parent} is not a directory")
        if file is not None and file.is_dir():
            raise SettingError(f"{file} is a directory; expected the name of a file")
    if options.plot_file is not None and options.plot_file.suffix not in _PICTURES:
        raise SettingError(f"--plot: expected a name that ends in {', '.join(_PICTURES)}, found {options.plot_file}")
