"""What the client's exceptions mean, in words of ours.

Their own text holds addresses and what the server answered, which may hold what was signed, tokens included. So nothing of
it is repeated: a status, a code of S3, and the names of a few well-known causes are looked for in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([A-Za-z]{1,32})")

_BAD_CREDENTIALS = {
    "InvalidAccessKeyId": "access_key_id",
    "SignatureDoesNotMatch": "secret_access_key",
    "InvalidToken": "session_token",
    "ExpiredToken": "session_token",
    "InvalidSecurity": "secret_access_key",
    "TokenRefreshRequired": "session_token",
}
_WRONG_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_CAUSES = (
    (r"ConnectionRefused", "the connection was refused"),
    (r"dns error", "its name is not known"),
    (r"TimedOut|kind: Timeout", "no answer in time"),
    (r"ConnectionReset|IncompleteBody|IncompleteMessage|BrokenPipe|UnexpectedEof|kind: Interrupted|ConnectionAborted",
     "the connection broke"),
    (r"HostUnreachable|NetworkUnreachable", "it cannot be reached"),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What went wrong with a request. `words` hold no secrets."""

    words: str
    option: str = ""
    """The setting that an operator has to mend; empty where it may pass by itself."""
    status: int = 0
    code: str = ""

    @property
    def no_bucket(self) -> bool:
        return self.code == "NoSuchBucket"

    @property
    def out_of_range(self) -> bool:
        """There is an object, and nothing of it where we looked."""
        return self.status == 416

    @property
    def not_implemented(self) -> bool:
        return self.status == 501 or self.code in ("NotImplemented", "NotSupported")


def problem_of(error: BaseException) -> Problem:
    """`error` comes from the client."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _CODE.search(text)) else ""
    if type(error).__name__ == "NotSupportedError":
        return Problem("the store does not support it", status=status, code="NotSupported")
    words, option = _meaning(text, status, code)
    return Problem(words, option, status, code)


def _meaning(text: str, status: int, code: str) -> tuple[str, str]:
    if code == "NoSuchBucket":
        return "there is no such bucket", "url"
    if code in _BAD_CREDENTIALS:
        return f"the store does not accept these credentials ({code})", _BAD_CREDENTIALS[code]
    if "169.254.169.254" in text or "no providers in chain" in text.lower():
        return "no credentials: neither settings, environment, profile nor instance has any", "access_key_id"
    if code in _WRONG_REGION or "BareRedirect" in text or "redirect without LOCATION" in text:
        return "the store says that the bucket is in another region", "region"
    if status in (401, 403):
        return f"access is denied ({code or status})", "access_key_id"
    if found := _CERTIFICATE.search(text):
        return f"its certificate is not trusted ({found[1]})", "tls_ca_file"
    if "InvalidContentType" in text or "InvalidMessage" in text:
        return "it does not speak TLS; for plain HTTP write http:// and allow it", "allow_http"
    if re.search(r"Parse\(\s*Version", text) or "HTTP request to an HTTPS server" in text:
        return "it does not speak plain HTTP; write https://", "endpoint"
    if status or code:
        return f"the store answered {' '.join(filter(None, (str(status or ''), code)))}", ""
    for pattern, words in _CAUSES:
        if re.search(pattern, text):
            return words, ""
    return "the request failed", ""
