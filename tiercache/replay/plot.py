"""Plot a replay with matplotlib."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tiercache.replay.report import Row


def plot(sections: dict[str, list[Row]], path: Path) -> str:
    """Plot one panel per trace. Return a sentence if there is no matplotlib or the file cannot be written, else "".

    With several admissions, plots hit rate against flash writes, one line per total size; otherwise hit rate against
    the size of the hot cache, one line per policy, with bounds.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"--plot needs matplotlib, which cannot be imported ({error}): pip install 'tiercache[replay]'"
    figure, axes = pyplot.subplots(1, len(sections), figsize=(5.2 * len(sections), 4), squeeze=False)
    for panel, (name, rows) in zip(axes[0], sections.items(), strict=True):
        simulated = [row for row in rows if row.policy]
        if len({row.admission for row in simulated if row.flash_blocks}) > 1:
            _writes(panel, simulated)
        else:
            _sizes(panel, rows)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # a ValueError names the formats that a file's name may end in
        return f"{path}: {error}"
    finally:
        pyplot.close(figure)
    return ""


def _sizes(panel, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.ram_gib is not None and row.hit is not None and row.ram_blocks:
            lines[row.name].append((row.ram_gib, 100 * row.hit))
        elif row.name == "infinite" and row.hit is not None:
            panel.axhline(100 * row.hit, color="grey", linestyle=":", label="infinite")
    for name, points in lines.items():
        points.sort()
        style = {"linestyle": "--", "color": "black"} if name == "optimal" else {"marker": "o", "markersize": 3}
        panel.plot(*zip(*points, strict=True), label=name, **style)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("hot cache, GiB")
    panel.set_ylabel("contiguous-prefix hit, %")


def _writes(panel, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]
    """Plot one line per total of RAM and flash, one marker per admission at the best split of the total."""
    best: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    sizes: dict[int, float] = {}
    for row in rows:
        if row.flash_written_blocks is None or row.hit is None or row.ram_blocks is None or row.flash_blocks is None:
            continue
        total = row.ram_blocks + row.flash_blocks
        sizes[total] = (row.ram_gib or 0) + (row.flash_gib or 0)
        point = row.flash_written_blocks / 1000, 100 * row.hit
        if point[1] > best[total].get(row.admission, (0.0, -1.0))[1]:
            best[total][row.admission] = point
    names = sorted({name for points in best.values() for name in points})
    for total in sorted(best):
        panel.plot(*zip(*sorted(best[total].values()), strict=True), label=f"{sizes[total]:,.0f} GiB in all")
    for name, marker in zip(names, "os^vD*", strict=False):
        points = [best[total][name] for total in best if name in best[total]]
        panel.plot(*zip(*points, strict=True), marker=marker, linestyle="", color="black", markersize=4, label=name)
    panel.set_xlabel("written to flash, thousand blocks")
    panel.set_ylabel("contiguous-prefix hit, %")
