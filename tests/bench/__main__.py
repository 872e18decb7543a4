"""`python -m tests.bench`: `tiercache bench`, with what needs servers, emulators, engines or a peer; `make bench-peers`.

`python -m tests.bench.vllm.rivals` runs rivals' own benchmark clients.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from tests.bench.compression_figures import measure_compression
from tests.bench.disk_figures import measure_disk_and_peer
from tests.bench.redis_figures import measure_redis
from tests.bench.shared_memory_figures import measure_shared_memory
from tests.bench.vllm.goals import compared_with_goals
from tests.bench.vllm.installed import require_installed
from tiercache.bench.command import Measure, bench_command
from tiercache.bench.figures import Figures
from tiercache.bench.workload import Plan
from tiercache.commands.findings import complain
from tiercache.signals import ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _vllm(figures: Figures, plan: Plan) -> None:
    require_installed()
    from tests.bench.vllm.measure import measure_vllm  # its clients import httpx

    measure_vllm(figures, plan)


def others(peer_python: Path | None, chunks: Path | None) -> dict[str, Measure]:
    """Return the parts that need GBs of /dev/shm, an emulator, a server, vLLM or LMCache, and an idle machine.

    They are measured when they are named, except for `disk`, which measures LMCache beside the part of `tiercache bench`.
    """
    return {
        "disk": lambda figures, plan: asyncio.run(measure_disk_and_peer(figures, plan, peer_python)),
        "compression": lambda figures, plan: asyncio.run(measure_compression(figures, plan, chunks)),
        "shared_memory": lambda figures, plan: asyncio.run(measure_shared_memory(figures, plan)),
        "redis": lambda figures, plan: asyncio.run(measure_redis(figures, plan)),
        "vllm": _vllm,
    }


@app.command()
def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the disk is measured.")] = Path("bench-data"),
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of ceiling and ours.")] = 5,
    only: Annotated[
        str, typer.Option(help=f"Comma list of the parts of `tiercache bench`, and of: {', '.join(others(None, None))}.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, measures nothing.")] = False,
    peer_python: Annotated[Path | None, typer.Option(help="A Python with lmcache and torch: LMCache in turn.")] = None,
    chunks: Annotated[Path | None, typer.Option(help="Chunks to compress, such as demo/kv; else generated ones.")] = None,
) -> None:
    """Ceilings of this machine, ours, and peers, interleaved in one run."""
    if peer_python is not None and not peer_python.exists():
        raise typer.Exit(complain(f"--peer-python: {peer_python} does not exist"))
    plan = Plan(pairs, quick, directory)
    status, figures = bench_command(plan, only, json_file, others(peer_python, chunks))
    for line in compared_with_goals(figures):
        print(line)
    raise typer.Exit(status)


def main() -> None:
    try:
        with ended_by_signals():
            app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
