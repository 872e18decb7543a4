"""Runs real vLLM engines through lists of steps, each in a process of its own: a fork of one that has imported vLLM, which
is two thirds of what it takes to start an engine. See engines.py. With another vLLM it is a program, whose process imports
it: `python -m tests.vllm.drive`, with the arguments of `run` as a JSON list in its standard input.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETTINGS = {
    # The sampler compiles a line of its own for log-probabilities, in each process anew: 3 s on an idle machine.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

UNFINISHED = 12
"""Requests of a crowd at any time, as long as there are more."""

CONNECTOR = {
    "kv_connector": "TierCacheConnector",
    "kv_connector_module_path": "tiercache.integrations.vllm",
    "kv_role": "kv_both",
}


def cache_thread() -> Any:
    """The connector's cache, when its worker lives in this process."""
    from tiercache.integrations.vllm import lookup

    (server,) = lookup.local.values()
    return server.thread


def on_loop(thread: Any, function: Callable[[], Any]) -> Any:
    """Call `function` on the loop of a cache's thread and return its result."""

    async def call() -> Any:
        return function()

    return thread.submit(call()).result(30)


def chunk_files(directory: str) -> list[Path]:
    return sorted(path for path in Path(directory).glob("tiercache-chunks/??/*") if path.is_file())


def in_worker(worker: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    """Called in the process of a worker: what a step of that name does with the cache and the KV that are there."""
    if name == "kv_digests":
        return kv_digests(worker.model_runner.kv_caches)
    step: Callable[..., Any] = getattr(Driver, name)
    return step(None, *arguments)


def kv_digests(tensors: list[Any]) -> list[tuple[int, int, str]]:
    """Layer, head and digest of each part of each block that has anything in it, sorted."""
    import torch

    found = []
    for layer, tensor in enumerate(tensors):
        for block in tensor.flatten(1).any(1).nonzero().flatten().tolist():
            for head in range(tensor.shape[1]):
                content = tensor[block, head].contiguous().view(torch.uint8).numpy().tobytes()
                found.append((layer, head, hashlib.blake2b(content, digest_size=8).hexdigest()))
    return sorted(found)


def fail_forward(worker: Any, number: int) -> None:
    """Called in the process of a worker: the forward pass of that number from now on, counted from 0, raises an error."""
    runner, numbers = worker.model_runner, itertools.count()
    forward = runner._model_forward

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == number:
            raise RuntimeError("no memory for a forward pass")
        return forward(*arguments, **named)

    runner._model_forward = failing


def fork_workers() -> None:
    """vLLM's CPU platform has processes spawned, each of which imports all of it again, for 18 s of a core."""
    from vllm.v1.engine import coordinator
    from vllm.v1.engine import utils as engine_utils
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, engine_utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def described(answer: Any) -> dict[str, Any]:
    (output,) = answer.outputs
    return {
        "text": output.text,
        "tokens": list(output.token_ids),
        "logprobs": [next(iter(step.values())).logprob for step in output.logprobs],
        "cached": answer.num_cached_tokens,
        "prompt_tokens": len(answer.prompt_token_ids),
        "kv_transfer_params": answer.kv_transfer_params,
    }


def described_all(answer: Any) -> dict[str, Any]:
    """Describe each of a request's outputs."""
    logprobs = [
        [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)] for one in answer.outputs
    ]
    return {"tokens": [list(one.token_ids) for one in answer.outputs], "logprobs": logprobs}


def settings_of(engine: dict[str, Any]) -> dict[str, Any]:
    settings = dict(engine)
    extra = settings.pop("tiercache", None)
    role = settings.pop("kv_role", CONNECTOR["kv_role"])
    if extra is not None:
        settings["kv_transfer_config"] = {**CONNECTOR, "kv_role": role, "kv_connector_extra_config": extra}
    if (events := settings.get("kv_events_config")) is not None:
        from vllm.config import KVEventsConfig

        settings["kv_events_config"] = KVEventsConfig(**events)
    ours = {"max_model_len": 4096, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True, "dtype": "float32"}
    return ours | {"seed": 0} | settings


