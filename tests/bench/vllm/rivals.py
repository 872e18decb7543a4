"""`python -m tests.bench.vllm.rivals`: the workloads of rivals' own benchmark clients against servers with and without us.

Most are workloads of LMCache's client, which is installed apart, since it has the name of LMCache's package:

    pip install --no-deps --target build/lmcache-cli lmcache-cli
    pip install openai sortedcontainers matplotlib

`multi-round-qa` is LMCache's older program: the folder `benchmarks/multi_round_qa` of the source distribution `lmcache`,
copied into `build/lmcache-cli`. It needs pandas. `prefix-repetition` is one of `vllm bench serve`. All servers run at the
same time with the same threads and are asked in turn; all need more than 24 GB, so `--servers` chooses. LMCache's client
asks the same in each run but for the order, so the servers are started anew for each.

The prompts of `kv-tier-pressure` and `prefix-suffix-tuner` have 0.8 and 0.9 GB of KV in bfloat16, so `--memory-gb 0.5` makes
them read from a disk, where there is one.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.bench.vllm.installed import require_installed
from tests.bench.vllm.offloading_engines import tier_settings
from tests.bench.vllm.servers import Side
from tests.bench.vllm.workload import BLOCK_TOKENS
from tiercache.bench.figures import Figures
from tiercache.bench.workload import in_turn
from tiercache.commands.findings import complain
from tiercache.demo.model import ModelFailed, prepare_model
from tiercache.demo.server import CONNECTOR, ServerFailed, serving
from tiercache.signals import ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LONGEST_TOKENS = 4096
_SEQUENCES = 8
_DISK_GB = 4.0
_TOKENS_PER_GB = 20_000
"""Makes the client ask about ten documents of 2,000 tokens."""
_SUMMARY = "bench_summary.json"
_WORKLOADS: dict[str, tuple[str, ...]] = {
    "long-doc-qa": ("--ldqa-document-length", "2000", "--ldqa-query-per-document", "3"),
    "multi-round-chat": (
        *("--mrc-shared-prompt-length", "500", "--mrc-chat-history-length", "1000"),
        *("--mrc-user-input-length", "50", "--mrc-output-length", "20", "--mrc-qps", "0.8", "--mrc-duration", "60"),
    ),
    "random-prefill": ("--rp-request-length", "1500", "--rp-num-requests", "16"),
    "kv-tier-pressure": (
        # One document a request: with several in any order, only a cache that blends would hit.
        *("--ktp-docs-per-request", "1", "--ktp-context-length", "1500", "--ktp-system-prompt-length", "250"),
        *("--ktp-pool-size", "24", "--ktp-num-requests", "40", "--ktp-num-inflight-requests", "4"),
    ),
    # As many prompts as fill 2 GB by _TOKENS_PER_GB, and 5 % more: 28.
    "prefix-suffix-tuner": ("--psf-context-length", "1500", "--psf-prefix-ratio", "0.8", "--psf-thrash", "2"),
}
"""Of `lmcache bench engine`, with their arguments."""
_SERVE_WORKLOADS: dict[str, tuple[str, ...]] = {
    "prefix-repetition": (
        *("--dataset-name", "prefix_repetition", "--num-prompts", "48", "--max-concurrency", "4"),
        *("--prefix-repetition-num-prefixes", "12", "--prefix-repetition-prefix-len", "1200"),
        *("--prefix-repetition-suffix-len", "300", "--prefix-repetition-output-len", "16"),
    ),
}
"""Of `vllm bench serve`."""
# The command `vllm` itself needs a distribution of that name, which vLLM's CPU build has not.
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_QA = "multi-round-qa"
_QA_PROGRAM = "multi_round_qa/multi-round-qa.py"
_QA_ARGUMENTS = (
    *("--num-users", "8", "--num-rounds", "6", "--qps", "0.8", "--time", "60"),
    *("--shared-system-prompt", "500", "--user-history-prompt", "1000", "--answer-len", "20"),
)
_QA_SUMMARY = "multi_round_qa.csv"
_ALL_WORKLOADS = (*_WORKLOADS, *_SERVE_WORKLOADS, _QA)
_OURS = "max_local_cpu_size: {hot_gb}\n"
_OURS_ON_DISK = _OURS + f'local_disk: "{{directory}}"\nmax_local_disk_size: {_DISK_GB}\n'
_FIGURES = {
    "mean TTFT ms": "mean_ttft_ms", "p99 TTFT ms": "p99_ttft_ms", "total s": "elapsed_time", "done": "successful_requests"
}  # fmt: skip


@dataclass(frozen=True)
class _Setting:
    """A server: its engine's blocks, and its tiercache.yaml or the tiers of its OffloadingConnector if it has one."""

    blocks: int
    config: str = ""
    offloads_to: tuple[str, ...] | None = None
    """Tiers below vLLM's own memory tier: `fs` or `tiercache`. None: no OffloadingConnector."""

    def configured(self, place: Path, memory_gb: float) -> str:
        """Return the text of tiercache.yaml."""
        return self.config.format(hot_gb=memory_gb, directory=place / "kv")

    def arguments(self, place: Path, memory_gb: float) -> list[str]:
        """Return arguments for vLLM, beside those that all servers have."""
        if self.offloads_to is None:
            return []
        extra = {
            # vLLM's own memory tier, which needs copies of ours on a CPU.
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.cpu_spec",
            "cpu_bytes_to_use": int(memory_gb * 2**30),
            "secondary_tiers": [tier_settings(one, place / "kv", int(_DISK_GB * 2**30)) for one in self.offloads_to],
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return ["--kv-transfer-config", json.dumps(transfer)]


def _settings(engine_blocks: int) -> dict[str, _Setting]:
    return {
        "vLLM alone": _Setting(engine_blocks),
        "OffloadingConnector": _Setting(engine_blocks, offloads_to=()),
        "fs below OffloadingConnector": _Setting(engine_blocks, offloads_to=("fs",)),
        "ours below OffloadingConnector": _Setting(engine_blocks, offloads_to=("tiercache",)),
        "tiercache": _Setting(engine_blocks, _OURS),
        "tiercache without tails": _Setting(engine_blocks, f"{_OURS}save_unfull_chunk: false\n"),
        "tiercache above a disk": _Setting(engine_blocks, _OURS_ON_DISK),
        "engine cache that holds all": _Setting(256),
    }


@app.command()
def rivals(
    client: Annotated[Path, typer.Option(help="Where lmcache-cli was installed by pip install --target.")] = Path(
        "build/lmcache-cli"
    ),
    workloads: Annotated[str, typer.Option(help=f"Comma list of: {', '.join(_ALL_WORKLOADS)}.")] = "long-doc-qa",
    servers: Annotated[
        str, typer.Option(help=f"Comma list of beginnings of: {'; '.join(_settings(0))}. All without it.")
    ] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Runs of each server.")] = 3,
    engine_blocks: Annotated[int, typer.Option(min=20, help="Blocks of the small engine cache.")] = 64,
    memory_gb: Annotated[float, typer.Option(min=0.1, help="GB of each memory tier.")] = 1.5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Mean and p99 time to first token and total time of each server, as LMCache's client or vLLM's measures them."""
    chosen = workloads.split(",")
    if unknown := set(chosen).difference(_ALL_WORKLOADS):
        raise typer.Exit(
            complain(f"--workloads: {', '.join(sorted(unknown))}: expected some of {', '.join(_ALL_WORKLOADS)}")
        )
    if _WORKLOADS.keys() & set(chosen) and not (client / "lmcache" / "cli").is_dir():
        raise typer.Exit(
            complain(f"--client: {client} has no lmcache-cli; pip install --no-deps --target {client} lmcache-cli")
        )
    if _QA in chosen and not (client / _QA_PROGRAM).is_file():
        raise typer.Exit(
            complain(f"--client: {client} has no {_QA_PROGRAM}, which is in LMCache's source distribution")
        )
    require_installed()
    wanted = tuple(servers.split(",")) if servers else ("",)
    settings = {name: one for name, one in _settings(engine_blocks).items() if name.startswith(wanted)}
    figures = Figures()
    try:
        for pair in range(pairs):
            with tempfile.TemporaryDirectory(prefix="rivals-", dir=Path.cwd()) as directory, ExitStack() as stack:
                sides = [_started(stack, name, one, Path(directory), memory_gb) for name, one in settings.items()]
                for workload in chosen:
                    print(f"{workload}, run {pair + 1} of {pairs}", file=sys.stderr)
                    runs = (partial(_run, figures, side, workload, pair, client, Path(directory)) for side in sides)
                    asyncio.run(in_turn(pair, *runs))
    except (ModelFailed, ServerFailed) as error:
        raise typer.Exit(complain(str(error))) from error
    for workload in chosen:
        _show(figures, workload, list(settings))
    if json_file is not None:
        json_file.write_text(json.dumps(figures.to_dict(), indent=1))


def _started(stack: ExitStack, name: str, setting: _Setting, directory: Path, memory_gb: float) -> Side:
    print(f"starting {name}", file=sys.stderr)
    place = directory / name.replace(" ", "-")
    place.mkdir()
    config = place / "tiercache.yaml" if setting.config else None
    if config is not None:
        config.write_text(setting.configured(place, memory_gb))
    model = prepare_model()
    arguments = [
        # Clients load the tokenizer by the model's name.
        *("--served-model-name", str(model)),
        *("--max-model-len", str(_LONGEST_TOKENS), "--max-num-seqs", str(_SEQUENCES)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(setting.blocks)),
        *setting.arguments(place, memory_gb),
    ]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])),
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    server = stack.enter_context(
        serving(
            model,
            place / "server.log",
            config,
            connector=CONNECTOR,
            arguments=arguments,
            environment=environment,
        )
    )
    return Side(name, server)


async def _run(figures: Figures, side: Side, workload: str, seed: int, client: Path, directory: Path) -> None:
    await asyncio.to_thread(side.server.forget_prefix_cache)
    await side.settle()
    found = await asyncio.to_thread(_ask, side, workload, seed, client, directory)
    for name, field in _FIGURES.items():
        figures.add(f"{workload}.{side.name}.{name}", float(found[field]))


def _ask(side: Side, workload: str, seed: int, client: Path, directory: Path) -> dict[str, Any]:
    """Run the client; return its results by the names that LMCache's has for them."""
    command = _command(workload, side.server.url, prepare_model(), seed, client, directory)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if workload not in _SERVE_WORKLOADS:
        environment |= {"PYTHONPATH": str(client.resolve()), "LMCACHE_DISABLE_BANNER": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if run.returncode:
        raise ServerFailed(f"the client of {workload} ended with status {run.returncode}: {run.stderr[-2000:]}")
    if workload == _QA:
        return _qa_results(directory / _QA_SUMMARY)
    found: dict[str, Any] = json.loads((directory / _SUMMARY).read_text())
    if workload in _WORKLOADS:
        results: dict[str, Any] = found["results"]
        return results
    if found["failed"]:
        raise ServerFailed(f"{workload}: {found['failed']} requests failed: {run.stderr[-2000:]}")
    return found | {"elapsed_time": found["duration"], "successful_requests": found["completed"]}


def _qa_results(summary: Path) -> dict[str, float]:
    """Return the results of multi-round-qa by LMCache's names. It writes a row for each answer, with times in seconds."""
    with summary.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    ttfts_ms = [row["ttft"] * 1e3 for row in rows]
    return {
        "mean_ttft_ms": mean(ttfts_ms),
        "p99_ttft_ms": quantiles(ttfts_ms, n=100, method="inclusive")[98],
        "elapsed_time": max(row["finish_time"] for row in rows) - min(row["launch_time"] for row in rows),
        "successful_requests": len(rows),
    }


def _command(workload: str, url: str, model: Path, seed: int, client: Path, directory: Path) -> list[str]:
    """Return a command that writes the client's results to _SUMMARY, or _QA_SUMMARY, in `directory`."""
    if workload == _QA:
        return [
            *(sys.executable, str(client / _QA_PROGRAM), "--base-url", f"{url}/v1", "--model", str(model)),
            # Users of another run are others, with other prompts.
            *("--init-user-id", str(1000 * seed), "--output", str(directory / _QA_SUMMARY)),
            *_QA_ARGUMENTS,
        ]
    if workload in _WORKLOADS:
        return [
            *(sys.executable, "-m", "lmcache.cli.main", "bench", "engine", "--engine-url", url, "--model", str(model)),
            *("--workload", workload, "--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(_TOKENS_PER_GB)),
            *("--seed", str(seed), "--output-dir", str(directory), "--no-csv", "--json", "-q", "--no-interactive"),
            *_WORKLOADS[workload],
        ]
    return [
        *(sys.executable, "-c", _BENCH_SERVE, "--backend", "openai"),
        *("--base-url", url, "--endpoint", "/v1/completions", "--model", str(model), "--seed", str(seed)),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(directory), "--result-filename", _SUMMARY),
        *_SERVE_WORKLOADS[workload],
    ]


def _show(figures: Figures, workload: str, names: list[str]) -> None:
    table = Table(title=f"{workload}: medians (extremes)")
    for column in ("server", *_FIGURES):
        table.add_column(column)
    for name in names:
        cells = []
        for figure in _FIGURES:
            found = figures.to_dict()[f"{workload}.{name}.{figure}"]
            cells.append(f"{found['median']:,.4g} ({found['min']:,.4g} to {found['max']:,.4g})")
        table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    with ended_by_signals():
        app()
