"""One part, in a process of its own: `python -m tests.bench.gpu.part NAME REPORT DIRECTORY [--cpu] [--quick]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.event_figures import measure_events
from tests.bench.gpu.gds_figures import measure_gds
from tests.bench.gpu.model_figures import check_model, measure_overlap, measure_ttft
from tests.bench.gpu.paged_figures import measure_paged
from tests.bench.gpu.report import Amount, Report

PARTS: dict[str, Callable[[Report, Accelerator], None]] = {
    "paged": measure_paged,
    "events": measure_events,
    "model": check_model,
    "ttft": measure_ttft,
    "overlap": measure_overlap,
    "gds": measure_gds,
}


def main(arguments: list[str]) -> int:
    name, report_path, directory = arguments[:3]
    amount = Amount(cpu="--cpu" in arguments, quick="--quick" in arguments)
    report = Report(Path(report_path), amount, Path(directory))
    accelerator = Accelerator(cpu=amount.cpu)
    report.facts = accelerator.facts()
    report.save()
    PARTS[name](report, accelerator)
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
