"""Run `tiercache serve-control`, the HTTP server."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import sys
from pathlib import Path

from tiercache.config.sources import CONTROL_TOKEN_VARIABLE

_LEAST_CHARACTERS = 16
_MOST_CHARACTERS = 4096


def serve_control_command(sockets: list[Path], host: str, port: int, token_file: Path | None, no_token: bool) -> int:
    try:
        import uvicorn

        from tiercache.control.client import Fleet
        from tiercache.control.http import make_app, server_config

        token = read_token(host, token_file, no_token)
    except ImportError as error:
        problem = f"serve-control needs a library that cannot be imported ({error}): pip install 'tiercache[control]'"
        print(f"tiercache serve-control: {problem}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"tiercache serve-control: {error}", file=sys.stderr)
        return 2
    if not is_loopback(host):
        print(
            f"warning: {host} is reachable from outside, and HTTP is not encrypted: put TLS before it", file=sys.stderr
        )
    uvicorn.Server(server_config(make_app(Fleet(sockets), token, host), host, port)).run()
    return 0


def read_token(host: str, token_file: Path | None, no_token: bool) -> str | None:
    """Return the token from the file or else the environment, or None with `no_token`, which requires loopback.

    Raises ValueError with a message that says what to do.
    """
    if no_token:
        if token_file is not None:
            raise ValueError("--no-token and --token-file exclude each other")
        if not is_loopback(host):
            raise ValueError(f"--no-token is for loopback only, and --host is {host}; give a token with --token-file")
        return None
    where = CONTROL_TOKEN_VARIABLE if token_file is None else str(token_file)
    token = os.environ.get(CONTROL_TOKEN_VARIABLE, "") if token_file is None else _read_private(token_file)
    token = token.strip()
    if not token:
        raise ValueError(
            f"there is no token in {where}: write one with `(umask 077; openssl rand -hex 32 > FILE)` and give --token-file "
            f"FILE, or set {CONTROL_TOKEN_VARIABLE}; on loopback, --no-token does without"
        )
    if not re.fullmatch(f"[!-~]{{{_LEAST_CHARACTERS},{_MOST_CHARACTERS}}}", token):
        raise ValueError(
            f"the token in {where}: expected {_LEAST_CHARACTERS} or more printable ASCII characters (at most "
            f"{_MOST_CHARACTERS}), no spaces"
        )
    return token


def _read_private(token_file: Path) -> str:
    """Return the text of a file. Raises ValueError if other users can read or change it."""
    try:
        text = token_file.read_text()
        if (mode := stat.S_IMODE(token_file.stat().st_mode)) & 0o077:
            raise ValueError(
                f"--token-file {token_file} has mode {mode:04o}, so others than its owner can use it: `chmod 600 "
                f"{token_file}`; if others may have read it, write a new token"
            )
        return text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"--token-file {token_file} cannot be read: {reason}") from None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
