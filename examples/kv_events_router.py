"""A router that sends each request to the engine that holds most of its prompt's KV: in its own memory, or in tiers.

    vllm serve MODEL --port 8001 --kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}' \
        --enable-prompt-tokens-details --kv-transfer-config '{"kv_connector": "TierCacheConnector", ...}'
    python examples/kv_events_router.py --engine http://host-a:8001,tcp://host-a:5557 --engine http://host-b:8001,tcp://...

The router computes no hashes: vLLM's events name each block, its predecessor and its tokens, with GPU for the engine's own
memory, and CPU or STORAGE for tiers. The header `x-kv-tokens` of an answer has the number of hit tokens that the router
expected. It is for models with one group of layers, without adapters, images or cache salts, which need `extra_keys`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_Step = tuple[Any, tuple[int, ...]]


@dataclass
class Engine:
    url: str
    events: str
    outstanding: int = 0
    follower: dict[_Step, Any] = field(default_factory=dict)
    """Hashes of blocks, by the preceding block and the tokens."""
    blocks: dict[Any, tuple[_Step, set[str]]] = field(default_factory=dict)
    """The step to each block and its places, by hash."""
    block_tokens: int = 0
    expected_batch: int = 0

    def follow(self, number: int, events: list[dict[str, Any]]) -> None:
        """Apply a batch of events. Forget all blocks if a batch was missed or the engine was restarted."""
        if number != self.expected_batch:
            self.forget()
        self.expected_batch = number + 1
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.forget()
                continue
            stored, before = event["type"] == "BlockStored", event.get("parent_block_hash")
            size = self.block_tokens = event["block_size"] if stored else self.block_tokens
            for position, block in enumerate(event["block_hashes"]):
                if stored:
                    step = before, tuple(event["token_ids"][position * size : (position + 1) * size])
                    self.blocks.setdefault(block, (step, set()))[1].add(event["medium"])
                    self.follower[step] = before = block
                elif block in self.blocks:
                    self.lose(block, event["medium"])

    def lose(self, block: Any, medium: str) -> None:
        step, media = self.blocks[block]
        media.discard(medium)
        if not media:
            del self.blocks[block]
            if self.follower.get(step) == block:  # it may be another block of the same tokens
                del self.follower[step]

    def forget(self) -> None:
        self.blocks.clear()
        self.follower.clear()

    def holds(self, tokens: list[int]) -> int:
        """Return the number of tokens that need not be computed: a prefix in the engine's own memory, or one in tiers."""
        return max(self._reach(tokens, {"GPU"}), self._reach(tokens, {"CPU", "STORAGE"}))

    def _reach(self, tokens: list[int], media: set[str]) -> int:
        size, before = self.block_tokens, None
        for start in range(0, len(tokens) - size, size) if size else ():  # the last token is always computed
            before = self.follower.get((before, tuple(tokens[start : start + size])))
            if before is None or not self.blocks[before][1] & media:
                return start
        return (len(tokens) - 1) // size * size if size and tokens else 0


class Router:
    def __init__(self, engines: list[Engine], round_robin: bool = False) -> None:
        self.engines, self._turns = engines, count() if round_robin else None
        self._client = httpx.AsyncClient(timeout=None, trust_env=False)

    def choose(self, tokens: list[int]) -> tuple[Engine, int]:
        if self._turns is not None:
            engine = self.engines[next(self._turns) % len(self.engines)]
            return engine, engine.holds(tokens)
        return max(((one, one.holds(tokens)) for one in self.engines), key=lambda found: (found[1], -found[0].outstanding))

    async def forward(self, request: Request) -> Response:
        """Forwards requests to the engines and sends back their answers, also streams."""
        body = await request.json()
        engine, tokens = self.choose(await self.tokens_of(body))
        engine.outstanding += 1
        sent = self._client.build_request("POST", f"{engine.url}{request.url.path}", json=body)
        try:
            answer = await self._client.send(sent, stream=True)
        except BaseException:
            engine.outstanding -= 1
            raise

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            finally:
                engine.outstanding -= 1
                await answer.aclose()

        headers = {"content-type": answer.headers["content-type"], "x-kv-engine": engine.url, "x-kv-tokens": str(tokens)}
        return StreamingResponse(content(), answer.status_code, headers)

    async def tokens_of(self, body: dict[str, Any]) -> list[int]:
        """Return the prompt's token ids; none if the engine refuses, which it explains when it gets the request."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        asked = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
        found = await self._client.post(f"{self.engines[0].url}/tokenize", json=asked)
        return list(found.json()["tokens"]) if found.is_success else []

    async def listen(self, engine: Engine) -> None:
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
            socket.connect(engine.events)
            socket.subscribe("")
            while True:
                _, number, payload = await socket.recv_multipart()
                engine.follow(int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1])

    @contextlib.asynccontextmanager
    async def listening(self, app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.listen(engine)) for engine in self.engines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(routes=[Route(path, self.forward, methods=["POST"]) for path in paths], lifespan=self.listening)


def main(
    engine: Annotated[list[str], typer.Option(help="URL of a server and endpoint of its events, with a comma between.")],
    port: Annotated[int, typer.Option(help="Of the router.")] = 8000,
    round_robin: Annotated[bool, typer.Option(help="Take turns, for comparison.")] = False,
) -> None:
    engines = [Engine(*one.split(",")) for one in engine]
    uvicorn.run(Router(engines, round_robin).app(), host="127.0.0.1", port=port)


if __name__ == "__main__":
    typer.run(main)
