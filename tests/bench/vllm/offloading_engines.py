"""Engines with vLLM's own offloading, each in a process that is forked from one that has imported vLLM."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
)
"""What an engine would import while it starts. It must start no thread: a fork would have only its locks."""
_PATIENCE_S = 120.0
_CPU_TIER_BYTES = 64 << 20
_SPEC = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.vllm.cpu_spec"}
_OURS = {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm_offloading"}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    hit_tokens: int
    seconds: float
    """From the question to the last token."""


def tier_settings(side: str, directory: Path, cap_bytes: int) -> dict[str, Any]:
    """Of `fs`, vLLM's own tier, or of ours, both with nothing but a directory."""
    if side == "fs":
        return {"type": "fs", "root_dir": str(directory)}
    return _OURS | {
        "local_disk": str(directory),
        "max_local_disk_size": cap_bytes / 2**30,
        "local_cpu": False,
        "max_local_cpu_size": 0.1,
    }


class Engine:
    """An engine's process, from here. Raises EOFError when it is no more, TimeoutError when it says nothing."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection

    def ask(self, prompt: Sequence[int], tokens: int = 8) -> Answer:
        found: Answer = self._call("ask", list(prompt), tokens)
        return found

    def settle(self) -> float:
        """Until all that was computed lies in the tier; seconds."""
        return float(self._call("settle"))

    def forget_memory(self) -> None:
        """Empty vLLM's CPU tier."""
        self._call("forget_memory")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        return _received(self._connection)


@contextmanager
def engine(model: Path, tier: dict[str, Any]) -> Iterator[Engine]:
    """Runs until the block ends, when it writes what it has queued."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    name = f"tiercache-bench-{uuid.uuid4().hex}"
    process = context.Process(target=_live, args=(there, name, model, tier))
    process.start()
    there.close()
    try:
        assert _received(here) == "ready"
        yield Engine(process, here)
        if process.is_alive():
            here.send(("close", ()))
            process.join(60)
    finally:
        here.close()
        if process.is_alive():
            process.kill()
        process.join()
        # vLLM's memory, which it leaves behind when it is killed.
        Path(f"/dev/shm/vllm_offload_{name}.mmap").unlink(missing_ok=True)


def _received(connection: Connection) -> Any:
    if not connection.poll(_PATIENCE_S):
        raise TimeoutError(f"an engine said nothing for {_PATIENCE_S:.0f} s")
    return connection.recv()


def import_vllm() -> None:
    """Once, before the first engine."""
    os.environ.update(_ENVIRONMENT | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))})
    for name in _IMPORTED:
        importlib.import_module(name)


def _live(connection: Connection, name: str, model: Path, tier: dict[str, Any]) -> None:
    life = _Life(name, model, tier)
    connection.send("ready")
    while True:
        call, arguments = connection.recv()
        if call == "close":
            life.close()
            return
        connection.send(getattr(life, call)(*arguments))


class _Life:
    """In the engine's process."""

    def __init__(self, name: str, model: Path, tier: dict[str, Any]) -> None:
        from vllm import LLM

        extra = _SPEC | {"cpu_bytes_to_use": _CPU_TIER_BYTES, "secondary_tiers": [tier]}
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            seed=0,
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=256 << 20,
            # All that hits comes from the tiers below.
            enable_prefix_caching=False,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": name,
                "kv_connector_extra_config": extra,
            },
        )
        self._core: Any = self._llm.llm_engine.engine_core.engine_core
        self._manager: Any = self._core.scheduler.connector.connector_scheduler.manager
        self._step = self._core.step_fn
        self._core.step_fn = self._server_step

    def _server_step(self) -> Any:
        """As vLLM's server steps, which lets others run where it has nothing to compute. `LLM` does not."""
        outputs, computed = self._step()
        if not computed and self._core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, computed

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
        began_s = time.perf_counter()
        (answer,) = self._llm.generate({"prompt_token_ids": prompt}, wanted, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        (output,) = answer.outputs
        logprobs = [next(iter(step.values())).logprob for step in output.logprobs or ()]
        return Answer(list(output.token_ids), logprobs, int(answer.num_cached_tokens or 0), took_s)

    def settle(self) -> float:
        began_s = time.perf_counter()
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        (tier,) = self._manager.secondary_tiers
        if hasattr(tier, "thread"):
            tier.thread.submit(tier.thread.cache.flush(30)).result(40)
        return time.perf_counter() - began_s

    def forget_memory(self) -> None:
        self._manager.primary_tier.reset_cache()

    def close(self) -> None:
        self._core.shutdown()
