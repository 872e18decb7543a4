"""Runs the measurements one after the other and shows what came out."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tiercache.bench.compression_figures import measure_compression
from tiercache.bench.core_figures import measure_core
from tiercache.bench.cpu_figures import measure_cpu
from tiercache.bench.disk_figures import measure_disk
from tiercache.bench.figures import Figures
from tiercache.bench.hf3fs_figures import measure_hf3fs
from tiercache.bench.loop_figures import measure_loop
from tiercache.bench.machine import machine
from tiercache.bench.mooncake_figures import measure_mooncake
from tiercache.bench.prefetch_figures import measure_prefetch
from tiercache.bench.redis_figures import measure_redis
from tiercache.bench.restart_figures import measure_restart
from tiercache.bench.s3_figures import measure_s3
from tiercache.bench.shared_memory_figures import measure_shared_memory
from tiercache.bench.vllm.goals import compared_with_goals
from tiercache.bench.vllm.installed import require_installed
from tiercache.bench.workload import CHUNK_SIZES, FULL, QUICK, Plan
from tiercache.commands.findings import complain
from tiercache.errors import TierCacheError
from tiercache.tables import show_figures

DEFAULT_PARTS = ("core", "cpu", "disk", "prefetch", "loop", "restart")
PARTS = (*DEFAULT_PARTS, "compression", "shared_memory", "hf3fs", "mooncake", "redis", "s3", "vllm")
"""All but the default ones are measured when asked for: they want GBs of /dev/shm, an emulator, a server or vLLM, and a
machine that does nothing else."""


def bench_command(
    json_file: Path | None,
    directory: Path,
    pairs: int,
    only: str,
    quick: bool,
    peer: str,
    peer_python: Path | None,
    chunks: Path | None,
) -> int:
    """Exit status 2 for a wrong argument, 1 when a measurement could not be made, both said in one sentence."""
    parts = [part.strip() for part in only.split(",") if part.strip()] or list(DEFAULT_PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        return complain(f"--only: expected a comma list of {', '.join(PARTS)}, found {unknown[0]!r}")
    if peer and peer != "lmcache":
        return complain(f"--peer: expected lmcache, found {peer!r}")
    if bool(peer) != bool(peer_python) or (peer_python is not None and not peer_python.exists()):
        return complain("--peer lmcache needs --peer-python, a Python in which lmcache and torch are installed")
    if json_file is not None and not json_file.resolve().parent.is_dir():
        return complain(f"--json: {json_file.parent} is not a directory")
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=directory))
    except OSError as error:
        return complain(f"--directory: {directory} cannot be used: {error.strerror}")
    console = Console(stderr=True)
    figures = Figures()
    problem = None
    try:
        facts = machine(place)
        with console.status("starting") as status:

            def progress(text: str) -> None:
                status.update(text)
                if not console.is_terminal:
                    print(text, file=sys.stderr, flush=True)

            plan = Plan(pairs, QUICK if quick else FULL, place, progress, peer_python, chunks, quick)
            for part in parts:
                _measure(part, figures, plan)
    except (TierCacheError, OSError) as error:
        problem = str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if made and not any(directory.iterdir()):
            directory.rmdir()
    show_figures(figures.table(), Console())
    for line in compared_with_goals(figures):
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, **figures.to_dict()}, indent=2) + "\n")
    if problem is not None:
        print(f"error: not everything was measured: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


def _measure(part: str, figures: Figures, plan: Plan) -> None:
    if part == "core":
        asyncio.run(measure_core(figures, plan))
    elif part == "cpu":
        asyncio.run(measure_cpu(figures, plan))
    elif part == "disk":
        for chunk_bytes in CHUNK_SIZES:
            asyncio.run(measure_disk(figures, plan, chunk_bytes))
    elif part == "prefetch":
        for chunk_bytes in CHUNK_SIZES:
            asyncio.run(measure_prefetch(figures, plan, chunk_bytes))
    elif part == "loop":
        asyncio.run(measure_loop(figures, plan))
        try:
            import uvloop
        except ImportError:
            return
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure_loop(figures, plan, "loop.uvloop"))
    elif part == "restart":
        asyncio.run(measure_restart(figures, plan))
    elif part == "compression":
        asyncio.run(measure_compression(figures, plan))
    elif part == "shared_memory":
        asyncio.run(measure_shared_memory(figures, plan))
    elif part == "mooncake":
        asyncio.run(measure_mooncake(figures, plan))
    elif part == "redis":
        asyncio.run(measure_redis(figures, plan))
    elif part == "s3":
        asyncio.run(measure_s3(figures, plan))
    elif part == "vllm":
        require_installed()
        from tiercache.bench.vllm.measure import measure_vllm  # its clients import httpx

        measure_vllm(figures, plan)
    else:
        asyncio.run(measure_hf3fs(figures, plan))
