"""A proxy in front of an engine that computes prompts and an engine that generates; both share a tier.

    export TIERCACHE_CONFIG_FILE=examples/configs/redis.yaml   # both need the same
    vllm serve MODEL --port 8001 --kv-transfer-config '{"kv_connector": "TierCacheConnector", "kv_role": "kv_producer", ...}'
    vllm serve MODEL --port 8002 --kv-transfer-config '{"kv_connector": "TierCacheConnector", "kv_role": "kv_consumer", ...}'
    python examples/disaggregated_prefill.py --prefill http://host-a:8001 --decode http://host-b:8002

The producer's answer says how much of the prompt it stores (`kv_transfer_params`). The consumer gets that number with the
request, waits for these tokens for at most `lookup_timeout_ms`, and computes the rest itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import cycle
from typing import Annotated, Any

import httpx
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_ONE_TOKEN = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "stream": False,
    "stream_options": None,
    "n": 1,
}


class Proxy:
    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill, self._decode = cycle(prefill), cycle(decode)
        self._client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def forward(self, request: Request) -> Response:
        """Send the prompt to the first engine, then the whole request to the second, and stream its answer back."""
        body: dict[str, Any] = await request.json()
        path = request.url.path
        computed = await self._client.post(next(self._prefill) + path, json={**body, **_ONE_TOKEN})
        if computed.is_success:
            body["kv_transfer_params"] = {
                **(body.get("kv_transfer_params") or {}), **(computed.json().get("kv_transfer_params") or {})
            }  # fmt: skip
        sent = self._client.build_request("POST", next(self._decode) + path, json=body)
        answer = await self._client.send(sent, stream=True)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(content(), answer.status_code, {"content-type": answer.headers["content-type"]})

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(routes=[Route(path, self.forward, methods=["POST"]) for path in paths])


def main(
    prefill: Annotated[list[str], typer.Option(help="URL of a server that computes prompts; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="URL of a server that generates; may be repeated.")],
    port: Annotated[int, typer.Option(help="Of the proxy.")] = 8000,
) -> None:
    uvicorn.run(Proxy(prefill, decode).app(), host="127.0.0.1", port=port)


if __name__ == "__main__":
    typer.run(main)
