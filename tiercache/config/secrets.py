"""What must never be shown: passwords, tokens, salts, and the credentials inside a URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"passw|passphrase|pwd|token(?!s)|secret|salt|credential|(?:access|account|api|private|shared)_?key$"
    r"|(?:access|account)_key|connection_string|(?:^|[._])(?:auth|pass|dsn)$",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://).*@", re.DOTALL)
"""Spaces included: a password may have some."""
_CREDENTIALS_OF_URL_KEY = re.compile(r"^([\w+-]+:/*)?.*@", re.DOTALL)
"""A mistyped URL must not give away more than a right one."""
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:pass|token|secret|sig|key)[^=&]*=)[^&]*", re.IGNORECASE)


def hidden(name: str, value: Any, *, secret: bool = False, depth: int = 4) -> Any:
    """`value` of the key `name` as it may be shown: secrets and what is secret inside URLs replaced by ***.

    Below `depth` levels nothing is shown: a YAML alias can make a list that holds itself.
    """
    if value is None or value == "":
        return value
    if secret or _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        if name.endswith("url"):
            value = _CREDENTIALS_OF_URL_KEY.sub(rf"\1{HIDDEN}@", value)
        return _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", value))
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {key: hidden(str(key), item, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(hidden(name, item, depth=depth - 1) for item in value)
    return value
