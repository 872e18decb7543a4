"""A gateway that announces requests: a conversation's KV is fetched from disk before the next request is forwarded.

    python examples/prefetch_gateway.py [--tokens 4100] [--rounds 5] [--json FILE]

It starts vLLM on the CPU of this machine with the small model of `make demo`, a disk tier below a CPU tier that is too
small for everything, and `tiercache serve-control` beside it. Between two requests of a conversation, others push it out
of memory. Each round asks it three times, with vLLM's own prefix cache emptied before: prefetched from disk, from the CPU
tier, and from disk without notice. The chunk files are not in the page cache when they are read. It prints times to the
first token.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercache.demo.model import prepare_model
from tiercache.demo.question import Answer, ask, long_message
from tiercache.demo.server import MODEL_NAME, Server, open_url, quickest_dtype, serving
from tiercache.signals import ended_by_signals

CONFIG = """\
chunk_size: 256
max_local_cpu_size: {hot_gb}
prefetch_share: 0.8
local_disk: "{place}/kv"
max_local_disk_size: 4.0
control_socket: "{place}/control.sock"
"""
_BYTES_PER_TOKEN = {"bfloat16": 23040, "float32": 46080}
"""Bytes of the small model's KV for a token, in the dtype of the server."""
_SOON_S = 60.0


class Control:
    """A client of `tiercache serve-control`, as in a gateway."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    def tell(self, command: str, **fields: Any) -> dict[str, Any]:
        return post(f"{self.url}/v1/{command}", fields, {"Authorization": f"Bearer {self._token}"})

    def is_coming(self, tokens: list[int], in_s: float) -> dict[str, Any]:
        """Announce a prefix, and wait until it is in memory. A real gateway would not wait."""
        handle = self.tell("prefetch", tokens=tokens, deadline_s=in_s)["handle"]
        return self.tell("progress", handle=handle, until_s=30)


def hot_gb(tokens: int, dtype: str) -> float:
    """Return the size of a CPU tier for one and a half conversations."""
    return round(1.5 * tokens * _BYTES_PER_TOKEN[dtype] / 2**30, 3)


def main(
    tokens: Annotated[int, typer.Option(min=1024, help="Length of the conversation.")] = 4100,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is measured.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-gateway-")))
        config = place / "tiercache.yaml"
        config.write_text(CONFIG.format(place=place, hot_gb=hot_gb(tokens, quickest_dtype())))
        console.print("preparing the model (20 s) and the conversations")
        model = prepare_model()
        text = long_message(model, tokens)
        others = [f"{name}: {text}" for name in ("A second conversation", "A third conversation")]
        console.print("starting vLLM (a minute) and serve-control")
        server = stack.enter_context(serving(model, place / "vllm.log", config))
        control = stack.enter_context(serving_control(place))
        ask(server, "Say hello.", 4)
        ids = tokenize(server, text)
        for message in (text, *others):
            answer = ask(server, message, 2)
            server.wait_for_stored(answer.request_id, answer.prompt_tokens // 256 * 256)

        times: dict[str, list[float]] = {"prefetched from disk": [], "CPU tier": [], "disk, unannounced": []}

        def measure(way: str, source: str) -> None:
            server.forget_prefix_cache()
            answer = ask(server, text, 2)
            times[way].append(answer.ttft_s)
            check(server, answer, source)

        for _ in range(rounds):
            push_out(server, others, place)
            progress = control.is_coming(ids, in_s=1.0)
            if progress["promoted"] < progress["asked"]:
                raise SystemExit(f"wrong: not everything was prefetched: {progress}")
            measure("prefetched from disk", "cpu")
            measure("CPU tier", "cpu")
            push_out(server, others, place)
            measure("disk, unannounced", "disk")
        account = control.tell("statistics")["control.sock"]["statistics"]["prefetch"]["hints"]

    table = Table(title=f"{tokens} tokens, {rounds} rounds")
    for column in ("asked", "TTFT, s (median)", "least", "most"):
        table.add_column(column)
    for way, found in times.items():
        table.add_row(way, f"{median(found):.3f}", f"{min(found):.3f}", f"{max(found):.3f}")
    console.print(table)
    pairs = zip(times["prefetched from disk"], times["CPU tier"], strict=True)
    ratio = median(prefetched / hot for prefetched, hot in pairs)
    console.print(f"prefetched / CPU tier: {ratio:.3f} (median of the rounds' ratios); prefetched bytes: {account}")
    if json_file is not None:
        figures = {"tokens": tokens, "rounds": rounds, "ttft_s": times, "ratio": ratio, "prefetch": account}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def tokenize(server: Server, text: str) -> list[int]:
    """Return the token ids of a chat request, as vLLM makes them: they name its KV."""
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}]}
    found: list[int] = post(f"{server.url}/tokenize", body)["tokens"]
    return found


def push_out(server: Server, others: list[str], place: Path) -> None:
    """Serve other conversations until the first is neither in vLLM's memory, nor in the CPU tier, nor in the page cache."""
    for message in others:
        server.forget_prefix_cache()
        ask(server, message, 2)
    for path in (place / "kv").glob("tiercache-chunks/??/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check(server: Server, answer: Answer, source: str) -> None:
    """Raise SystemExit unless all of the hit came from `source`."""
    found = server.source_of(answer.request_id)
    if found != source or not answer.hit_tokens:
        raise SystemExit(f"wrong: expected a hit from {source}, found {found or 'none'}")


@contextmanager
def serving_control(place: Path) -> Iterator[Control]:
    """Run the HTTP server in front of the cache's control socket, with a token of its own, until the block ends."""
    token = secrets.token_hex(16)
    with (place / "control.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiercache", "serve-control", "--port", "0", "--socket", f"{place}/control.sock"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TIERCACHE_CONTROL_TOKEN": token},
        )
        try:
            until = time.monotonic() + _SOON_S
            while " running on " not in (said := Path(log.name).read_text()):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"serve-control did not start: {said}")
                time.sleep(0.05)
            yield Control(said.partition(" running on ")[2].split()[0], token)
        finally:
            process.terminate()
            process.wait(_SOON_S)


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with open_url(request, timeout=_SOON_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
