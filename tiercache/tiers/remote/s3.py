"""The S3 tier: one object for each chunk, its 88-byte header before the payload, in any store that speaks S3.

- A *get* is one request for a chunk of up to twice `part_bytes`, and several concurrent ranges for a larger chunk. A worker
  thread copies each range into the slot when it arrives, since the client (obstore) cannot read into given memory. The
  ranges cover the largest chunk, so the length of the object need not be known.
- A *put* is one request, sent from the slot without a copy. It replaces any existing object, so repeating a put does no
  harm.
- *Lookups* are one HEAD for each key, many at once. Names are hashes of chunks, so a listing would have to read the whole
  layout.
- Names are `<prefix>/<fingerprint>/<2 hex digits>/<key>`, which spreads them over the store's partitions.

The tier evicts nothing, since a bucket has no limit. If the bucket's life-cycle rules expire an object, it is a miss.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.store import S3Store

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import CorruptChunk, TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier
from tiercache.tiers.remote.s3_settings import Identity, S3Address, read_address, read_identity

logger = logging.getLogger("tiercache.s3")

T = TypeVar("T")

PART_BYTES = 4 << 20
_REQUESTS = 32
"""Limit of transfers in flight, each with up to two parts of the client's memory; also the limit of other requests."""
_COPYING_THREADS = 2
_EXIT_S = 0.5
_ASLEEP_S = 5.0
_LET_GO_S = 0.02
_SLOWEST_BYTES_PER_S = 8 << 20
"""A transfer may exceed `timeout_s` by the time that its bytes take at this rate."""
_ENDPOINT_VARIABLES = {"AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}


class S3Tier(RemoteTier):
    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self.compression = settings.make_compression()
        self.address = read_address(settings)
        self.pending = 0
        """Number of requests in flight."""
        self.store: Any = None
        """The client's store for all requests except puts."""
        self.put_store: Any = None
        """The client's store for puts, which has a longer timeout."""
        self._part_bytes = int(settings.options.get("part_bytes", PART_BYTES))
        self._directory = "/".join(filter(None, (self.address.prefix, settings.fingerprint.hex())))
        self._workers = Workers(settings.name, max(_COPYING_THREADS, min(4, settings.concurrency)))
        self._transfers = asyncio.Semaphore(_REQUESTS)
        self._questions = asyncio.Semaphore(_REQUESTS)

    def describe(self) -> str:
        return f"{self.name} ({self.address})"

    def path(self, key: ChunkKey) -> str:
        """Return the name of the chunk's object in the bucket."""
        return f"{self._directory}/{key.hex()[:2]}/{key.hex()}"

    async def _connect(self) -> None:
        """Check the settings. A store that does not answer does not stop the start; a store that refuses does."""
        identity = await self._workers.submit(read_identity, self.settings)
        self.store, self.put_store = await self._workers.submit(
            _make_stores, self.settings, self.address, identity, self._part_bytes
        )
        _open_tiers.add(self)
        atexit.unregister(_let_go)
        atexit.register(_let_go)
        try:
            await self._get_range(f"{self._directory}/none", 0, 1)
        except RequestFailed as error:
            if error.option:
                raise self.settings.error(
                    error.option, f"{self.address} with credentials of {identity.source}: {error.words}"
                ) from None
            logger.warning("%s; the tier is used as soon as it answers", error)

    async def _disconnect(self) -> None:
        self._workers.close()

    async def close(self) -> None:
        await super().close()
        if not self.pending:
            _open_tiers.discard(self)
        await asyncio.sleep(_LET_GO_S)  # the client's threads release Python's objects

    # Operations

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        largest_bytes = min(into.nbytes, self.settings.chunk_bytes or into.nbytes)
        total_bytes = PACKED_BYTES + largest_bytes + 1  # the byte after the largest chunk reveals a longer object
        step = -(-total_bytes // max(1, total_bytes // self._part_bytes))
        header = bytearray(PACKED_BYTES)

        async def fetch(start: int) -> int | None:
            """Return the number of the object's bytes in this range, once they are in place."""
            part = await self._get_range(self.path(key), start, min(start + step, total_bytes))
            if not part:
                return None if part is None else 0
            # The thread takes the buffer out of the list, so that it is freed there and not on the event loop.
            box = [part]
            del part
            return await self._workers.submit(_place, box, start, header, into)

        began_s = time.monotonic()
        done = await asyncio.gather(*map(fetch, range(0, total_bytes, step)), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        if None in done:
            return None
        lengths = [length for length in done if isinstance(length, int)]
        got_bytes = sum(lengths)
        self.compression.received(got_bytes, time.monotonic() - began_s)
        if any(length != step for length in lengths[: -(-got_bytes // step) - 1]):
            raise CorruptChunk(f"{self.name}: {key.hex()}: the object changed while it was read")
        return await self._workers.submit(
            self.verified, key, header[:got_bytes], into, max(0, got_bytes - PACKED_BYTES)
        )

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        with await self._workers.submit(self.pack, key, payload) as stored:
            body = [stored.header.pack(), stored.payload.data]
            began_s = time.monotonic()
            async with self._transfers:
                # A multipart put takes more requests.
                put = obstore.put_async(self.put_store, self.path(key), body, use_multipart=False)
                await self._ask("put", put)
            self.compression.sent(stored.header.payload_bytes, time.monotonic() - began_s)
            return True

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        # The first failure ends all requests: a store that does not answer costs one timeout for all keys.
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._exists(self.path(key))) for key in keys]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [each.result() for each in asked]

    async def _delete(self, key: ChunkKey) -> bool:
        path = self.path(key)
        if not await self._exists(path):
            return False
        async with self._questions:
            await self._ask("delete", obstore.delete_async(self.store, path))
        return True

    # Requests, which each end within about `timeout_s` without progress

    async def _get_range(self, path: str, start: int, end: int) -> Any | None:
        """Return a buffer with bytes `start` to `end` of the object, or up to its end; None if there is no object."""
        async with self._transfers:
            try:
                return await self._ask("get", obstore.get_range_async(self.store, path, start=start, end=end))
            except RequestFailed as error:
                if error.status != _OUT_OF_RANGE:
                    raise
                return b""

    async def _exists(self, path: str) -> bool:
        async with self._questions:
            return await self._ask("head", obstore.head_async(self.store, path)) is not None

    async def _ask(self, what: str, answer: Awaitable[T]) -> T | None:
        """Wait for the answer to a request; None if there is no such object. Raises RequestFailed.

        The client's exceptions hold the request and the answer, so they are neither raised nor chained.
        """
        self.pending += 1
        try:
            return await answer
        except Exception as error:
            if isinstance(error, FileNotFoundError) and "<Code>NoSuchBucket<" not in str(error):
                return None
            failure = RequestFailed(f"{self.name}: {what} of {self.address}", str(error))
        finally:
            self.pending -= 1
        raise failure


_open_tiers: set[S3Tier] = set()


def _let_go() -> None:
    """Wait until the client's threads sleep before the interpreter ends: a thread that returns to Python later aborts it."""
    until_s = time.monotonic() + _EXIT_S
    while any(tier.pending for tier in _open_tiers) and time.monotonic() < until_s:
        time.sleep(_LET_GO_S)
    until_s, asleep = time.monotonic() + _ASLEEP_S, 0
    while asleep < 2 and time.monotonic() < until_s:
        time.sleep(_LET_GO_S)  # without the GIL, which a thread may need before it can sleep
        asleep = asleep + 1 if _threads_sleep() else 0


def _threads_sleep() -> bool:
    """Return True if every thread of the client waits for something."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            _, name, state = re.split(r"[()]", (task / "stat").read_text(), maxsplit=2)
            if name.startswith("tokio") and state.split()[0] != "S":
                return False
    return True


def _place(box: list[Any], start: int, header: bytearray, into: np.ndarray) -> int:
    """Copy the buffer in `box`, which begins at byte `start` of the object. Return its length. Runs in a thread."""
    part = np.frombuffer(box.pop(), dtype=np.uint8)
    in_header = max(0, PACKED_BYTES - start)
    if in_header:
        head = part[:in_header]
        header[start : start + head.nbytes] = head.tobytes()
    payload = part[in_header:]
    at = start + in_header - PACKED_BYTES
    target = into[at : at + payload.nbytes]
    np.copyto(target, payload[: target.nbytes])
    return part.nbytes


# The client library


def _make_stores(settings: RemoteSettings, address: S3Address, identity: Identity, part_bytes: int) -> tuple[Any, Any]:
    """Return the store for reads and the store for puts. Reads files: runs in a thread. Raises ConfigError."""
    given = settings.options
    options: dict[str, Any] = {"disable_bulk_delete": True}  # some stores lack it, and chunks are deleted one by one
    if given.get("express"):
        options["s3_express"] = True
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        # The payload has its own checksum, and SHA-256 over it would be the slowest part of a put.
        options["unsigned_payload"] = True
    if address.endpoint is not None:
        options["endpoint"] = address.endpoint
    at_amazon = address.endpoint is None and not os.environ.keys() & _ENDPOINT_VARIABLES
    by_host = address.virtual_hosted
    options["virtual_hosted_style_request"] = at_amazon and "." not in address.bucket if by_host is None else by_host
    region = address.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or identity.region
    if region:
        options["region"] = region
    if identity.anonymous:
        options["skip_signature"] = True
    elif identity.provider is not None:
        options["credential_provider"] = identity.provider
    longest_s = max(0.1, min(1.0, settings.timeout_s / 4))
    options["retry_config"] = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=settings.timeout_s / 2),
        "backoff": {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=longest_s), "base": 2},
    }
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=settings.timeout_s)}
    if given.get("allow_http"):
        client["allow_http"] = True
    if ca_file := given.get("tls_ca_file"):
        try:
            client["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as error:
            raise settings.error("tls_ca_file", f"{ca_file} cannot be read: {error.strerror}") from None

    def make(silence_s: float, length_bytes: int) -> Any:
        """Limit the wait for the next byte to `silence_s`, and the whole request by its length."""
        whole_s = silence_s + length_bytes / _SLOWEST_BYTES_PER_S
        timeouts = {"read_timeout": timedelta(seconds=silence_s), "timeout": timedelta(seconds=whole_s)}
        try:
            return S3Store(address.bucket, client_options=client | timeouts, **options)
        except Exception as error:
            option = "tls_ca_file" if ca_file else "url"
            raise settings.error(option, f"the client does not take it ({type(error).__name__})") from None

    # A put is answered after all of it was sent, so the first byte of the answer may take as long as the whole.
    sending_s = settings.chunk_bytes / _SLOWEST_BYTES_PER_S
    writes = make(settings.timeout_s + sending_s, settings.chunk_bytes)
    return make(settings.timeout_s, part_bytes), writes


# The client's exceptions. Their text may hold signed data and tokens, so none of it is repeated: it is only searched
# for a status, an S3 code and the names of well-known causes.

_OUT_OF_RANGE = 416
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


class RequestFailed(TierUnavailable):
    """A request to the store failed. Holds no secrets.

    `option` is the setting that the operator has to change; empty for temporary problems.
    """

    def __init__(self, request: str, text: str) -> None:
        """`text` is the text of the client's exception."""
        self.status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else ""
        self.words, self.option = _meaning(text, self.status, code)
        super().__init__(f"{request}: {self.words}")


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
        needs = "a tier needs s3:GetObject, s3:PutObject, s3:DeleteObject, and s3:ListBucket to be told what is missing"
        return f"access is denied ({code or status}); {needs}", "access_key_id"
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
