"""Serve a model with its KV on 3FS: ask a long question, start a new server, ask again, and see what 3FS gives back.

    python examples/hf3fs_serve.py                              # on the 3FS emulator, on this machine
    python examples/hf3fs_serve.py --base-path /3fs/stage/kv    # on a real mount (with hf3fs_py_usrbio installed)

It runs vLLM's server on the CPU with the small model of `make demo`, and 3FS as the only storage below the CPU tier.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tiercache.demo.model import prepare_model
from tiercache.demo.question import Answer, ask, long_message
from tiercache.demo.server import Server, serving
from tiercache.signals import ended_by_signals

CONFIG = """\
chunk_size: 256
local_cpu: true
max_local_cpu_size: 1.0
max_hf3fs_size: 2.0
remote_storage_plugins: ["hf3fs.primary"]
extra_config:
  remote_storage_plugin.hf3fs.primary.base_path: "{base_path}"
"""
BLOCK_TOKENS = 128


def main(
    base_path: Annotated[Path | None, typer.Option(help="A directory on a 3FS mount; the emulator without it.")] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Length of the question.")] = 3000,
) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-hf3fs-")))
        if base_path is None:
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from tests.hf3fs_emulator import Hf3fsEmulator, why_no_fuse

            if (reason := why_no_fuse()) is not None:
                raise SystemExit(f"the emulator of 3FS needs FUSE: {reason}")
            emulator = stack.enter_context(Hf3fsEmulator())
            os.environ.update(emulator.environment)
            base_path = emulator.mount / "kv"
            console.print(f"an emulated 3FS is mounted at {emulator.mount}")
        config = place / "tiercache.yaml"
        config.write_text(CONFIG.format(base_path=base_path))
        console.print("preparing the model (20 s) and the question")
        model = prepare_model()
        message = long_message(model, tokens)
        answers: dict[str, tuple[Answer, str]] = {}

        def run(name: str, server: Server) -> None:
            answer = ask(server, message)
            answers[name] = (answer, server.source_of(answer.request_id))
            console.print(f"  {name}: first token after {answer.ttft_s:.3f} s")

        console.print("starting vLLM (a minute; on a busy machine up to five, then it is given up)")
        with serving(model, place / "first.log", config) as server:
            ask(server, "Say hello.", 4)
            run("cold", server)
            cold = answers["cold"][0]
            server.wait_for_stored(cold.request_id, cold.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
            run("vLLM's prefix cache", server)
        console.print("starting vLLM again: its memory is empty, 3FS has the KV")
        with serving(model, place / "second.log", config) as server:
            ask(server, "Say hello.", 4)
            run("3FS, in a new process", server)

        table = Table()
        for column in ("run", "TTFT, s", "tokens hit", "where the hit came from"):
            table.add_column(column)
        for name, (answer, source) in answers.items():
            table.add_row(name, f"{answer.ttft_s:.3f}", f"{answer.hit_tokens} of {answer.prompt_tokens}", source)
        console.print(table)
        reference, restored = answers["vLLM's prefix cache"][0], answers["3FS, in a new process"][0]
        if not restored.hit_tokens or reference.text != restored.text:
            console.print("wrong: the answer from 3FS is not the prefix cache's", style="red")
            raise typer.Exit(1)
        console.print("The answer from 3FS is, to the letter, the one that vLLM's own prefix cache gives.")


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
