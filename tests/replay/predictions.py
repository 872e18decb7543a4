"""Compare predictions of the sample with simulations of traces: `python -m tests.replay.predictions TRACE...`."""

from __future__ import annotations

import sys
from pathlib import Path

from tiercache.core.sampling import Curve, Sample
from tiercache.replay.bounds import survey
from tiercache.replay.formats import Trace
from tiercache.replay.setting import Setting
from tiercache.replay.simulator import Simulator

PARTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
"""Sizes of the hot cache, of the unique blocks of the trace."""


def predictions(path: Path) -> dict[float, tuple[float, float]]:
    """Return the simulated and the predicted hit rate by size. The first half of the requests warms up."""
    trace = Trace(path, strict=True)
    looked = survey(trace)
    measure_from, sample, curve = looked.requests // 2, Sample(), Curve()
    for number, request in enumerate(trace):
        for access in sample.asked(request.keys, 0, 0.0, request.time_s):
            if number >= measure_from:
                curve.add(access.weight, access.distance)
        sample.stored(request.keys, request.time_s)
    found = {}
    for part in PARTS:
        blocks = int(part * looked.unique_blocks)
        simulated = Simulator(Setting(blocks), looked.block_tokens).run(trace, measure_from)
        found[part] = (simulated.hit, curve.hit_rate(blocks))
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name)
        for part, (simulated, predicted) in predictions(Path(name)).items():
            print(f"{100 * part:3.0f} % {100 * simulated:5.1f} {100 * predicted:5.1f}")
