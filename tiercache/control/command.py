"""`tiercache serve-control`: the HTTP server as a command."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

_TOKEN_VARIABLE = "TIERCACHE_CONTROL_TOKEN"
_LEAST_CHARACTERS = 16


def serve_control_command(
    sockets: list[Path], host: str, port: int, token_file: Path | None, no_token: bool
) -> int:
    try:
        import uvicorn

        from tiercache.control.fleet import Fleet
        from tiercache.control.http import make_app
    except ImportError as error:
        return _complain(f"{error.name} is not installed: pip install 'tiercache[control]'")
    try:
        token = read_token(host, token_file, no_token)
    except ValueError as error:
        return _complain(str(error))
    if not is_loopback(host):
        print(f"warning: {host} is reachable from outside, and HTTP is not encrypted: put TLS before it", file=sys.stderr)
    uvicorn.Server(server_config(make_app(Fleet(sockets), token), host, port)).run()
    return 0


def server_config(app: Starlette, host: str, port: int) -> uvicorn.Config:
    """How the application is served: a bounded number of connections, none of them silent for long, and no log line for a
    request."""
    import uvicorn

    from tiercache.control.connections import Connection

    return uvicorn.Config(
        app,
        http=Connection,
        host=host,
        port=port,
        log_level="info",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=64,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )


def read_token(host: str, token_file: Path | None, no_token: bool) -> str | None:
    """From the file, else from the environment; None only when nobody but this machine can ask and that is wished.

    Raises ValueError with what to do.
    """
    if no_token:
        if token_file is not None:
            raise ValueError("--no-token and --token-file exclude each other")
        if not is_loopback(host):
            raise ValueError(f"--no-token is for loopback only, and --host is {host}; give a token with --token-file")
        return None
    where = _TOKEN_VARIABLE
    token = os.environ.get(_TOKEN_VARIABLE, "")
    if token_file is not None:
        where = str(token_file)
        try:
            token = token_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--token-file {token_file} cannot be read: {error}") from None
    token = token.strip()
    if not token:
        raise ValueError(
            f"there is no token in {where}: write one with `openssl rand -hex 32 > FILE` and give --token-file FILE, or set "
            f"{_TOKEN_VARIABLE}; on loopback, --no-token does without"
        )
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"the token in {where}: expected {_LEAST_CHARACTERS} or more printable ASCII characters, no spaces")
    return token


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _complain(problem: str) -> int:
    print(f"tiercache serve-control: {problem}", file=sys.stderr)
    return 2
