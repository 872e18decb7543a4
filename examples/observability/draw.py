"""Draw the dashboard's panels from what a Prometheus has, for a report or a machine without Grafana.

    python draw.py --minutes 15 --out dashboard.png
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
from matplotlib import dates, ticker
from matplotlib.figure import Figure

DASHBOARD = Path(__file__).with_name("dashboard.json")
COLUMNS = 3
POINTS = 180
UNITS = {"percentunit": "%", "Bps": "B/s", "s": "s", "bytes": "B", "cps": "1/s", "short": ""}


def lines(client: httpx.Client, target: dict[str, str], minutes: float) -> list[tuple[str, list[float], list[float]]]:
    """Name, times and values of each line of a panel's target."""
    end_s = time.time()
    step_s = max(5.0, minutes * 60 / POINTS)
    query = target["expr"].replace("$__rate_interval", "30s").replace("$job", ".*")
    asked: dict[str, str | float] = {"query": query, "start": end_s - minutes * 60, "end": end_s, "step": step_s}
    answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
    found = []
    for series in answer["data"]["result"]:
        name = target.get("legendFormat", "")
        for label, value in series["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        values = [(float(at), float(value)) for at, value in series["values"]]
        values = [(at, value) for at, value in values if math.isfinite(value)]
        if values:
            found.append((name, [at for at, _ in values], [value for _, value in values]))
    return sorted(found)


def draw_panel(axes: Any, panel: dict[str, Any], found: list[tuple[str, list[float], list[float]]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_title(panel["title"], fontsize=9, loc="left")
    base: dict[float, float] = {}
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    for name, times_s, values in found:
        days = [at / 86400 for at in times_s]
        lower = [base.get(at, 0.0) for at in times_s]
        upper = [low + value for low, value in zip(lower, values, strict=True)] if stacked else values
        (line,) = axes.plot(days, upper, label=name, linewidth=1)
        if stacked:
            axes.fill_between(days, lower, upper, alpha=0.2, color=line.get_color())
            base |= dict(zip(times_s, upper, strict=True))
    unit = UNITS.get(defaults["unit"], defaults["unit"])
    percent = unit == "%"
    bytes_or_time = unit[:1] in ("B", "s") and bool(unit)
    plain = ticker.EngFormatter(unit) if bytes_or_time else ticker.FuncFormatter(lambda value, _: f"{value:g} {unit}")
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0) if percent else plain)
    top = max((value for _, _, values in found for value in values), default=0.0)
    highest = max(1.0, axes.get_ylim()[1] if stacked else 0.0) if percent else axes.get_ylim()[1] if top else 1.0
    axes.set_ylim(-0.03 * highest, 1.03 * highest)  # a line that lies on an edge is seen
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if found:
        axes.legend(fontsize=6, loc="upper left")
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="gray")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"))
    arguments = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 2.4 * rows), layout="constrained")
    places = figure.subplots(rows, COLUMNS, squeeze=False).flat
    with httpx.Client(base_url=arguments.prometheus, timeout=30) as client:
        for axes, panel in zip(places, panels, strict=False):
            found = [line for target in panel["targets"] for line in lines(client, target, arguments.minutes)]
            draw_panel(axes, panel, found)
    figure.savefig(arguments.out, dpi=100)
    print(f"{len(panels)} panels: {arguments.out}")


if __name__ == "__main__":
    main()
