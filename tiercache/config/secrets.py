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
_REST = re.compile(r"(?<=[?#]).+", re.DOTALL)
"""Parameters and fragment of a URL. A signed URL holds its password in a parameter."""
_PLACES = ("url", "uri", "address", "endpoint", "server")
"""Suffixes of keys that name servers, whose values may lack a scheme."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}")


def hidden(name: str, value: Any, *, secret: bool = False) -> Any:
    """Return `value` of the key `name` with secrets, also those inside URLs, replaced by ***.

    No value of a key is a mapping, or a list inside a list, so these are not shown.
    """
    if value is None or value == "":
        return value
    if secret or _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        return hidden_url(value) if name.endswith(_PLACES) else _hidden_text(value)
    if isinstance(value, (list, tuple)):
        return type(value)("..." if isinstance(item, (list, tuple)) else hidden(name, item) for item in value)
    return "{...}" if isinstance(value, Mapping) else value


def hidden_url(url: str) -> str:
    """Return a URL, valid or mistyped, without the part before an @, parameters, and the fragment."""
    return _REST.sub(HIDDEN, _CREDENTIALS_OF_URL_KEY.sub(rf"\1{HIDDEN}@", _CREDENTIALS.sub(f"{HIDDEN}@", url)))


def without_credentials(url: str) -> str:
    """Return a URL without the part before an @, to compare two of them."""
    return _CREDENTIALS.sub("", url)


def shown_scheme(url: str) -> str:
    """Return the part before `://` for an error message, or an empty text if it is not a known scheme."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and _SCHEME.fullmatch(scheme) else ""


def _hidden_text(text: str) -> str:
    if "://" in text:
        return _REST.sub(HIDDEN, _CREDENTIALS.sub(f"{HIDDEN}@", text))
    return _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", text)
