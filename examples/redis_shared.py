"""Two vLLM servers share one Redis: the second finds the KV that the first has computed.

    python examples/redis_shared.py                                  # starts a redis-server of its own, and ends it
    python examples/redis_shared.py --url redis://cache.example:6379   # uses yours

It runs both servers on the CPU of this machine with the small model of `make demo`, and prints a table at the end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tiercache.demo.model import prepare_model
from tiercache.demo.question import Answer, ask, long_message
from tiercache.demo.server import held_port, serving
from tiercache.signals import ended_by_signals

try:
    import redis
except ImportError:
    sys.exit("this example needs redis-py: pip install 'tiercache[redis]'")

CONFIG = """\
chunk_size: 256
max_local_cpu_size: 1.0
remote_storage_plugins: ["redis"]
extra_config:
  remote_storage_plugin.redis.url: "{url}"
  remote_storage_plugin.redis.prefix: "{prefix}"
"""
CHUNK_TOKENS = 256
_SOON_S = 30.0


def main(
    url: Annotated[str | None, typer.Option(help="A Redis or Valkey server; one is started without it.")] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Length of the question.")] = 3000,
) -> None:
    console = Console(highlight=False)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-redis-")))
        if url is None:
            url = stack.enter_context(redis_server(place))
            console.print(f"redis-server listens at {url}")
        prefix = f"example-{time.time_ns()}"
        stack.callback(forget, url, prefix)  # when the servers below have ended
        config = place / "tiercache.yaml"
        config.write_text(CONFIG.format(url=url, prefix=prefix))
        console.print("preparing the model (20 s) and the question")
        model = prepare_model()
        message = long_message(model, tokens)
        answers: dict[str, tuple[Answer, str]] = {}

        console.print("starting two vLLM servers (a minute or two)")
        first = stack.enter_context(serving(model, place / "first.log", config))
        second = stack.enter_context(serving(model, place / "second.log", config))
        for server in (first, second):
            ask(server, "Say hello.", 4)
        for name, server in (
            ("first server, cold", first),
            ("first server, its prefix cache", first),
            ("second server, never asked before", second),
        ):
            answer = ask(server, message)
            answers[name] = answer, server.source_of(answer.request_id)
            if len(answers) == 1:
                wait_for_chunks(url, prefix, answer.prompt_tokens // CHUNK_TOKENS)

        table = Table()
        for column in ("asked", "TTFT, s", "tokens hit", "where the hit came from"):
            table.add_column(column)
        for name, (answer, source) in answers.items():
            table.add_row(name, f"{answer.ttft_s:.3f}", f"{answer.hit_tokens} of {answer.prompt_tokens}", source)
        console.print(table)
        computed, shared = answers["first server, cold"][0], answers["second server, never asked before"][0]
        if not shared.hit_tokens:
            console.print("wrong: the second server found nothing", style="red")
            raise typer.Exit(1)
        ratio = computed.ttft_s / shared.ttft_s
        console.print(f"The second server, which had never seen the question, began to answer {ratio:.0f} times sooner.")


@contextmanager
def redis_server(place: Path) -> Iterator[str]:
    """Run a server of our own, in memory only, until the block ends. Yields its URL."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server, or name a server with --url")
    with held_port() as port:
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(place), "--save", "",
                   "--appendonly", "no"]  # fmt: skip
        process = subprocess.Popen([*command, "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)  # fmt: skip
        try:
            url = f"redis://127.0.0.1:{port}"
            until = time.monotonic() + _SOON_S
            with redis.Redis.from_url(url) as client:
                while True:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        if time.monotonic() > until or process.poll() is not None:
                            raise
                        time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            process.wait(_SOON_S)


def wait_for_chunks(url: str, prefix: str, chunks: int) -> None:
    """Wait until the server has `chunks` values, which are written in the background."""
    until = time.monotonic() + _SOON_S
    with redis.Redis.from_url(url) as client:
        while sum(1 for _ in client.scan_iter(f"{prefix}*", count=1000)) < chunks:
            if time.monotonic() > until:
                raise SystemExit(f"{chunks} chunks did not come to Redis within {_SOON_S:.0f} s")
            time.sleep(0.05)


def forget(url: str, prefix: str) -> None:
    """Remove our values from a server that stays."""
    with redis.Redis.from_url(url) as client:
        for name in client.scan_iter(f"{prefix}*", count=1000):
            client.unlink(name)


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
