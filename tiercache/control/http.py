"""HTTP in front of control sockets: `POST /v1/<command>` with the message as JSON, `GET /v1/statistics`, `GET /metrics`.

All but `GET /healthz` wants the bearer token, if there is one. Whatever goes wrong is JSON with `error.kind` and
`error.message`; the token is in none of it, and in no log line.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as StarletteMessage

from tiercache.control.fleet import Fleet
from tiercache.control.messages import COMMANDS, LARGEST_MESSAGE_BYTES, ControlError, Message, Statistics
from tiercache.control.metrics import exposition
from tiercache.control.pace import ByteSemaphore, due_s

_BODY_S = 10.0
_SMALL_BYTES = 64 << 10
_ROOM_BYTES = 4 * LARGEST_MESSAGE_BYTES
"""For the bodies of all requests that are longer than that, until they are answered."""
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


def make_app(fleet: Fleet, token: str | None) -> Starlette:
    """Without a token only requests that name this machine as their host are served: a page in somebody's browser that
    has its own name point here is not."""
    server = _Server(fleet, token)
    return Starlette(
        routes=[
            Route("/v1/statistics", server.statistics, methods=["GET", "POST"]),
            Route("/v1/{command}", server.command, methods=["POST"]),
            Route("/metrics", server.metrics, methods=["GET"]),
            Route("/healthz", server.health, methods=["GET"]),
        ],
        middleware=[
            Middleware(_Ending),
            *([Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_HOSTS)] if token is None else []),
        ],
        exception_handlers={ControlError: _refused, HTTPException: _http_error, Exception: _failed},  # type: ignore[dict-item]
    )


class _Ending:
    """Requests that the server does not wait for any more when it stops are told so: or the log has a traceback for each."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tell(message: StarletteMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except asyncio.CancelledError:
            if not started:
                answer = _json(_error("unreachable", "the server stops"), _STATUS["unreachable"])
                await answer(scope, receive, send)


class _Server:
    def __init__(self, fleet: Fleet, token: str | None) -> None:
        self._fleet = fleet
        self._token = token.encode() if token is not None else None
        self._room = ByteSemaphore(_ROOM_BYTES)

    async def command(self, request: Request) -> Response:
        self._check_token(request)
        name = request.path_params["command"]
        kind = COMMANDS.get(name)
        if kind is None:
            raise ControlError("unknown", f"there is no command {name!r}; known are {', '.join(COMMANDS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # Also what keeps pages in a browser out: they may not send this unasked.
            raise ControlError("unsupported", "expected content-type: application/json")
        async with AsyncExitStack() as stack:
            command = _decoded(name, kind, await self._body(stack, request))
            return _json(await self._fleet.ask(command))

    async def _body(self, stack: AsyncExitStack, request: Request) -> bytes:
        """Takes room for a long one when the first bytes of it are here: to announce one costs nothing.

        Raises ControlError for one that is too large, as soon as that is known, or too slow; and "busy".
        """
        length, body, loop = _announced_bytes(request), bytearray(), asyncio.get_running_loop()
        began_s: float | None = None
        try:
            async with asyncio.timeout(_BODY_S) as late:
                async for part in request.stream():
                    body += part
                    if len(body) > LARGEST_MESSAGE_BYTES:
                        raise _too_large()
                    if began_s is None and len(body) > _SMALL_BYTES:
                        late.reschedule(None)
                        await self._take_room(stack, length)
                        began_s = loop.time()
                    if began_s is not None:
                        late.reschedule(began_s + due_s(len(body), length))
        except TimeoutError:
            raise ControlError("late", f"the body stalled, or did not arrive within {_BODY_S:g} s") from None
        except ClientDisconnect:
            raise ControlError("malformed", "the connection ended before the body did") from None
        return bytes(body)

    async def _take_room(self, stack: AsyncExitStack, length: int) -> None:
        """Numbers in JSON are ten times as large once they are decoded, and as many connections may send some."""
        try:
            async with asyncio.timeout(_BODY_S):
                await stack.enter_async_context(self._room.of(length))
        except TimeoutError:
            raise ControlError("busy", f"{_ROOM_BYTES} bytes of other requests' bodies are being answered") from None

    async def statistics(self, request: Request) -> Response:
        """Of each socket by its name: sums over ranks would hide the one that lags."""
        self._check_token(request)
        answers = await self._fleet.ask_each(Statistics())
        return _json({path.name: _plain(answer) for path, answer in answers.items()})

    async def metrics(self, request: Request) -> Response:
        self._check_token(request)
        answers: Any = await self._fleet.ask_each(Statistics()) if self._fleet.sockets() else {}
        return Response(exposition(answers), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        """This server lives; the caches' health is `tiercache_up`."""
        return _json({})

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared in a time that does not tell how much of it was right.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            raise ControlError("unauthorised", "expected the header authorization: Bearer TOKEN, with this server's token")


def _decoded(name: str, kind: type[Message], body: bytes) -> Any:
    """The command. The path says which one it is, so the body does not."""
    try:
        content = msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        content["command"] = msgspec.Raw(msgspec.json.encode(name))
        return msgspec.json.decode(msgspec.json.encode(content), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError("malformed", f"malformed body: {error}") from None
    except RecursionError:
        raise ControlError("malformed", "malformed body: its values are nested too deep") from None


def _announced_bytes(request: Request) -> int:
    """How long the body is, at most. Raises ControlError when that is too much."""
    announced = request.headers.get("content-length")
    if announced is None:
        return LARGEST_MESSAGE_BYTES if "transfer-encoding" in request.headers else 0
    if not announced.isdecimal() or len(announced) > 18 or int(announced) > LARGEST_MESSAGE_BYTES:
        raise _too_large()
    return int(announced)


def _too_large() -> ControlError:
    return ControlError("too_large", f"expected a body of at most {LARGEST_MESSAGE_BYTES} bytes")


def _plain(answer: dict[str, Any] | ControlError) -> dict[str, Any]:
    return _error(answer.kind, str(answer)) if isinstance(answer, ControlError) else answer


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def _refused(request: Request, error: ControlError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.kind == "unauthorised" else None
    return _json(_error(error.kind, str(error)), _STATUS.get(error.kind, 500), headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = "unknown" if error.status_code == 404 else "malformed"
    return _json(_error(kind, f"{request.method} {request.url.path}: {error.detail}"), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return _json(_error("failed", "the server failed; its log says why"), 500)