class Driver:
    """In float32: without a CPU that multiplies bfloat16, an answer in it takes four times as long."""

    def __init__(self, engine: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**settings_of(engine))

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @contextlib.contextmanager
    def preemptions(self) -> Iterator[list[str]]:
        """Yield a list of the requests that have to give their blocks away meanwhile."""
        scheduler, preempt, preempted = self.scheduler, self.scheduler._preempt_request, []

        def counting(request: Any, *arguments: Any, **named: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *arguments, **named)

        scheduler._preempt_request = counting
        yield preempted
        scheduler._preempt_request = preempt

    def generate(self, prompts: list[Any], tokens: int = 12, ignore_eos: bool = False) -> list[dict[str, Any]]:
        # One after the other: how requests share a step changes their results in the fifth digit.
        return [self._ask(prompt, max_tokens=tokens, ignore_eos=ignore_eos) for prompt in prompts]

    def _ask(self, prompt: Any, lora_request: Any = None, **sampling: Any) -> dict[str, Any]:
        """One request. A prompt is text or vLLM's object."""
        from vllm import SamplingParams

        wanted = SamplingParams(**({"max_tokens": 12, "temperature": 0, "logprobs": 0} | sampling))
        (answer,) = self.llm.generate(prompt, wanted, lora_request=lora_request, use_tqdm=False)
        return described(answer)

    def generate_failing(self, prompt: Any, number: int) -> str:
        """Ask while the forward pass of that number raises an error; what the caller is told."""
        self.llm.collective_rpc(fail_forward, args=(number,))
        try:
            return str(self.generate([prompt]))
        except RuntimeError as error:
            return str(error)

    def generate_adapted(self, prompt: str, name: str, path: str) -> dict[str, Any]:
        """Ask with the LoRA adapter that lies at `path`."""
        from vllm.lora.request import LoRARequest

        return self._ask(prompt, LoRARequest(name, 1, path))

    def generate_structured(self, prompt: str, structure: dict[str, Any], tokens: int) -> dict[str, Any]:
        """Ask for an answer of a form: a field of vLLM's StructuredOutputsParams."""
        from vllm.sampling_params import StructuredOutputsParams

        return self._ask(prompt, max_tokens=tokens, structured_outputs=StructuredOutputsParams(**structure))

    def generate_seeing(self, text: str, image: int) -> dict[str, Any]:
        """Ask with an image of noise, which its number decides."""
        from PIL import Image

        seen = Image.frombytes("RGB", (56, 56), random.Random(image).randbytes(3 * 56 * 56))
        return self._ask({"prompt": text, "multi_modal_data": {"image": seen}})

    def generate_saying(
        self, prompt: Any, parameters: dict[str, Any], cache_salt: str | None = None, tokens: int = 12
    ) -> dict[str, Any]:
        """Ask with `kv_transfer_params`, as the OpenAI server would pass them on."""
        given = dict(prompt) if isinstance(prompt, dict) else {"prompt": prompt}
        given |= {"cache_salt": cache_salt} if cache_salt else {}
        return self._ask(given, max_tokens=tokens, extra_args={"kv_transfer_params": parameters})

    def beam_search(self, prompt: str, width: int, tokens: int) -> list[dict[str, Any]]:
        """The beams, the best first. Each token of each beam is a request of its own."""
        from vllm.sampling_params import BeamSearchParams

        wanted = BeamSearchParams(beam_width=width, max_tokens=tokens)
        (answer,) = self.llm.beam_search([{"prompt": prompt}], wanted, use_tqdm=False)
        return [{"tokens": list(beam.tokens), "logprob": beam.cum_logprob} for beam in answer.sequences]

    def control(self, path: str, command: str, fields: dict[str, Any], prompt: str | None = None) -> dict[str, Any]:
        """Tell the cache something through its control socket, as another program would; `prompt` becomes token ids."""
        from tiercache.control.client import ask
        from tiercache.control.messages import COMMANDS

        if prompt is not None:
            fields = fields | {"tokens": self.llm.get_tokenizer()(prompt)["input_ids"]}
        return asyncio.run(ask(Path(path), COMMANDS[command](**fields)))

    def control_until(self, path: str, expected: dict[str, Any]) -> dict[str, Any]:
        """The cache's statistics once they show `expected`, at any depth; what they show after 30 s otherwise."""

        def shows(found: Any, wanted: Any) -> bool:
            if not isinstance(wanted, dict):
                return bool(found == wanted)
            return all(shows(found[name], one) for name, one in wanted.items())

        until_s = time.monotonic() + 30.0
        while True:
            found = self.control(path, "statistics", {})
            if shows(found, expected) or time.monotonic() > until_s:
                return found

    def idle(self) -> None:
        """The steps that a server takes after the last answer, and `LLM.generate` does not."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()

    def on_workers(self, name: str, *arguments: Any) -> list[Any]:
        """The step `name` in the process of each worker; what it returns, by rank."""
        return list(self.llm.collective_rpc(in_worker, args=(name, arguments)))

    def lose_tail(self, rank: int) -> int:
        """The cache of that rank's worker forgets the shortest chunk that it has; how many this worker's then has."""
        from tiercache.integrations.vllm import lookup

        ((_, here),) = lookup.local
        thread = cache_thread()
        sizes = on_loop(thread, lambda: {key: one.payload_bytes for key, one in thread.cache.cpu._entries.items()})
        if here == rank:
            thread.submit(thread.cache.forget([min(sizes, key=sizes.__getitem__)])).result(30)
        return int(on_loop(thread, lambda: len(thread.cache.cpu._entries)))

    def flush(self) -> bool:
        """Until all that the engine's steps have stored by now is in the cache, and from there in its tiers."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        concurrent.futures.wait(list(get_kv_transfer_group()._worker._storing), 30)
        thread = cache_thread()
        return bool(thread.submit(thread.cache.flush(30)).result(40).complete)

    def scanned(self) -> bool:
        """Waits until the tiers know what an earlier process left them."""
        thread = cache_thread()

        async def scan() -> bool:
            for tier in thread.cache.tiers:
                if hasattr(tier, "scanned"):  # servers know what they have
                    await tier.scanned()
            return True

        return bool(thread.submit(scan()).result(30))

    def loads_always(self) -> None:
        """As long as nobody knows how quick the engine is, all that is found is loaded. A tiny one beats a disk."""
        self.scheduler.connector._scheduler._prefill.news = lambda: None

    def clear_hot(self) -> int:
        thread = cache_thread()
        return int(on_loop(thread, thread.cache.clear_hot))

    def corrupt_hot(self) -> int:
        """Reverse the bytes of every hot chunk: wrong KV that nothing can notice. The negative control."""
        thread = cache_thread()

        def corrupt() -> int:
            cpu = thread.cache.cpu
            for entry in cpu._entries.values():
                payload = cpu.pool.view(entry.slot, entry.payload_bytes)
                payload[:] = payload[::-1].copy()
            return len(cpu._entries)

        return int(on_loop(thread, corrupt))

    def layout(self) -> dict[str, Any]:
        """What the bytes of a chunk mean, by field, and the fingerprint of that."""
        layout = cache_thread().cache.layout
        return dataclasses.asdict(layout) | {"fingerprint": layout.fingerprint.hex()}

    def crowd(
        self, prompts: list[list[int]], requests: list[dict[str, Any]], happenings: dict[str, list[Any]]
    ) -> dict[str, Any]:
        """Many requests of many kinds, `UNFINISHED` at a time, in their order. A request: {"prompt": position, "tokens": so
        many, "kind": name, "abort": after so many steps}. `happenings`: number of a step -> what is done after it."""
        engine = self.llm.llm_engine
        answers: dict[str, Any] = {}
        happened: set[str] = set()
        waiting = list(enumerate(requests))[::-1]
        unfinished: dict[str, float] = {}  # and the step after which each is given up
        steps = aborted = 0
        with self.preemptions() as preempted:
            while waiting or unfinished:
                while waiting and len(unfinished) < UNFINISHED:
                    number, request = waiting.pop()
                    self._begin(f"r{number}", prompts[request["prompt"]], request)
                    unfinished[f"r{number}"] = steps + (request.get("abort") or math.inf)
                for answer in engine.step():
                    if answer.finished:
                        answers[answer.request_id] = described_all(answer)
                        del unfinished[answer.request_id]
                steps += 1
                for name in [name for name, until in unfinished.items() if until <= steps]:
                    engine.abort_request([name])
                    del unfinished[name]
                    aborted += 1
                if (happening := happenings.get(str(steps))) is not None:
                    happened.add(happening[0])
                    getattr(self, happening[0])(*happening[1:])
        return {"answers": answers, "aborted": aborted, "preempted": len(preempted), "happened": sorted(happened)}

    def _begin(self, name: str, tokens: list[int], request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted: dict[str, Any] = {"max_tokens": request["tokens"], "temperature": 0, "ignore_eos": True, "logprobs": 1}
        wanted["output_kind"] = RequestOutputKind.FINAL_ONLY
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        match request["kind"]:
            case "two":
                wanted |= {"n": 2, "temperature": 1.0, "top_p": 1e-6}
            case "salted":
                prompt["cache_salt"] = f"salt {request['prompt'] % 3}"
            case "prompt logprobs":
                wanted["prompt_logprobs"] = 1
        priority = -1 if request["kind"] == "urgent" else 0
        self.llm.llm_engine.add_request(name, prompt, SamplingParams(**wanted), priority=priority)

    def preempt(self) -> None:
        with contextlib.suppress(RuntimeError):  # blocks that are still being saved cannot be reset
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def change_weights(self) -> None:
        """Tell the connector that the weights have changed."""
        self.scheduler.connector.reset_cache()

    def generate_traced(self, prompt: list[int], headers: dict[str, str] | None) -> list[dict[str, Any]]:
        """What the cache's own tracer was told meanwhile, as an exporter gets it."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from vllm import SamplingParams

        if not isinstance(trace.get_tracer_provider(), TracerProvider):
            trace.set_tracer_provider(TracerProvider())
        exporter = InMemorySpanExporter()
        provider: Any = trace.get_tracer_provider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        engine = self.llm.llm_engine
        wanted = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        engine.add_request(f"traced-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, wanted, trace_headers=headers)
        while engine.has_unfinished_requests():
            engine.step()
        self.idle()
        self.flush()
        return [
            {
                "name": span.name,
                "trace": f"{span.context.trace_id:032x}",
                "parent": f"{span.parent.span_id:016x}",
                "seconds": (span.end_time - span.start_time) / 1e9,
                "attributes": dict(span.attributes),
            }
            for span in exporter.get_finished_spans()
            if span.name.startswith("tiercache.")
        ]

    def left_behind(self) -> dict[str, int]:
        """What is still held when nothing is to be done any more: blocks, leases, slots, requests."""
        from tiercache.integrations.vllm.lookup import local
        from tiercache.memory.slots import Purpose

        self.idle()
        self.flush()
        (server,) = local.values()
        scheduler = self.scheduler
        side, pool = scheduler.connector._scheduler, scheduler.kv_cache_manager.block_pool

        def held() -> list[int]:
            return [len(server.claims.leases), *server.thread.cache.cpu.budget.held]

        claims, *leases = on_loop(server.thread, held)
        prefetched = leases.pop(Purpose.PREFETCH)
        return {
            "claims": claims,
            "leases": sum(leases),
            "prefetched": prefetched,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(scheduler.requests) + len(side._requests) + len(side._finishing),
        }

    def statistics(self) -> dict[str, Any]:
        thread = cache_thread()
        return dict(on_loop(thread, lambda: thread.cache.statistics().to_dict()))

    def damage_files(self, directory: str, kind: str, every: int) -> int:
        """Flip a bit of, or truncate, every n-th chunk file."""
        files = chunk_files(directory)[::every]
        damaged = 0
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # one that was damaged before, and was found out just now
                if kind == "truncate":
                    os.truncate(path, path.stat().st_size // 2)
                else:
                    with path.open("r+b") as file:
                        file.seek(4096 + 1000)
                        (byte,) = file.read(1)
                        file.seek(4096 + 1000)
                        file.write(bytes([byte ^ 4]))
                damaged += 1
        return damaged

    def remove_files(self, directory: str) -> int:
        """Every chunk file, behind the tier's back."""
        files = chunk_files(directory)
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def remove_elsewhere(self, directory: str) -> list[str]:
        """Another process opens the directory and removes every second chunk. The chunks that are left, and known to be: by
        name of their files."""
        code = (
            "import asyncio, pathlib, sys\n"
            "from tiercache.tiers.disk import DiskTier\n"
            "from tiercache.tiers.files.directories import FileSettings\n"
            "async def main():\n"
            "    tier = DiskTier(FileSettings((pathlib.Path(sys.argv[1]),), 2**40), b'f' * 16)\n"
            "    await tier.open()\n"
            "    await tier.scanned()\n"
            "    for name in sys.argv[2:]:\n"
            "        await tier.remove(bytes.fromhex(name))\n"
            "    await tier.close()\n"
            "asyncio.run(main())\n"
        )
        names = [path.name for path in chunk_files(directory)[::2]]
        subprocess.run([sys.executable, "-c", code, directory, *names], check=True, timeout=120)
        return self.known_files(directory)

    def _offloading(self) -> Any:
        """The manager of vLLM's own offloading."""
        return self.scheduler.connector.connector_scheduler.manager

    def settle_offloading(self) -> bool:
        """Until all that was computed is in vLLM's CPU tier, and in every tier below."""
        self.idle()
        (tier,) = self._offloading().secondary_tiers
        return bool(tier.thread.submit(tier.thread.cache.flush(30)).result(40).complete)

    def forget_offloaded_memory(self) -> int:
        """vLLM's CPU tier and our hot cache are empty; how many chunks left that."""
        manager = self._offloading()
        manager.primary_tier.reset_cache()
        thread = manager.secondary_tiers[0].thread
        return int(on_loop(thread, thread.cache.clear_hot))

    def corrupt_offloaded(self) -> int:
        """Reverse all of vLLM's CPU tier: wrong KV that nothing can notice. The negative control."""
        import numpy as np

        rows = np.asarray(self._offloading().primary_tier.get_kv_memoryview())
        for row in rows:
            row[:] = row[::-1].copy()
        return len(rows)

    def known_files(self, directory: str) -> list[str]:
        """The chunk files, once the tier knows of exactly these; or after 10 s."""
        until_s = time.monotonic() + 10.0
        while True:
            files = [path.name for path in chunk_files(directory)]
            if self.statistics()["tiers"]["disk"]["resident"] == len(files) or time.monotonic() > until_s:
                return files

    def namespace(self) -> str:
        """What chunk keys are made with, besides the engine's hashes."""
        return str(cache_thread().cache.namespace.hex())

    def now(self) -> float:
        return time.time()

    def reset_prefix_cache(self, connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def close(self) -> bool:
        self.llm.llm_engine.engine_core.shutdown()
        return True


class SideBySide(Driver):
    """Several engines, each with a process of its own, behind one front end (data parallelism). Caches are not in here:
    only steps that ask an engine or a control socket work."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start(settings_of(engine)))

    async def _start(self, settings: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    def generate_on(self, rank: int, prompt: dict[str, Any], tokens: int) -> dict[str, Any]:
        """By the engine of that number."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)

        async def generate() -> Any:
            answers = self.llm.generate(prompt, wanted, f"request-{time.monotonic_ns()}", data_parallel_rank=rank)
            return [one async for one in answers][-1]

        return described(self._loop.run_until_complete(generate()))

    def close(self) -> bool:
        self.llm.shutdown()
        return True


def run(engine: dict[str, Any], steps: list[list[Any]], environment: dict[str, str], log: str, answers: str) -> None:
    """Run an engine in this process, which is there for it alone, and write the answers to the file `answers`, as JSON.

    The environment becomes `environment`, and the file `log` gets all that is printed.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
    os.environ.clear()
    os.environ.update(environment | SETTINGS)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(said, number)
    fork_workers()
    driver = SideBySide(engine) if "data_parallel_size" in engine else Driver(engine)
    found = []
    for name, *arguments in steps:
        step: Callable[..., Any] = getattr(driver, name)
        if "flush" in (name, *arguments[:1]):
            driver.idle()  # some of what was computed is stored in the step after the last answer
        found.append(step(*arguments))
    driver.close()
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    run(*json.load(sys.stdin))
