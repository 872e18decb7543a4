"""`python -m tiercache.demo`: cold, warm from the CPU tier, warm from disk after a restart, and vLLM's own prefix cache."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

from tiercache.demo.model import prepare_model
from tiercache.demo.question import Answer, ask, long_message
from tiercache.demo.report import LABELS, Run, draw, problems, same_text, show, write_json
from tiercache.demo.server import Server, ServerFailed, serving

CONFIG = """\
# Written by the demo. Keys are LMCache's; `tiercache config explain` says what each of them does.
chunk_size: 256
save_unfull_chunk: true
local_cpu: true
max_local_cpu_size: 1.0
local_disk: "{directory}"
max_local_disk_size: 2.0
"""
WARM_UP = "Say hello."


def main() -> int:
    console = Console(highlight=False)
    place = Path("demo").resolve()
    place.mkdir(exist_ok=True)
    try:
        runs = measure(place, console)
    except ServerFailed as error:
        console.print(f"[red]{error}[/red]", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped; no server is left running")
        return 130
    console.print()
    show(runs, console)
    write_json(runs, place / "ttft.json")
    draw(runs, place / "ttft.png")
    console.print(f"written: {_short(place / 'ttft.json')}, {_short(place / 'ttft.png')}")
    found = problems(runs)
    for problem in found:
        console.print(f"[red]wrong:[/red] {problem}", soft_wrap=True)
    if same_text(runs):
        console.print("Every cached answer is, to the letter, the one that vLLM's own prefix cache gives.")
    return 1 if found else 0


def measure(place: Path, console: Console) -> dict[str, Run]:
    """Ask four times: cold; from vLLM's own prefix cache, the reference; from our CPU tier, once vLLM's is emptied; and from
    disk, in a new process. The reference is made of the same KV, so a hit of ours must give the same answer to the letter.
    """
    with console.status("preparing the model (once, about 20 s)"):
        model = prepare_model(place / "model")
    with console.status("cutting the prompt"):
        message = long_message(model)
    kv = place / "kv"
    shutil.rmtree(kv, ignore_errors=True)
    config = place / "tiercache.yaml"
    config.write_text(CONFIG.format(directory=kv))
    console.print(f"model, KV and logs lie in {_short(place)}/; each server is warmed up with one short question first")
    runs: dict[str, Run] = {}

    def run(name: str, server: Server, tier: str | None = None) -> None:
        with console.status(f"asking: {name.replace('_', ' ')}"):
            answer = ask(server.url, message)
        tiers = {key: tokens for key, tokens in server.tiers_of_last_request().items() if tokens}
        found = tier if tier is not None else "+".join(tiers)
        runs[name] = Run(name, found, answer)
        console.print(
            f"  {name:13} {answer.ttft_s:8.3f} s   {answer.hit_tokens:,} of {answer.prompt_tokens:,} tokens hit"
        )

    with _server("vLLM with tiercache", model, place / "server-1.log", console, config) as server:
        run("cold", server)
        server.wait_for_stored(runs["cold"].answer.prompt_tokens // 128 * 128)
        run("prefix_cache", server, tier="vllm")
        server.forget_prefix_cache()
        run("cpu", server)
    again = "vLLM with tiercache again, a new process"
    with _server(again, model, place / "server-2.log", console, config) as server:
        run("disk_restart", server)
    return {name: runs[name] for name in LABELS}


class _server:
    """`serving`, with progress shown and one short question asked, so that first-use costs of the engine fall on nobody."""

    def __init__(self, what: str, model: Path, log: Path, console: Console, config: Path) -> None:
        self._what = what
        self._console = console
        self._serving = serving(model, log, config)

    def __enter__(self) -> Server:
        with self._console.status(f"starting {self._what}"):
            server = self._serving.__enter__()
            warm_up: Answer = ask(server.url, WARM_UP, 4)
        self._console.print(f"{self._what} is up ({warm_up.prompt_tokens} tokens asked to warm up)")
        return server

    def __exit__(self, *error: object) -> None:
        with self._console.status(f"stopping {self._what}"):
            self._serving.__exit__(*error)  # type: ignore[arg-type]


def _short(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
