"""`python -m tests.bench.vllm.rolling`: two servers with one directory are restarted one after the other, under load.

Requests come at a steady rate and go to both servers in turn. A server whose `/health` does not answer gets none, as
behind a load balancer, and neither does one that is about to be stopped. A server gets SIGTERM as from a container's
runtime, ends its requests, and is started again. Each has a core of its own, so that the start of one takes nothing from
the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.bench.vllm.clients import ask_one
from tests.bench.vllm.installed import require_installed
from tests.bench.vllm.workload import BLOCK_TOKENS, Ask
from tiercache.commands.findings import complain
from tiercache.demo.model import ModelFailed, prepare_model
from tiercache.demo.server import Server, ServerFailed, group_lives, serving
from tiercache.signals import ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CONFIG = """\
chunk_size: {block_tokens}
max_local_cpu_size: 0.25
local_disk: "{directory}"
max_local_disk_size: 3.0
preload: recent
"""
_DOCUMENTS, _DOCUMENT_TOKENS = 6, 6 * BLOCK_TOKENS
_SESSIONS, _TURNS, _TURN_TOKENS = 6, 8, 64
_ANSWER_TOKENS = 4
_LONGEST_TOKENS = 2048
_SHUTDOWN_S = 45
_LOOK_S = 0.25
_WINDOW_S = 10.0
_BACK_S = 60.0
"""A server is to have its hit rate again in this time."""
STEADY, RESTARTS, AFTER = PHASES = ("before", "restarts", "after")


@dataclass(frozen=True)
class Sample:
    """A request: `at_s` from the beginning, `ttft_s` None if it failed."""

    at_s: float
    phase: str
    server: str
    ttft_s: float | None
    prompt_tokens: int
    hit_tokens: int


@dataclass(eq=False)
class Backend:
    """A server, and the balancer's view of it."""

    name: str
    core: int
    place: Path
    stack: ExitStack
    server: Server | None = None
    in_rotation: bool = False

    async def start(self, model: Path, directory: Path) -> None:
        """Return when it is healthy. Its processes keep to its core."""
        self.server = await asyncio.to_thread(self._start, model, directory)

    def _start(self, model: Path, directory: Path) -> Server:
        self.place.mkdir(exist_ok=True)
        config = self.place / "tiercache.yaml"
        config.write_text(_CONFIG.format(block_tokens=BLOCK_TOKENS, directory=directory))
        arguments = [
            *("--max-model-len", str(_LONGEST_TOKENS), "--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", "48", "--shutdown-timeout", str(_SHUTDOWN_S)),
        ]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": str(self.core)}
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.core})  # of this thread, which the server inherits
        try:
            log = self.place / f"server-{time.time():.0f}.log"
            return self.stack.enter_context(serving(model, log, config, arguments=arguments, environment=environment))
        finally:
            os.sched_setaffinity(0, before)

    async def stop(self) -> None:
        """Send SIGTERM to the server's first process, as a container's runtime does, and wait until all have ended."""
        self.in_rotation = False
        server, self.server = self.server, None
        assert server is not None
        os.kill(server.group, signal.SIGTERM)
        until_s = time.monotonic() + 2 * _SHUTDOWN_S
        while group_lives(server.group):
            if time.monotonic() > until_s:
                raise server.failed("it does not end")
            await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(self.stack.close)


