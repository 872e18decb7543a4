"""Engines in processes of their own, and how their answers are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BLOCK_TOKENS = 128
STEP_TOKENS = 512
"""Tokens a step, the same for all engines: how a prefill is split changes its result in the fifth digit."""


def drive(
    engine: dict[str, Any], steps: list[list[Any]], environment: dict[str, str] | None = None
) -> tuple[list[Any], str]:
    """The answers of each step, and everything that the engine logged."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("drive.py"))],
        input=json.dumps({"engine": engine, "steps": steps}),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    answers: list[Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return answers, run.stdout + run.stderr


def tiercache_settings(directory: Path, **settings: Any) -> dict[str, Any]:
    return {
        "chunk_size": 256,
        "save_unfull_chunk": True,
        "max_local_cpu_size": 0.5,
        "local_disk": str(directory),
        "max_local_disk_size": 1.0,
        **settings,
    }


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) < 1e-5 for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


def close_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """What vLLM's own recompute gives: it splits the prefill differently, so its numbers differ by up to 0.05."""
    return one["tokens"][:4] == other["tokens"][:4] and all(
        abs(a - b) < 0.15 for a, b in zip(one["logprobs"][:4], other["logprobs"][:4], strict=True)
    )
