"""`python -m tests.bench.vllm.soak TRACE`: a real vLLM server with tiercache under the load of a trace, for an hour.

Requests arrive at the trace's times, `speed_up` times as fast; those of one session wait for the one before. A block of
the trace becomes a few tokens that are derived from its name, so that prompts share prefixes as in the trace. Meanwhile the
server's memory, descriptors and threads are noted. Afterwards a server without any cache computes a random sample of the
answers again: tokens and log probabilities have to be the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.bench.vllm.installed import require_installed
from tests.bench.vllm.workload import BLOCK_TOKENS
from tiercache.commands.findings import complain
from tiercache.core.keys import ChunkKey
from tiercache.demo.model import ModelFailed, prepare_model
from tiercache.demo.server import MODEL_NAME, Server, ServerFailed, serving
from tiercache.replay.formats import Request, Trace, TraceError
from tiercache.signals import ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CONFIG = """\
max_local_cpu_size: 0.5
local_disk: "{directory}"
max_local_disk_size: 2.0
"""
_ENGINE_BLOCKS = 80
_SEQUENCES = 8
_LONGEST_TOKENS = 8192
_ANSWER_TOKENS = 16
_PATIENCE_S = 300.0
_LOOK_S = 5.0
_WINDOW_S = 600.0
_CHANGED = 20
"""Prompts of which another first block has to be noticed."""
TOLERANCE = 0.01
"""Of log probabilities. Sums in another order change them by less; a wrong chunk changes them by more, which is checked."""


@dataclass(frozen=True)
class Answer:
    """Token ids as vLLM names them, their log probabilities, and how far each was ahead of the second best."""

    tokens: list[str]
    logprobs: list[float]
    ahead: list[float]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Asked:
    at_s: float
    took_s: float
    prompt: array[int]
    answer: Answer


@dataclass(frozen=True)
class Look:
    """What all processes of the server held."""

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int


@dataclass
class Soak:
    asked: list[Asked] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def prompt_of(request: Request, block_tokens: int) -> array[int]:
    """Return `block_tokens` tokens for each block, at most as many as the model takes, and three of its own at the end."""
    tokens = array("i")
    for key in request.keys[: (_LONGEST_TOKENS - _ANSWER_TOKENS - 3) // block_tokens]:
        tokens.extend(_piece(key, block_tokens))
    tokens.extend(random.Random(f"{request.session} {request.time_s}").choices(range(1000, 40_000), k=3))
    return tokens


def _piece(key: ChunkKey, tokens: int) -> list[int]:
    return random.Random(key).choices(range(1000, 40_000), k=tokens)


async def ask(connection: httpx.AsyncClient, server: Server, prompt: Sequence[int]) -> Answer:
    """Raises ServerFailed."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    try:
        response = await connection.post(f"{server.url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise ServerFailed(f"vLLM did not answer: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        raise ServerFailed(f"vLLM refused: {response.status_code} {response.text}")
    return await asyncio.to_thread(_answer, response.content)


def _answer(content: bytes) -> Answer:
    found: dict[str, Any] = json.loads(content)
    said = found["choices"][0]["logprobs"]
    best = [sorted(one.values()) for one in said["top_logprobs"]]
    details = found["usage"].get("prompt_tokens_details") or {}
    ahead = [one[-1] - one[-2] for one in best]
    return Answer(said["tokens"], said["token_logprobs"], ahead, details.get("cached_tokens") or 0)


def same(answer: Answer, computed: Answer) -> bool:
    """Tell whether they agree up to the first token where two were equally good."""
    for number, (mine, right) in enumerate(zip(answer.tokens, computed.tokens, strict=True)):
        if mine != right:
            return computed.ahead[number] < TOLERANCE
        if abs(answer.logprobs[number] - computed.logprobs[number]) > TOLERANCE:
            return False
    return True


async def play(server: Server, requests: Iterable[Request], block_tokens: int, speed_up: float, seconds: float) -> Soak:
    """Send what arrives within `seconds`. A request that fails is noted as an error."""
    found, last = Soak(), dict[str | None, asyncio.Task[None]]()
    limits = httpx.Limits(max_connections=2 * _SEQUENCES)
    began_s = time.monotonic()

    async def one(request: Request, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        prompt = await asyncio.to_thread(prompt_of, request, block_tokens)
        at_s = time.monotonic() - began_s
        if at_s > seconds:
            return
        try:
            answer = await ask(connection, server, prompt)
        except ServerFailed as error:
            found.errors.append(str(error))
            return
        found.asked.append(Asked(at_s, time.monotonic() - began_s - at_s, prompt, answer))

    async def watch() -> None:
        while True:
            found.looks.append(await asyncio.to_thread(look, server, time.monotonic() - began_s))
            await asyncio.sleep(_LOOK_S)

    async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False, limits=limits) as connection:
        watching = asyncio.create_task(watch())
        try:
            async with asyncio.TaskGroup() as running:
                for request in requests:
                    at_s = request.time_s / speed_up
                    if at_s > seconds:
                        break
                    await asyncio.sleep(max(0.0, at_s - (time.monotonic() - began_s)))
                    before = last.get(request.session) if request.session is not None else None
                    last[request.session] = running.create_task(one(request, before))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return found


def look(server: Server, at_s: float) -> Look:
    """Return the sums over all processes of the server's group."""
    rss = descriptors = threads = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != server.group:
                continue
            rss += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            descriptors += len(os.listdir(process / "fd"))
            threads += len(os.listdir(process / "task"))
        except OSError:
            continue  # it ended meanwhile
    return Look(at_s, rss / 2**20, descriptors, threads)


async def judge(server: Server, asked: Sequence[Asked]) -> tuple[int, int, int]:
    """Compute answers again; return how many were wrong, and of how many prompts with another first block how many had
    another answer.
    """
    wrong = noticed = changed = 0
    async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as connection:
        for one in asked:
            computed = await ask(connection, server, one.prompt)
            wrong += not same(one.answer, computed)
            if changed == _CHANGED:
                continue
            changed += 1
            other = one.prompt[:]
            other[:BLOCK_TOKENS] = array("i", _piece(b"another", min(BLOCK_TOKENS, len(other))))
            noticed += not same(await ask(connection, server, other), computed)
    return wrong, noticed, changed


def findings(found: Soak, judged: int, wrong: int, noticed: int, changed: int) -> list[str]:
    """A line for each goal."""
    hits = sum(one.answer.cached_tokens > 0 for one in found.asked)
    lines = [
        _line(not found.errors, f"{len(found.errors)} of {len(found.errors) + len(found.asked)} requests failed"),
        _line(wrong == 0 and judged > 0, f"{wrong} of {judged} answers are wrong ({hits} requests had hits)"),
        _line(noticed == changed > 0, f"{noticed} of {changed} prompts with another first block are told apart"),
    ]
    end_s = found.looks[-1].at_s
    first = [one for one in found.looks if _WINDOW_S <= one.at_s < _WINDOW_S + 60]
    last = [one for one in found.looks if one.at_s >= end_s - 60]
    if not first or end_s < 2 * _WINDOW_S:
        return [*lines, "missed: too short to say whether anything grows"]
    for what, most in (("rss_mb", 1.02), ("descriptors", 1.0), ("threads", 1.0)):
        before, after = (statistics.median(getattr(one, what) for one in looks) for looks in (first, last))
        text = f"{what} {after:,.0f} in the last minute, {before:,.0f} after ten minutes: {after / before:.3f}"
        lines.append(_line(after / before <= most, f"{text}, the goal is at most {most:g}"))
    return lines


def _line(met: bool, text: str) -> str:
    return f"{'reached' if met else 'missed'}: {text}"


def _show(found: Soak) -> None:
    table = Table(title="by ten minutes")
    for column in ("s", "requests", "hit rate", "median s", "p99 s", "RSS MB", "descriptors", "threads"):
        table.add_column(column, justify="right")
    for start_s in range(0, int(found.looks[-1].at_s), int(_WINDOW_S)):
        asked = [one for one in found.asked if start_s <= one.at_s < start_s + _WINDOW_S]
        looks = [one for one in found.looks if start_s <= one.at_s < start_s + _WINDOW_S]
        if not asked or not looks:
            continue
        took = sorted(one.took_s for one in asked)
        hits = sum(one.answer.cached_tokens for one in asked) / sum(len(one.prompt) for one in asked)
        held = ([x.rss_mb for x in looks], [x.descriptors for x in looks], [x.threads for x in looks])
        table.add_row(
            str(start_s),
            str(len(asked)),
            f"{hits:.3f}",
            f"{statistics.median(took):.2f}",
            f"{took[int(0.99 * len(took))]:.2f}",
            *(f"{min(one):,.0f} to {max(one):,.0f}" for one in held),
        )
    Console(width=120).print(table)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _start(model: Path, place: Path, name: str, config: str | None, more: Sequence[str] = ()) -> Any:
    """Return the context of a server, which has no connector without `config`."""
    file = None
    if config is not None:
        file = place / "tiercache.yaml"
        file.write_text(config)
    arguments = [
        *("--max-model-len", str(_LONGEST_TOKENS), "--max-num-seqs", str(_SEQUENCES), "--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(_ENGINE_BLOCKS)),
        *more,
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # oneDNN keeps the matrix multiplications of the last 1,024 shapes, about 0.8 MB each, and vLLM needs four for
        # each number of tokens in a step: that alone grows for an hour. vLLM itself keeps those of 32 numbers.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }
    return serving(model, place / f"{name}.log", file, arguments=arguments, environment=environment)


@app.command()
def soak(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A trace, as for `tiercache replay`.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="How long requests are sent.")] = 60.0,
    speed_up: Annotated[float, typer.Option(min=0.01, help="How many times as fast as in the trace.")] = 1.0,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each block of the trace.")] = 1,
    session_interval_s: Annotated[float, typer.Option(min=0, help="Between the starts of agentic sessions.")] = 0.0,
    judged: Annotated[int, typer.Option(min=1, help="How many answers are computed again.")] = 200,
    alone: Annotated[bool, typer.Option("--alone", help="vLLM without tiercache: what its own memory does.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all looks to this file.")] = None,
) -> None:
    """Wrong answers, failed requests, and whether memory, descriptors and threads grow."""
    require_installed()
    requests = Trace(trace, strict=True, session_interval_s=session_interval_s, repeat=1000)
    try:
        model = prepare_model()
        with tempfile.TemporaryDirectory(prefix="soak-", dir=Path.cwd()) as directory:
            place = Path(directory)
            config = None if alone else _CONFIG.format(directory=place / "kv")
            _say(f"starting vLLM {'alone' if alone else 'with tiercache'}")
            with _start(model, place, "server", config) as server:
                found = asyncio.run(play(server, requests, block_tokens, speed_up, 60 * minutes))
            if not found.asked:
                raise typer.Exit(complain(f"no request was answered: {found.errors[:1]}"))
            log = (place / "server.log").read_text(errors="replace").splitlines()
            _show(found)
            chosen = random.Random(0).sample(found.asked, min(judged, len(found.asked)))
            _say(f"computing {len(chosen)} answers again")
            with _start(model, place, "judge", None, ["--no-enable-prefix-caching"]) as server:
                judgement = asyncio.run(judge(server, chosen))
    except (ModelFailed, ServerFailed, TraceError) as error:
        raise typer.Exit(complain(str(error))) from error
    warnings = [line for line in log if "tiercache" in line and ("WARNING" in line or "ERROR" in line)]
    for line in chain(found.errors[:5], warnings[:20], findings(found, len(chosen), *judgement)):
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps([vars(one) for one in found.looks], indent=1))


if __name__ == "__main__":
    with ended_by_signals():
        app()