class Balancer:
    """Sends each request to the next server in rotation. One that refuses a connection has got nothing of a request."""

    def __init__(self, backends: Sequence[Backend], connection: httpx.AsyncClient) -> None:
        self._backends = backends
        self._connection = connection
        self._next = 0
        self.phase = STEADY
        self.samples: list[Sample] = []
        self.errors: list[str] = []
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def watch(self) -> None:
        while True:
            await asyncio.gather(*map(self._look, self._backends))
            await asyncio.sleep(_LOOK_S)

    async def _look(self, backend: Backend) -> None:
        server = backend.server
        if server is None:
            return
        try:
            answer = await self._connection.get(f"{server.url}/health", timeout=5)
            is_well = answer.status_code == httpx.codes.OK
        except httpx.HTTPError:
            is_well = False
        if backend.server is server:
            backend.in_rotation = is_well

    async def send(self, request: Ask) -> None:
        at_s, phase, name = self.now_s, self.phase, "none"
        try:
            for backend in self._candidates():
                server, name = backend.server, backend.name
                assert server is not None
                try:
                    found = await ask_one(self._connection, server, request)
                except ServerFailed as error:
                    if isinstance(error.__cause__, httpx.ConnectError):
                        backend.in_rotation = False
                        continue
                    raise
                hits = found.hit_tokens or 0
                self.samples.append(Sample(at_s, phase, name, found.ttft_s, found.prompt_tokens, hits))
                return
            raise ServerFailed("no server is in rotation")
        except ServerFailed as error:
            self.errors.append(str(error))
            self.samples.append(Sample(at_s, phase, name, None, len(request.prompt), 0))

    def _candidates(self) -> Iterator[Backend]:
        self._next += 1
        for number in range(len(self._backends)):
            backend = self._backends[(self._next + number) % len(self._backends)]
            if backend.in_rotation and backend.server is not None:
                yield backend


def conversations(seed: int) -> Iterator[Ask]:
    """Yield the next turn of one conversation after the other, without end. Each begins with one of a few documents."""
    chance = random.Random(seed)

    def piece(tokens: int) -> tuple[int, ...]:
        return tuple(chance.choices(range(1000, 40_000), k=tokens))

    documents = [piece(_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS)]
    prompts: list[tuple[int, ...]] = [()] * _SESSIONS
    turns = [chance.randrange(_TURNS) for _ in range(_SESSIONS)]
    while True:
        for number in range(_SESSIONS):
            if not prompts[number] or turns[number] == _TURNS:
                turns[number] %= _TURNS
                prompts[number] = chance.choice(documents)
            prompts[number] += piece(_TURN_TOKENS)
            turns[number] += 1
            yield Ask(prompts[number], _ANSWER_TOKENS)


async def _load(balancer: Balancer, requests: Iterator[Ask], rate: float) -> None:
    """Send at a steady rate, whatever becomes of the requests."""
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            await asyncio.sleep(max(0.0, number / rate - balancer.now_s))
            group.create_task(balancer.send(request))


async def measure(directory: Path, rate: float, steady_s: float) -> tuple[list[Sample], list[str], dict[str, float]]:
    """Return all requests, the errors, and the time at which each server was back."""
    model, back_s = prepare_model(), {}
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        backends = [
            Backend(name, cores[number % len(cores)], directory / name, stack.enter_context(ExitStack()))
            for number, name in enumerate("AB")
        ]
        for backend in backends:
            _say(f"starting {backend.name}")
            await backend.start(model, directory / "kv")
        limits = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed as a request is sent
        async with httpx.AsyncClient(timeout=300, trust_env=False, limits=limits) as connection:
            requests = conversations(0)
            warming = Balancer(backends, connection)
            for backend in backends:
                backend.in_rotation = True
            _say("filling the caches")
            for _ in range(2 * _SESSIONS * _TURNS):
                await warming.send(next(requests))
            balancer = Balancer(backends, connection)
            watching = asyncio.create_task(balancer.watch())
            loading = asyncio.create_task(_load(balancer, requests, rate))
            try:
                await asyncio.sleep(steady_s)
                balancer.phase = RESTARTS
                for backend in backends:
                    _say(f"restarting {backend.name} after {balancer.now_s:.0f} s")
                    await backend.stop()
                    await backend.start(model, directory / "kv")
                    while not backend.in_rotation:
                        await asyncio.sleep(_LOOK_S)
                    back_s[backend.name] = balancer.now_s
                    _say(f"{backend.name} is back after {balancer.now_s:.0f} s")
                    await asyncio.sleep(_BACK_S)
                balancer.phase = AFTER
                await asyncio.sleep(steady_s)
            finally:
                for task in (loading, watching):
                    task.cancel()
                await asyncio.gather(loading, watching, return_exceptions=True)
    return balancer.samples, balancer.errors, back_s


