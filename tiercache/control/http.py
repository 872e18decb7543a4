"""HTTP in front of control sockets: `POST /v1/<command>` with the message as JSON, `GET /v1/statistics`, `GET
/metrics`.

All but `GET /healthz` require the bearer token, if there is one. Errors are JSON with `error.kind` and `error.message`,
except uvicorn's own 400 and 503. Neither errors nor log lines contain the token.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tiercache.control.client import Fleet
from tiercache.control.messages import (
    COMMANDS,
    LARGEST_MESSAGE_BYTES,
    Advise,
    ControlError,
    Statistics,
    decode,
    error_of,
)
from tiercache.control.metrics import exposition

_BODY_S = 10.0
_KEEP_ALIVE_S = 10
"""Time after an answer in which a connection may send its next request."""
_HEADER_BYTES = 16 << 10
_MOST_CONNECTIONS = 512
"""Limit of connections; further requests get 503."""
_STATUS = {
    "malformed": 400,
    "unauthorised": 401,
    "unknown": 404,
    "refused": 409,
    "too_large": 413,
    "unsupported": 415,
    "busy": 503,
    "unreachable": 503,
    "late": 504,
}
_LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]"]


def make_app(fleet: Fleet, token: str | None, host: str = "localhost") -> Starlette:
    """Return the application. Without a token it serves only requests whose host header names `host` or this machine.

    This keeps out web pages in a browser whose own domain resolves to this machine.
    """
    server = _Server(fleet, token)
    return Starlette(
        routes=[
            Route("/v1/statistics", server.guarded(server.each(Statistics())), methods=["GET", "POST"]),
            Route("/v1/advise", server.guarded(server.each(Advise())), methods=["GET", "POST"]),
            Route("/v1/{command}", server.guarded(server.command), methods=["POST"]),
            Route("/metrics", server.guarded(server.metrics), methods=["GET"]),
            Route("/healthz", server.health, methods=["GET"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[*_LOCAL_HOSTS, host])] if token is None else [],
        exception_handlers={ControlError: _refused, HTTPException: _http_error, Exception: _failed},  # type: ignore[dict-item]
    )


def server_config(app: Starlette, host: str, port: int) -> uvicorn.Config:
    """Return the server configuration: few connections, short idle time, and no log line for a request."""
    return uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=_HEADER_BYTES,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        lifespan="off",
        ws="none",
    )


class _Server:
    def __init__(self, fleet: Fleet, token: str | None) -> None:
        self._fleet = fleet
        self._token = token.encode() if token is not None else None

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that requires the token, and that answers requests cancelled because the server stops."""

        async def answer(request: Request) -> Response:
            self._check_token(request)
            try:
                return await endpoint(request)
            except asyncio.CancelledError:
                raise ControlError("unreachable", "the server stops") from None

        return answer

    async def command(self, request: Request) -> Response:
        name = request.path_params["command"]
        kind = COMMANDS.get(name)
        if kind is None:
            raise ControlError("unknown", f"there is no command {name!r}; known are {', '.join(COMMANDS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # Browsers cannot send this content type to another site without its permission.
            raise ControlError("unsupported", "expected content-type: application/json")
        # The path gives the command, so the body need not.
        command: Any = decode(msgspec.json.Decoder(kind), await _body(request) or b"{}", "body")
        return _json(await self._fleet.ask(command))

    def each(self, command: Statistics | Advise) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint with the answer of each socket by its name, since sums over ranks would hide a slow rank."""

        async def answer(request: Request) -> Response:
            answers = await self._fleet.ask_named(command)
            return _json(
                {
                    name: error_of(answer) if isinstance(answer, ControlError) else answer
                    for name, answer in answers.items()
                }
            )

        return answer

    async def metrics(self, request: Request) -> Response:
        answers: Any = await self._fleet.ask_named(Statistics()) if self._fleet.sockets() else {}
        return Response(exposition(answers), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        """Report that this server is alive; `tiercache_up` reports the caches."""
        return _json({})

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compare in constant time, so that timing does not reveal the token.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            raise ControlError(
                "unauthorised", "expected the header authorization: Bearer TOKEN, with this server's token"
            )


async def _body(request: Request) -> bytes:
    """Return the body. Raises ControlError as soon as it is known to be too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_MESSAGE_BYTES:
                    raise ControlError("too_large", f"expected a body of at most {LARGEST_MESSAGE_BYTES} bytes")
    except TimeoutError:
        raise ControlError("late", f"the body did not arrive within {_BODY_S:g} s") from None
    except ClientDisconnect:
        raise ControlError("malformed", "the connection ended before the body did") from None
    return bytes(body)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def _refused(request: Request, error: ControlError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.kind == "unauthorised" else None
    return _json(error_of(error), _STATUS.get(error.kind, 500), headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = "unknown" if error.status_code == 404 else "malformed"
    return _json(
        error_of(ControlError(kind, f"{request.method} {request.url.path}: {error.detail}")), error.status_code
    )


async def _failed(request: Request, error: Exception) -> Response:
    return _json(error_of(ControlError("failed", "the server failed; its log says why")), 500)
