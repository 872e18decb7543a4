"""Clients that ask a server, and when they were answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.bench.vllm.workload import CLIENTS, Ask
from tiercache.demo.server import MODEL_NAME, Server

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Answered:
    """`ttft_s` runs from sending to the first token; None when the client went before. `hit_tokens` of the prompt were in
    the engine's cache or in ours; None when the client went before vLLM said so."""

    ttft_s: float | None
    prompt_tokens: int
    answer_tokens: int
    hit_tokens: int | None = None


@dataclass(frozen=True)
class Run:
    total_s: float
    answered: list[Answered]

    @property
    def ttfts_s(self) -> list[float]:
        """In rising order."""
        return sorted(answer.ttft_s for answer in self.answered if answer.ttft_s is not None)

    @property
    def tokens(self) -> int:
        return sum(answer.prompt_tokens + answer.answer_tokens for answer in self.answered)

    @property
    def hit_part(self) -> float:
        """Of all tokens of prompts that were answered to the end."""
        ended = [answer for answer in self.answered if answer.hit_tokens is not None]
        return sum(answer.hit_tokens or 0 for answer in ended) / max(1, sum(answer.prompt_tokens for answer in ended))


async def ask_all(server: Server, asks: Sequence[Ask], clients: int = CLIENTS) -> Run:
    """Each client asks the next question as soon as its last one is answered, or it has hung up.

    Raises `ServerFailed` when the server refuses, dies or says nothing; the other clients hang up then, as when cancelled.
    """
    waiting = iter(asks)
    answered: list[Answered] = []

    async def client(connection: httpx.AsyncClient) -> None:
        for ask in waiting:
            answered.append(await ask_one(connection, server, ask))

    began = time.perf_counter()
    async with _connection(clients) as connection:
        await _all_of(*(client(connection) for _ in range(clients)))
    return Run(time.perf_counter() - began, answered)


async def ask_until(server: Server, asks: Sequence[Ask], enough: int) -> None:
    """All at once; when `enough` are answered, all others hang up. Raises as `ask_all`."""
    async with _connection(len(asks)) as connection:
        tasks = [asyncio.create_task(ask_one(connection, server, ask)) for ask in asks]
        try:
            for number, task in enumerate(asyncio.as_completed(tasks), 1):
                await task
                if number >= enough:
                    return
        finally:
            for left in tasks:
                left.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _all_of(*clients: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(client) for client in clients]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _connection(clients: int) -> httpx.AsyncClient:
    # trust_env: a proxy of the environment must not get between us and the loopback interface.
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    return httpx.AsyncClient(timeout=_PATIENCE_S, limits=limits, trust_env=False)


async def ask_one(connection: httpx.AsyncClient, server: Server, ask: Ask) -> Answered:
    body = {
        "model": MODEL_NAME,
        "prompt": ask.prompt,
        "max_tokens": ask.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first_s: float | None = None
    tokens, hit_tokens = 0, None
    try:
        async with connection.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise server.failed(f"vLLM refused: {response.status_code} {(await response.aread()).decode()}")
            if ask.hang_up_after == 0:
                return Answered(None, len(ask.prompt), 0)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise server.failed(f"vLLM answered with an error: {event['error']}")
                if event["choices"]:
                    first_s = first_s or time.perf_counter() - began
                    tokens += 1
                if usage := event.get("usage"):
                    hit_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if ask.hang_up_after is not None and tokens >= ask.hang_up_after:
                    break
    except httpx.HTTPError as error:
        raise server.failed(f"vLLM stopped answering: {error!r}") from error
    if first_s is None:
        raise server.failed("vLLM answered without a token")
    return Answered(first_s, len(ask.prompt), tokens, hit_tokens)
