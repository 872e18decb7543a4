"""Run real vLLM engines through lists of steps, each in a process of its own. Used by engines.py.

This process imports vLLM and forks for every line that it reads, {"engine": {...}, "steps": [[name, ...], ...],
"environment": {...}, "stdout": path, "stderr": path}: the import is two thirds of what it takes to start an engine. It
writes the fork's number, and at its end a line with its exit status. The fork writes one JSON list of answers as the last
line of its output.
"""

import asyncio
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.renderers.hf",
    "tiercache.integrations.vllm",
)
"""What an engine would import while it starts. It must start no thread: a fork would have only its locks."""

CONNECTOR = {
    "kv_connector": "TierCacheConnector",
    "kv_connector_module_path": "tiercache.integrations.vllm",
    "kv_role": "kv_both",
}


def cache_thread() -> Any:
    """The connector's cache, when its worker lives in this process."""
    from tiercache.integrations.vllm import lookup

    (server,) = lookup._local.values()
    return server.thread


class Driver:
    """In float32: without a CPU that multiplies bfloat16, an answer in it takes four times as long."""

    def __init__(self, engine: dict[str, Any]) -> None:
        from vllm import LLM

        settings = dict(engine)
        extra = settings.pop("tiercache", None)
        if extra is not None:
            settings["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": extra}
        ours = {"max_model_len": 4096, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True, "dtype": "float32"}
        self.llm = LLM(**(ours | {"seed": 0} | settings))

    def generate(self, prompts: list[str], tokens: int = 12) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0)
        # One after the other: how requests share a step changes their results in the fifth digit.
        answers = [self.llm.generate(prompt, wanted, use_tqdm=False)[0] for prompt in prompts]
        return [
            {
                "text": answer.outputs[0].text,
                "tokens": list(answer.outputs[0].token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in answer.outputs[0].logprobs],
                "cached": answer.num_cached_tokens,
                "prompt_tokens": len(answer.prompt_token_ids),
            }
            for answer in answers
        ]

    def generate_adapted(self, prompt: str, name: str, path: str, tokens: int = 12) -> dict[str, Any]:
        """One request with the LoRA adapter that lies at `path`."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        wanted = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0)
        (answer,) = self.llm.generate(prompt, wanted, lora_request=LoRARequest(name, 1, path), use_tqdm=False)
        return {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [next(iter(step.values())).logprob for step in answer.outputs[0].logprobs],
            "cached": answer.num_cached_tokens,
        }

    def generate_saying(
        self, prompt: str, parameters: dict[str, Any], cache_salt: str | None = None, tokens: int = 12
    ) -> dict[str, Any]:
        """One request with `kv_transfer_params`, as the OpenAI server would pass them on."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            max_tokens=tokens, temperature=0, logprobs=0, extra_args={"kv_transfer_params": parameters}
        )
        given: Any = {"prompt": prompt, **({"cache_salt": cache_salt} if cache_salt else {})}
        (answer,) = self.llm.generate(given, wanted, use_tqdm=False)
        return {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [next(iter(step.values())).logprob for step in answer.outputs[0].logprobs],
            "cached": answer.num_cached_tokens,
            "prompt_tokens": len(answer.prompt_token_ids),
        }

    def control(self, path: str, command: str, fields: dict[str, Any], prompt: str | None = None) -> dict[str, Any]:
        """Tell the cache something through its control socket, as another program would; `prompt` becomes token ids."""
        from tiercache.control.client import ask
        from tiercache.control.messages import COMMANDS

        if prompt is not None:
            fields = fields | {"tokens": self.llm.get_tokenizer()(prompt)["input_ids"]}
        return asyncio.run(ask(Path(path), COMMANDS[command](**fields)))

    def control_until(self, path: str, expected: dict[str, Any]) -> dict[str, Any]:
        """The cache's statistics once they show `expected`; what they show after 10 s otherwise."""
        until_s = time.monotonic() + 10.0
        while True:
            found = self.control(path, "statistics", {})
            if expected.items() <= found.items() or time.monotonic() > until_s:
                return found

    def first_token_s(self, prompt: str) -> float:
        from vllm import SamplingParams

        began_s = time.perf_counter()
        self.llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        return time.perf_counter() - began_s

    def cold_files(self, directory: str) -> int:
        """Nothing of the chunk files stays in the page cache; returns how many there are."""
        files = [path for path in Path(directory).glob("??/*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(files)

    def idle(self) -> int:
        """The steps that a server takes after the last answer, and `LLM.generate` does not."""
        core = self.llm.llm_engine.engine_core.engine_core
        steps = 0
        while core.scheduler.has_requests():
            core.step_fn()
            steps += 1
        return steps

    def generate_together(self, prompts: list[str], tokens: int) -> dict[str, Any]:
        """Many requests at once, to their full length; and how often one had to give its blocks away."""
        from vllm import SamplingParams

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def counting(request: Any, *arguments: Any, **named: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *arguments, **named)

        scheduler._preempt_request = counting
        wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        answers = self.llm.generate(prompts, wanted, use_tqdm=False)
        scheduler._preempt_request = preempt
        return {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "cached": [answer.num_cached_tokens for answer in answers],
            "preempted": len(preempted),
        }

    def reset_everything(self) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def flush(self) -> bool:
        thread = cache_thread()
        return bool(thread.submit(thread.cache.flush(30)).result(40).complete)

    def scanned(self) -> bool:
        """Waits until the tiers know what an earlier process left them."""
        thread = cache_thread()

        async def scan() -> bool:
            for tier in thread.cache.tiers:
                await tier.scanned()
            return True

        return bool(thread.submit(scan()).result(30))

    def clear_hot(self) -> int:
        thread = cache_thread()

        async def clear() -> int:
            return int(thread.cache.clear_hot())

        return int(thread.submit(clear()).result(10))

    def corrupt_hot(self) -> int:
        """Reverse the bytes of every hot chunk: wrong KV that nothing can notice. The negative control."""
        thread = cache_thread()

        async def corrupt() -> int:
            cpu = thread.cache.cpu
            for entry in cpu._entries.values():
                payload = cpu.pool.view(entry.slot, entry.payload_bytes)
                payload[:] = payload[::-1].copy()
            return len(cpu._entries)

        return int(thread.submit(corrupt()).result(30))

    def layout(self) -> dict[str, Any]:
        """What the bytes of a chunk mean, by field, and the fingerprint of that."""
        layout = cache_thread().cache.layout
        return dataclasses.asdict(layout) | {"fingerprint": layout.fingerprint.hex()}

    def statistics(self) -> dict[str, Any]:
        thread = cache_thread()

        async def snapshot() -> dict[str, Any]:
            found: dict[str, Any] = thread.cache.statistics().to_dict()
            return found

        return dict(thread.submit(snapshot()).result(10))

    def damage_files(self, directory: str, kind: str, every: int) -> int:
        """Flip a bit of, or truncate, every n-th chunk file."""
        files = sorted(path for path in Path(directory).glob("??/*") if path.is_file())[::every]
        for path in files:
            if kind == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            else:
                with path.open("r+b") as file:
                    file.seek(4096 + 1000)
                    (byte,) = file.read(1)
                    file.seek(4096 + 1000)
                    file.write(bytes([byte ^ 4]))
        return len(files)

    def remove_files(self, directory: str) -> int:
        """Every chunk file, behind the tier's back."""
        files = [path for path in Path(directory).glob("??/*") if path.is_file()]
        for path in files:
            path.unlink()
        return len(files)

    def reset_prefix_cache(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def close(self) -> bool:
        self.llm.llm_engine.engine_core.shutdown()
        return True


def drive(engine: dict[str, Any], steps: list[list[Any]]) -> None:
    driver = Driver(engine)
    answers = []
    for name, *arguments in steps:
        step: Callable[..., Any] = getattr(driver, name)
        answers.append(step(*arguments))
    driver.close()
    print("\n" + json.dumps(answers), flush=True)


def become(environment: dict[str, str], stdout: str, stderr: str) -> None:
    """What a new process with these would be."""
    os.environ.clear()
    os.environ.update(environment | SETTINGS)
    sys.path[1:1] = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    opened = os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_CREAT) for path in (stdout, stderr))
    for number, descriptor in enumerate(opened):
        os.dup2(descriptor, number)
        os.close(descriptor)


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    end_with_parent()
    replies = os.dup(1)
    os.set_inheritable(replies, False)
    os.dup2(2, 1)  # what libraries say
    os.environ.update(SETTINGS)
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        task = json.loads(line)
        if (child := os.fork()) == 0:
            os.close(replies)
            end_with_parent()
            become(task["environment"], task["stdout"], task["stderr"])
            return drive(task["engine"], task["steps"])
        os.write(replies, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(replies, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