def hit_rate(samples: Sequence[Sample]) -> float:
    return sum(sample.hit_tokens for sample in samples) / max(1, sum(sample.prompt_tokens for sample in samples))


def ttft_ms(samples: Sequence[Sample], part: float) -> float:
    """Return a quantile over the requests that were answered; NaN if there are none."""
    found = sorted(sample.ttft_s for sample in samples if sample.ttft_s is not None)
    return 1e3 * found[min(len(found) - 1, int(part * len(found)))] if found else float("nan")


def findings(samples: Sequence[Sample], back_s: dict[str, float]) -> list[str]:
    """A line for each goal."""
    by_phase = {phase: [sample for sample in samples if sample.phase == phase] for phase in PHASES}
    failed = sum(sample.ttft_s is None for sample in samples)
    lines = [f"{'reached' if not failed else 'missed'}: {failed} of {len(samples)} requests failed, the goal is 0"]
    before = hit_rate(by_phase[STEADY])
    for name, time_s in back_s.items():
        recent = [one for one in samples if one.server == name and time_s <= one.at_s < time_s + _BACK_S]
        ratio = hit_rate(recent) / before if before else 0.0
        met = "reached" if ratio >= 0.95 else "missed"
        lines.append(
            f"{met}: {name}'s hit rate in its first minute is {ratio:.3f} of before, the goal is at least 0.95"
        )
    steady_ms = ttft_ms(by_phase[STEADY], 0.99)
    for phase in (RESTARTS, AFTER):
        ratio = ttft_ms(by_phase[phase], 0.99) / steady_ms
        met = "reached" if ratio <= 1.2 else "missed"
        lines.append(f"{met}: p99 TTFT, {phase}, is {ratio:.2f} times that before, the goal is at most 1.2")
    return lines


def _table(samples: Sequence[Sample]) -> Table:
    table = Table(title="by 10 s, and by phase")
    for column in ("s", "requests", "failed", "hit rate", "median TTFT ms", "p99 TTFT ms"):
        table.add_column(column, justify="right")
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        start_s = int(sample.at_s // _WINDOW_S * _WINDOW_S)
        groups.setdefault(f"{start_s} ({sample.phase})", []).append(sample)
    groups |= {phase: [sample for sample in samples if sample.phase == phase] for phase in PHASES}
    for name, group in groups.items():
        failed = sum(sample.ttft_s is None for sample in group)
        times = [sample.ttft_s for sample in group if sample.ttft_s is not None]
        median = f"{1e3 * statistics.median(times):,.0f}" if times else ""
        table.add_row(
            name, str(len(group)), str(failed), f"{hit_rate(group):.3f}", median, f"{ttft_ms(group, 0.99):,.0f}"
        )
    return table


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@app.command()
def rolling(
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second, for both servers together.")] = 0.5,
    steady_s: Annotated[float, typer.Option(min=10, help="Seconds before and after the restarts.")] = 120.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all requests to this file.")] = None,
) -> None:
    """Failed requests, hit rate and p99 time to first token while two servers are restarted in turn."""
    require_installed()
    try:
        with tempfile.TemporaryDirectory(prefix="rolling-", dir=Path.cwd()) as directory:
            samples, errors, back_s = asyncio.run(measure(Path(directory), rate, steady_s))
    except (ModelFailed, ServerFailed) as error:
        raise typer.Exit(complain(str(error))) from error
    samples.sort(key=lambda sample: sample.at_s)
    Console(width=120).print(_table(samples))
    for line in (*errors, *findings(samples, back_s)):
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps({"back_s": back_s, "samples": [asdict(one) for one in samples]}, indent=1))


if __name__ == "__main__":
    with ended_by_signals():
        app()
