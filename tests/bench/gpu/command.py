"""Runs the parts one after the other and shows what came out. What a part has found is kept when it fails or is stopped."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.gpu.report import TARGETS
from tiercache.bench.machine import machine
from tiercache.tables import show_figures

PART_LIMITS_S = {"tests": 90, "paged": 60, "events": 30, "model": 40, "ttft": 80, "overlap": 40, "gds": 40}
_LIMIT_S = 290
_SHORTEST_S = 10
_TESTS = ("tests/device", "tests/gds", "tests/test_cache_device.py", "tests/vllm/test_device_mover.py")
_ROOT = Path(__file__).resolve().parents[3]
_WHEELS = {
    "torch": "torch, with CUDA",
    "numpy": "numpy",
    "xxhash": "xxhash",
    "msgspec": "msgspec",
    "aiofiles": "aiofiles",
    "yaml": "pyyaml",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "uvloop": "uvloop",
    "kvikio": "kvikio-cu13 libkvikio-cu13",
    "rapids_logger": "rapids-logger",
    "cuda.pathfinder": "cuda-pathfinder",
}


def main(arguments: list[str]) -> int:
    """Exit status 2 when nothing can be measured here, 1 when a check or a part failed; missed targets are only shown."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description="Check and measure device memory."
    )
    parser.add_argument(
        "--cpu", action="store_true", help="everything small in host memory; the figures mean nothing"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each part")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="for files that are measured"
    )
    parser.add_argument("--parts", default=",".join(PART_LIMITS_S), help="which, in which order (default: %(default)s)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PART_LIMITS_S]:
        parser.error(f"--parts: expected a comma list of {', '.join(PART_LIMITS_S)}, found {unknown[0]!r}")
    missing = [name for name in _WHEELS if not _is_there(name)]
    if missing:
        print("missing here, wanted as wheels:", "; ".join(_WHEELS[name] for name in missing), flush=True)
    if not options.cpu and (reason := _without_gpu()):
        print(f"error: {reason}; --cpu runs everything on the CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tiercache-gpu-", dir=options.directory) as place:
        run = _Run(options, Path(place), missing)
        for part in parts:
            run.part(part)
    run.show(Console())
    return 1 if run.failed else 0


class _Run:
    def __init__(self, options: argparse.Namespace, directory: Path, missing: list[str]) -> None:
        self._options = options
        self._directory = directory
        self._began = time.monotonic()
        self.results: dict[str, Any] = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "amount": "cpu" if options.cpu else "quick" if options.quick else "full",
            "machine": machine(directory),
            "packages": _versions(),
            "missing": missing,
            "parts": {},
            "figures": {},
            "checks": {},
        }

    @property
    def failed(self) -> list[str]:
        parts = [
            f"{name}: {part['ended']}" for name, part in self.results["parts"].items() if part["ended"] != "passed"
        ]
        return parts + [f"{name}: {found}" for name, found in self.results["checks"].items() if found != "passed"]

    def part(self, name: str) -> None:
        left_s = _LIMIT_S - (time.monotonic() - self._began)
        limit_s = min(PART_LIMITS_S[name], left_s)
        if limit_s < _SHORTEST_S:
            self._finish(name, {"ended": "not begun: no time was left"}, {})
            return
        print(f"-- {name} (at most {limit_s:.0f} s)", flush=True)
        report = self._directory / f"{name}.json"
        place = self._directory / name
        place.mkdir()
        if name == "tests":
            tests = [path for path in _TESTS if (_ROOT / path).exists()]
            command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short", *tests]
        else:
            command = [sys.executable, "-m", "tests.bench.gpu.part", name, str(report), str(place)]
            command += [f"--{flag}" for flag in ("cpu", "quick") if getattr(self._options, flag)]
        began = time.monotonic()
        status, output = _run(command, limit_s)
        ended = "passed" if status == 0 else f"stopped after {limit_s:.0f} s" if status is None else f"status {status}"
        found = json.loads(report.read_text()) if report.exists() else {}
        took_s = round(time.monotonic() - began, 1)
        self._finish(name, {"ended": ended, "took_s": took_s, "output": output[-6000:]}, found)
        shutil.rmtree(place, ignore_errors=True)

    def _finish(self, name: str, part: dict[str, Any], found: dict[str, Any]) -> None:
        self.results["parts"][name] = part | {"facts": found.get("facts", {})}
        self.results["figures"] |= found.get("figures", {})
        self.results["checks"] |= found.get("checks", {})
        self.results["targets"] = self._targets()
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def _targets(self) -> list[dict[str, Any]]:
        rows = []
        for target in TARGETS:
            value = target.found(self.results["figures"])
            if value is not None:
                sign = ">=" if target.at_least else "<="
                name = target.figure if target.beside is None else f"{target.figure} / {target.beside}"
                rows.append(
                    {"name": name, "found": value, "wanted": f"{sign} {target.limit}", "met": target.met(value)}
                )
        return rows

    def show(self, console: Console) -> None:
        show_figures(_figures_table(self.results["figures"]), console)
        if self._options.cpu:
            console.print("measured in host memory: the figures mean nothing")
        else:
            show_figures(_targets_table(self.results["targets"]), console)
        for name, part in self.results["parts"].items():
            print(
                f"{name}: {part['ended']}, {part.get('took_s', 0)} s {json.dumps(part['facts']) if part['facts'] else ''}"
            )
        checks = self.results["checks"].values()
        print(f"{sum(found == 'passed' for found in checks)} of {len(checks)} checks passed")
        for failure in self.failed:
            print(f"FAILED {failure}")


def _figures_table(figures: dict[str, Any]) -> Table:
    table = Table(box=None)
    table.add_column("figure", no_wrap=True)
    for column in ("median", "min", "max", "count"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("of what it is beside, pair by pair")
    for name, row in figures.items():
        ratios = ", ".join(
            f"{ratio:.3g} {other.rpartition('.')[2]}" for other, ratio in row.get("ratios", {}).items() if ratio is not None
        )
        table.add_row(name, *(f"{row[key]:,.4g}" for key in ("median", "min", "max")), str(row["count"]), ratios)
    return table


def _targets_table(targets: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for column in ("target", "found", "wanted", ""):
        table.add_column(column, no_wrap=column != "target")
    for row in targets:
        table.add_row(row["name"], f"{row['found']:.4g}", row["wanted"], "met" if row["met"] else "MISSED")
    return table


def _run(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Status (None: stopped) and output, which is shown as it comes. Ends all processes that the command started."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        output = log.read()
    print(output[-3000:], end="", flush=True)
    return status, output


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _without_gpu() -> str:
    """Why there is no GPU; empty when there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver here ({error})"
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    return ""


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "kvikio-cu13", "libkvikio-cu13", "nvidia-cufile", "uvloop", "pytest")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
