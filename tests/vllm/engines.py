"""Engines in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.needs import LONG
from tests.servers.ports import hold_port
from tests.vllm.drive import run
from tests.vllm.models import VOCABULARY

REPOSITORY = Path(__file__).parents[2]
BLOCK_TOKENS = 32
"""The fewest that vLLM can do with on a CPU: short prompts, which are computed soon, fill several."""
CHUNK_TOKENS = 64
STEP_TOKENS = 128
"""Tokens a step, the same for all engines: how a prefill is split changes its result in the fifth digit."""


_FORKS = multiprocessing.get_context("forkserver")


def import_vllm() -> None:
    """Start the process whose forks the engines are. Called by the fixture `imported`."""
    _FORKS.set_forkserver_preload(["tests.vllm.preloaded"])
    forkserver.ensure_running()


def drive(
    engine: dict[str, Any],
    steps: list[list[Any]],
    environment: dict[str, str] | None = None,
    vllm: Path | None = None,
) -> tuple[list[Any], str]:
    """Return the answers of each step, and all that the engine logged. `vllm` is where another version is installed."""
    engine = {"block_size": BLOCK_TOKENS, "max_num_batched_tokens": STEP_TOKENS} | engine
    limit_s = 3000 if LONG else 400
    with tempfile.TemporaryDirectory() as place:
        log, answers = Path(place) / "log", Path(place) / "answers"
        arguments = engine, steps, os.environ | (environment or {}), str(log), str(answers)
        if vllm is None:
            process = _FORKS.Process(target=run, args=arguments)
            process.start()
            process.join(limit_s)
            status = process.exitcode
            process.kill()
            process.join()
            process.close()
        else:
            paths = os.pathsep.join(filter(None, [str(vllm), str(REPOSITORY), os.environ.get("PYTHONPATH")]))
            command = [sys.executable, "-m", "tests.vllm.drive"]
            of_it = {"input": json.dumps(arguments), "env": os.environ | {"PYTHONPATH": paths}}
            status = subprocess.run(command, text=True, timeout=limit_s, check=False, **of_it).returncode
        said = log.read_text()
        assert status == 0, f"exit status {status} (None: not within {limit_s} s): {said[-9000:]}"
        return json.loads(answers.read_text()), said


def tiercache_settings(directory: Path, **settings: Any) -> dict[str, Any]:
    """Settings with a disk tier in `directory`. Waits are long, for machines whose cores are busy."""
    return {
        "lookup_timeout_ms": 60_000,
        "blocking_timeout_secs": 60,
        "chunk_size": CHUNK_TOKENS,
        "max_local_cpu_size": 0.25,
        "local_disk": str(directory),
        "max_local_disk_size": 1.0,
        **settings,
    }


def offloading_settings(directory: Path, **tier: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` of vLLM's own offloading with our tier below it, which has these settings."""
    below = {
        "type": "TierCacheTier",
        "module_path": "tiercache.integrations.vllm_offloading",
        "max_local_cpu_size": 0.1,
    }
    below |= {"local_disk": str(directory), "max_local_disk_size": 1.0}
    extra: dict[str, Any] = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.vllm.cpu_spec"}
    extra |= {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": [below | tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def tiny_engine(model: Path, **settings: Any) -> dict[str, Any]:
    """Return settings of an engine with a model of tests/vllm/models.py that has no tokenizer."""
    ours = {"skip_tokenizer_init": True, "max_model_len": 1024, "enable_prefix_caching": True}
    return {"model": str(model), **ours, "kv_cache_memory_bytes": 64 << 20, **settings}


def prompt_of(seed: int, tokens: int, head: list[int] | None = None) -> dict[str, list[int]]:
    """Return a prompt for a tiny model, of so many random tokens behind `head`."""
    numbers = random.Random(seed)
    return {"prompt_token_ids": [2, *(head or ())[1:], *(numbers.randrange(3, VOCABULARY) for _ in range(tokens - 1))]}


def drive_named(engine: dict[str, Any], steps: list[tuple[str, list[Any]]]) -> tuple[dict[str, Any], str]:
    """Call `drive`. Answers are by the names of their steps, and the answer to a single prompt is not in a list."""
    found, log = drive(engine, [step for _, step in steps])
    return {
        name: answer[0] if step[0] == "generate" and len(answer) == 1 else answer
        for (name, step), answer in zip(steps, found, strict=True)
    }, log


NOTHING_LEFT = {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}
"""The answer of the step `left_behind` if nothing is left."""


@contextmanager
def running_example(program: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Run a program of examples/ that serves HTTP, in a process of its own. Yields its URL."""
    port = hold_port()
    with log.open("wb") as output:
        command = [sys.executable, str(program), *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            until_s = time.monotonic() + 60
            while "running on" not in log.read_text():
                assert process.poll() is None and time.monotonic() < until_s, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)
