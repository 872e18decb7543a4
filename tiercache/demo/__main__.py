"""Run `python -m tiercache.demo`: cold, warm from the CPU tier, from disk after a restart, and vLLM's prefix cache."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tiercache.demo.model import ModelFailed, prepare_model
from tiercache.demo.question import PROMPT_TOKENS, ask, long_message
from tiercache.demo.report import LABELS, Run, draw, problems, same_text, show, write_json
from tiercache.demo.server import Server, ServerFailed, serving
from tiercache.signals import ended_by_signals

CONFIG = """\
# Written by the demo. Keys are LMCache's; `tiercache config explain` says what each of them does.
chunk_size: 256
local_cpu: true
max_local_cpu_size: 1.0
local_disk: "{directory}"
max_local_disk_size: 2.0
"""
BLOCK_TOKENS = 128
"""Block size of vLLM on the CPU; only whole blocks are stored."""
WARM_UP = "Say hello."
_FEWEST_TOKENS, _MOST_TOKENS = 512, 8000
"""At least a few chunks; at most the limit of the server, with the answer."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tiercache.demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="length of the question")
    tokens = parser.parse_args().tokens
    if not _FEWEST_TOKENS <= tokens <= _MOST_TOKENS:
        parser.error(f"--tokens: expected {_FEWEST_TOKENS} to {_MOST_TOKENS}, found {tokens}")
    console = Console(highlight=False)
    place = Path("demo").resolve()
    place.mkdir(exist_ok=True)
    try:
        with ended_by_signals():
            runs = measure(place, tokens, console)
    except (ModelFailed, ServerFailed) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped; no server is left running")
        return 130
    console.print()
    show(runs, console)
    write_json(runs, place / "ttft.json")
    draw(runs, place / "ttft.png")
    console.print(f"written: {_short(place / 'ttft.json')}, {_short(place / 'ttft.png')}", soft_wrap=True)
    found = problems(runs)
    for problem in found:
        console.print(f"wrong: {problem}", style="red", markup=False, soft_wrap=True)
    if same_text(runs):
        console.print(
            "Every cached answer is, to the letter, the one that vLLM's own prefix cache gives at the same hit length.",
            soft_wrap=True,
        )
    return 1 if found else 0


def measure(place: Path, tokens: int, console: Console) -> dict[str, Run]:
    """Ask four times: cold, from vLLM's prefix cache, from the CPU tier, and from disk in a new process.

    vLLM's prefix cache is the reference and is emptied afterwards. It has the same KV, so a hit in tiercache must give
    exactly the same answer.
    """
    console.print("preparing the model (once, about 20 s) and the question")
    model = prepare_model(place / "model")
    message = long_message(model, tokens)
    kv = place / "kv"
    shutil.rmtree(kv, ignore_errors=True)
    config = place / "tiercache.yaml"
    config.write_text(CONFIG.format(directory=kv))
    console.print(
        f"Model, KV and logs lie in {_short(place)}/. Each server first answers one short question, "
        "so that what an engine does once is charged to no run.",
        soft_wrap=True,
    )
    runs: dict[str, Run] = {}

    def run(name: str, server: Server) -> None:
        answer = ask(server, message)
        runs[name] = Run(name, server.source_of(answer.request_id), answer)
        hit = f"{answer.hit_tokens:,} of {answer.prompt_tokens:,} tokens hit"
        console.print(f"  {LABELS[name]:26} {answer.ttft_s:8.3f} s   {hit}", soft_wrap=True)

    with _warm_server("vLLM with tiercache", model, place / "server-1.log", config, console) as server:
        run("cold", server)
        cold = runs["cold"].answer
        server.wait_for_stored(cold.request_id, cold.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        run("prefix_cache", server)
        server.forget_prefix_cache()
        run("cpu", server)
    with _warm_server("vLLM with tiercache, a new process", model, place / "server-2.log", config, console) as server:
        run("disk_restart", server)
    console.print(f"The answer: {runs['cpu'].answer.text.strip()}", style="dim", markup=False, soft_wrap=True)
    return {name: runs[name] for name in LABELS}


@contextmanager
def _warm_server(what: str, model: Path, log: Path, config: Path, console: Console) -> Iterator[Server]:
    console.print(f"starting {what} (about a minute)")
    with serving(model, log, config) as server:
        ask(server, WARM_UP, 4)
        yield server
        console.print("stopping it")


def _short(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
