"""Engines in processes of their own, and how their answers are compared."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.needs import LONG
from tests.vllm.models import VOCABULARY

REPOSITORY = Path(__file__).parents[2]
BLOCK_TOKENS = 32
"""The fewest that vLLM can do with on a CPU: short prompts, which are computed soon, fill several."""
CHUNK_TOKENS = 64
STEP_TOKENS = 128
"""Tokens a step, the same for all engines: how a prefill is split changes its result in the fifth digit."""
ANSWERS = "answers: "
"""What a line of `drive.py` begins with."""


class ImportedVllm:
    """A process that has imported vLLM and forks for each engine. One for the session: the fixture `imported`.

    `found_first`: where another version of vLLM is installed.
    """

    def __init__(self, directory: Path, found_first: Path | None = None) -> None:
        self._directory = directory
        paths = [str(found_first or ""), os.environ.get("PYTHONPATH", "")]
        self._runs = 0
        with (directory / "imported.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("drive.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )

    def run(self, task: dict[str, Any], limit_s: float) -> tuple[int, str, str]:
        """Exit status, standard output and error. Raises TimeoutError with their ends, and the process is no more."""
        assert self._process.stdin is not None
        self._runs += 1
        stdout, stderr = (self._directory / f"{self._runs}.{name}" for name in ("stdout", "stderr"))
        self._process.stdin.write(json.dumps(task | {"stdout": str(stdout), "stderr": str(stderr)}) + "\n")
        self._process.stdin.flush()
        child = self._reply(limit_s)
        try:
            status = self._reply(limit_s)
        except TimeoutError as error:
            os.kill(child, signal.SIGKILL)
            self._reply(limit_s)
            raise TimeoutError(f"{error}: {stdout.read_text()[-3000:]}{stderr.read_text()[-6000:]}") from error
        return status, stdout.read_text(), stderr.read_text()

    def _reply(self, limit_s: float) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"not within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        assert line, (self._directory / "imported.log").read_text()[-6000:]
        return int(line)

    def close(self) -> None:
        with self._process:  # closes its input, which tells it to end, and waits
            pass


imported: ImportedVllm | None = None


def drive(
    engine: dict[str, Any],
    steps: list[list[Any]],
    environment: dict[str, str] | None = None,
    vllm: ImportedVllm | None = None,
) -> tuple[list[Any], str]:
    """The answers of each step, and everything that the engine logged.

    By `vllm`, or by that of the fixture `imported`, which `model` uses.
    """
    vllm = vllm or imported
    assert vllm is not None
    engine = {"block_size": BLOCK_TOKENS, "max_num_batched_tokens": STEP_TOKENS} | engine
    task = {"engine": engine, "steps": steps, "environment": {**os.environ, **(environment or {})}}
    status, stdout, stderr = vllm.run(task, limit_s=3000 if LONG else 400)
    assert status == 0, stdout[-3000:] + stderr[-6000:]
    # Other processes of the engine may say something after it.
    (said,) = [line for line in stdout.splitlines() if line.startswith(ANSWERS)]
    answers: list[Any] = json.loads(said.removeprefix(ANSWERS))
    return answers, stdout + stderr


def tiercache_settings(directory: Path, **settings: Any) -> dict[str, Any]:
    """Settings with a disk tier in `directory`. Waits are long, for machines whose cores are busy."""
    return {
        "lookup_timeout_ms": 60_000,
        "blocking_timeout_secs": 60,
        "chunk_size": CHUNK_TOKENS,
        "save_unfull_chunk": True,
        "max_local_cpu_size": 0.25,
        "local_disk": str(directory),
        "max_local_disk_size": 1.0,
        **settings,
    }


def tiny_engine(model: Path, **settings: Any) -> dict[str, Any]:
    """With a model of tests/vllm/models.py that has no tokenizer."""
    ours = {"skip_tokenizer_init": True, "max_model_len": 1024, "enable_prefix_caching": True}
    return {"model": str(model), **ours, "kv_cache_memory_bytes": 64 << 20, **settings}


def prompt_of(seed: int, tokens: int, head: list[int] | None = None) -> dict[str, list[int]]:
    """So many tokens behind `head`, for a tiny model."""
    numbers = random.Random(seed)
    return {"prompt_token_ids": [2, *(head or ())[1:], *(numbers.randrange(3, VOCABULARY) for _ in range(tokens - 1))]}


def drive_named(engine: dict[str, Any], steps: list[tuple[str, list[Any]]]) -> tuple[dict[str, Any], str]:
    """As `drive`: answers by the names of their steps, the one to a single prompt as it is."""
    found, log = drive(engine, [step for _, step in steps])
    return {
        name: answer[0] if step[0] == "generate" and len(answer) == 1 else answer
        for (name, step), answer in zip(steps, found, strict=True)
    }, log


NOTHING_LEFT = {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}
"""What the step `left_behind` has to answer."""


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) < 1e-5 for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


def close_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """What vLLM's own recompute gives: it splits the prefill differently, so its numbers differ by up to 0.05."""
    return one["tokens"][:4] == other["tokens"][:4] and all(
        abs(a - b) < 0.15 for a, b in zip(one["logprobs"][:4], other["logprobs"][:4], strict=True)
    )


def assert_hits(answers: list[dict[str, Any]], oracle: list[dict[str, Any]]) -> None:
    """The same tokens were found, and the answers are the same."""
    for ours, theirs in zip(answers, oracle, strict=True):
        assert ours["cached"] == theirs["cached"], (ours, theirs)
        assert same_answer(ours, theirs), (ours, theirs)


def assert_wrong_hits(answers: list[dict[str, Any]], oracle: list[dict[str, Any]]) -> None:
    """The negative control: with the bytes reversed as much is found, and no answer stays. Else hits would prove nothing."""
    for ours, theirs in zip(answers, oracle, strict=True):
        assert ours["cached"] == theirs["cached"], (ours, theirs)
        assert not same_answer(ours, theirs), ours
