"""Hide secrets: passwords, tokens, salts, and the credentials inside a URL."""

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
"""The match includes spaces, ? and #, which a password may contain."""
_CREDENTIALS_OF_URL_KEY = re.compile(r"^([\w+-]+:/*)?.*@", re.DOTALL)
"""The pattern also matches mistyped URLs, which must not reveal more than valid URLs."""
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:pass|token|secret|sig|key|auth|cred)[^=&]*=)[^&]*", re.IGNORECASE)
_SHOWN_PARAMETERS = ("db", "database", "device")
"""URL parameters that tiers read themselves. Others are hidden, since a signed URL holds its password in a parameter."""
_PLACES = ("url", "uri", "address", "endpoint", "server")
"""Suffixes of keys that name servers, whose values may lack a scheme."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}")


def hidden(name: str, value: Any, *, secret: bool = False, depth: int = 4) -> Any:
    """Return `value` of the key `name` with secrets, also those inside URLs, replaced by ***.

    Below `depth` levels everything is hidden, since a YAML alias can make a list that contains itself.
    """
    if value is None or value == "":
        return value
    if secret or _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        return hidden_url(value) if name.endswith(_PLACES) else _hidden_text(value)
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        # If a mapping stands in place of a text, its keys may be secrets.
        return {_hidden_key(key): hidden(str(key), item, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(hidden(name, item, depth=depth - 1) for item in value)
    return value


def _hidden_key(key: Any) -> Any:
    return hidden_url(key) if isinstance(key, str) and ("@" in key or "://" in key) else key


def hidden_url(url: str) -> str:
    """Return a URL, valid or mistyped, without the part before an @, the values of parameters, and the fragment."""
    return _without_parameters(_CREDENTIALS_OF_URL_KEY.sub(rf"\1{HIDDEN}@", _CREDENTIALS.sub(f"{HIDDEN}@", url)))


def without_credentials(url: str) -> str:
    """Return a URL without the part before an @, to compare two of them."""
    return _CREDENTIALS.sub("", url)


def shown_scheme(url: str) -> str:
    """Return the part before `://` for an error message, or an empty text if it is not a known scheme."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and _SCHEME.fullmatch(scheme) else ""


def _hidden_text(text: str) -> str:
    if "://" in text:
        return _without_parameters(_CREDENTIALS.sub(f"{HIDDEN}@", text))
    return _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", text)


def _without_parameters(url: str) -> str:
    place, fragment_sign, _ = url.partition("#")
    place, query_sign, query = place.partition("?")
    parts = [_without_value(part) for part in re.split("[&;]", query)] if query else []
    return place + query_sign + "&".join(parts) + (fragment_sign and f"#{HIDDEN}")


def _without_value(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if not equals:
        return HIDDEN
    return f"{name}={value if name in _SHOWN_PARAMETERS else HIDDEN}"
