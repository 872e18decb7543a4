"""`python -m tests.torture.campaign DIR --minutes 1`: the campaign, by itself."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.torture.campaign.command import WORKER, run_campaign
from tests.torture.campaign.plan import PARTS
from tests.torture.campaign.processes import NurseryFailed
from tiercache.errors import ConfigError


def campaign_command(
    directory: Path, minutes: float, seed: int | None, parts: Sequence[str] = PARTS, worker: str = WORKER
) -> int:
    """0: nothing was found; 1: something was; 2: it could not be done; 130: it was interrupted."""
    seed = time.time_ns() % 1_000_000 if seed is None else seed
    print(f"seed {seed}", flush=True)
    try:
        report = run_campaign(directory, minutes, seed, parts, worker=worker)
    except (ConfigError, NurseryFailed) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    return 1 if report.failed else 130 if report.interrupted else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.campaign", description=__doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where its files go, on the disk that is to be tried"
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="the plan; by default another one each time, which is printed")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--worker", default=WORKER, help="a module whose run(order, connection) is a worker's life")
    given = parser.parse_args()
    return campaign_command(given.directory, given.minutes, given.seed, given.parts.split(","), given.worker)


if __name__ == "__main__":
    sys.exit(main())
