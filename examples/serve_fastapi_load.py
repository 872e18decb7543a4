"""Load for examples/serve_fastapi.py: users who each chat about a document of their own, with the cache and without.

    python examples/serve_fastapi_load.py [--users 6] [--turns 4] [--tokens 1500] [--url http://127.0.0.1:8400]

Without `--url` it starts a server of its own. Users take turns, so between two turns of a user the others push some of the
user's KV out of memory. The server is told when a user begins to type. Each turn is asked with the cache and without it, so
that both run on the same machine at the same time. It prints times to the first token, as clients see them, and the sources
of the prompts' KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercache.demo.server import held_port
from tiercache.signals import ended_by_signals

SERVER = Path(__file__).with_name("serve_fastapi.py")
QUESTIONS = (
    "What is this about?",
    "Say more about that.",
    "Give an example.",
    "And in one word?",
    "Why does it matter?",
)
_START_S = 120.0
_CHARACTERS_A_TOKEN = 4.3
"""Average for this text with the small model's tokenizer."""


@dataclass
class Found:
    """Results with the cache, or without it."""

    first_s: list[float] = field(default_factory=list)
    """Seconds of turns that begin a session."""
    later_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of later turns' prompts, by the source of their KV."""


async def ask(client: httpx.AsyncClient, session: str, text: str, answer_tokens: int, cached: bool) -> dict[str, Any]:
    """Ask, and return the last event, with `client_s`: the seconds to the first piece. Raises RuntimeError on failure."""
    body = {"session": session, "text": text, "max_tokens": answer_tokens, "cached": cached}
    began_s, first_s = perf_counter(), None
    async with client.stream("POST", "/chat", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"the server refused: {response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line:
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            first_s = first_s or perf_counter() - began_s
            if "error" in event:
                raise RuntimeError(f"the server failed: {event['error']}")
            if event.get("done"):
                return event | {"client_s": first_s}
    raise RuntimeError("the answer has no end")


async def drive(
    url: str, users: int, turns: int, tokens: int, answer_tokens: int, at_once: int, typing_s: float, bar: Progress
) -> dict[bool, Found]:
    """Results by use of the cache."""
    found = {True: Found(), False: Found()}
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    length = int(tokens * _CHARACTERS_A_TOKEN)
    places = [random.Random(user).randrange(len(text) - length) for user in range(users)]
    documents = [text[place : place + length] for place in places]
    job = bar.add_task("asking", total=2 * users * turns)
    gate = asyncio.Semaphore(at_once)

    async def one_turn(client: httpx.AsyncClient, user: int, turn: int, cached: bool) -> None:
        async with gate:
            session = f"user {user + 1}" if cached else f"uncached {user + 1}"
            question = QUESTIONS[turn % len(QUESTIONS)]
            if turn and cached:
                (await client.post("/typing", json={"session": session})).raise_for_status()
            await asyncio.sleep(typing_s if turn else 0)
            message = question if turn else f"{documents[user]}\n\n{question}"
            event = await ask(client, session, message, answer_tokens, cached)
            (found[cached].later_s if turn else found[cached].first_s).append(event["client_s"])
            if turn:
                found[cached].tokens.update(event["hit_by_tier"])
                found[cached].tokens["computed"] += event["prompt_tokens"] - sum(event["hit_by_tier"].values())
            bar.update(job, advance=1)

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await ask(client, "warm-up", "Say hello.", 2, False)
        for turn in range(turns):
            for cached in (True, False):
                async with asyncio.TaskGroup() as group:
                    for user in range(users):
                        group.create_task(one_turn(client, user, turn, cached))
    return found


@asynccontextmanager
async def own_server(hot_gb: float) -> AsyncIterator[str]:
    """Run the server, with its output where ours goes, until the block ends. Yields its URL."""
    with held_port() as port:
        command = sys.executable, str(SERVER), "--port", str(port), "--hot-gb", str(hot_gb)
        server = await asyncio.create_subprocess_exec(*command)
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(_START_S), httpx.AsyncClient() as client:
                while server.returncode is None:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(f"{url}/state")).is_success:
                            break
                    await asyncio.sleep(0.2)
                else:
                    raise RuntimeError(f"the server ended with status {server.returncode}")
            yield url
        finally:
            if server.returncode is None:
                server.send_signal(signal.SIGINT)
            await server.wait()


def table_of(found: dict[bool, Found]) -> Table:
    table = Table(title="seconds to the first token, and where the KV of later turns' prompts came from")
    table.add_column("")
    for column in ("first turn p50", "later p50", "later p95", "tokens by tier"):
        table.add_column(column, justify="right")
    for cached, one in found.items():
        later = sorted(one.later_s)
        all_tokens = sum(one.tokens.values())
        shares = ", ".join(f"{name} {tokens / all_tokens:.0%}" for name, tokens in one.tokens.items() if tokens)
        p95 = quantiles(later, n=20, method="inclusive")[-1]
        name = "with the cache" if cached else "without"
        table.add_row(name, f"{median(one.first_s):.2f}", f"{median(later):.2f}", f"{p95:.2f}", shares)
    return table


async def run(url: str | None, hot_gb: float, console: Console, **load: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if url is None:
            console.print("starting a server")
            url = await stack.enter_async_context(own_server(hot_gb))
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            found = await drive(url, bar=bar, **load)
    console.print(table_of(found))


def main(
    users: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=3, help="Turns of each user; the first one begins the session.")] = 4,
    tokens: Annotated[int, typer.Option(min=100, help="Approximate length of a document.")] = 1500,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.")] = 8,
    at_once: Annotated[int, typer.Option(min=1, help="Users who ask at a time.")] = 2,
    typing_s: Annotated[float, typer.Option(help="Typing time before each turn.")] = 0.5,
    hot_gb: Annotated[float, typer.Option(help="Hot cache of the started server.")] = 0.2,
    url: Annotated[str | None, typer.Option(help="URL of a running server.")] = None,
) -> None:
    load = {"users": users, "turns": turns, "tokens": tokens, "answer_tokens": answer_tokens}
    asyncio.run(run(url, hot_gb, Console(highlight=False), **load, at_once=at_once, typing_s=typing_s))


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
