"""The client library, and the few requests that the tier makes with it. Everything here belongs to the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.s3.address import S3Address
from tiercache.tiers.remote.s3.credentials import Identity, identity_of
from tiercache.tiers.remote.s3.problems import Problem, problem_of

T = TypeVar("T")

_SLOWEST_BYTES_PER_S = 8 << 20
"""A transfer may take so much longer than `timeout_s`."""
_ENDPOINT_VARIABLES = {"AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}
_EXIT_S = 0.5
_LET_GO_S = 0.02


class RequestFailed(TierUnavailable):
    """A request failed, for a reason that has a name."""

    def __init__(self, message: str, problem: Problem) -> None:
        super().__init__(message)
        self.problem = problem


class S3Client:
    """Requests to one bucket. Their number in flight is bounded; each ends within about `timeout_s` without progress.

    Exceptions of the library never get out, nor do they hang on ours: they hold what was sent and what came back.
    """

    def __init__(self, settings: RemoteSettings, address: S3Address, part_bytes: int, requests: int) -> None:
        """Blocks: reads certificates and profiles. Raises ConfigError."""
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError
            from obstore.store import S3Store
        except ImportError as error:
            raise settings.error(
                "url", f"the s3 tier needs obstore, which cannot be imported ({error}): pip install 'tiercache[s3]'"
            ) from None
        self.name = settings.name
        self.settings = settings
        self.address = address
        self.identity = identity_of(settings)
        self._obstore = obstore
        self._taken = AlreadyExistsError
        self._transfers = asyncio.Semaphore(requests)
        self._questions = asyncio.Semaphore(requests)
        self.pending = 0
        """Requests in flight."""
        self._idle = asyncio.Event()
        self._idle.set()
        options = self._options(settings, address, self.identity)
        self.reads = self._store(S3Store, options, settings.timeout_s, part_bytes)
        # An answer to a put comes after all of it was sent, so its first byte may take as long as the whole.
        sending_s = settings.chunk_bytes / _SLOWEST_BYTES_PER_S
        self.writes = self._store(S3Store, options, settings.timeout_s + sending_s, settings.chunk_bytes)
        _open_clients.add(self)

    @staticmethod
    def _options(settings: RemoteSettings, address: S3Address, identity: Identity) -> dict[str, Any]:
        options: dict[str, Any] = {
            "disable_bulk_delete": True  # not every store has it, and chunks are deleted one by one
        }
        if settings.options.get("express"):
            options["s3_express"] = True
        if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
            # The payload has a checksum of its own; SHA-256 over it costs more than all the rest of a put.
            options["unsigned_payload"] = True
        if address.endpoint is not None:
            options["endpoint"] = address.endpoint
        at_amazon = address.endpoint is None and not os.environ.keys() & _ENDPOINT_VARIABLES
        by_host = address.virtual_hosted
        virtual_hosted = at_amazon and "." not in address.bucket if by_host is None else by_host
        options["virtual_hosted_style_request"] = virtual_hosted
        region = address.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or identity.region
        if region:
            options["region"] = region
        if identity.anonymous:
            options["skip_signature"] = True
        elif identity.provider is not None:
            options["credential_provider"] = identity.provider
        return options

    def _store(self, make: Any, options: dict[str, Any], silence_s: float, length_bytes: int) -> Any:
        try:
            return make(self.address.bucket, **options, **_patience(self.settings, silence_s, length_bytes))
        except OSError as error:
            raise self.settings.error("tls_ca_file", f"{error.filename} cannot be read: {error.strerror}") from None
        except Exception as error:
            option = "tls_ca_file" if self.settings.options.get("tls_ca_file") else "url"
            raise self.settings.error(option, f"the client does not take it ({type(error).__name__})") from None

    async def get(self, path: str, start: int, end: int) -> Any | None:
        """A buffer with what the object has of these bytes; None when there is no such object."""
        async with self._transfers:
            return await self._ask("get", self._obstore.get_range_async(self.reads, path, start=start, end=end))

    async def get_head(self, path: str, length: int) -> tuple[bytes, int] | None:
        """The first bytes of an object, and how long all of it is."""
        async with self._questions:
            result = await self._ask("get", self._obstore.get_async(self.reads, path, options={"range": (0, length)}))
            if result is None:
                return None
            found = await self._ask("get", result.bytes_async())
            return (bytes(found), int(result.meta["size"])) if found is not None else None

    async def put(self, path: str, body: Sequence[Any], *, create: bool) -> bool:
        """Store the buffers of `body`, one after the other, in one request. False: `create`, and there is one already.

        The buffers are not copied, and are in use until this has ended.
        """
        mode = "create" if create else "overwrite"
        async with self._transfers:
            try:
                # In parts it would take more requests and could not be made conditional; it is no quicker either.
                await self._ask("put", self._obstore.put_async(self.writes, path, body, mode=mode, use_multipart=False))
            except _Taken:
                return False
        return True

    async def exists(self, path: str) -> bool:
        async with self._questions:
            return await self._ask("head", self._obstore.head_async(self.reads, path)) is not None

    async def delete(self, path: str) -> None:
        async with self._questions:
            await self._ask("delete", self._obstore.delete_async(self.reads, path))

    async def close(self, give_up_s: float) -> None:
        """Let requests that are in flight end, for a while, and the library's threads let go of what is Python's."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(give_up_s):
                await self._idle.wait()
            _open_clients.discard(self)
        await asyncio.sleep(_LET_GO_S)

    async def _ask(self, what: str, answer: Awaitable[T]) -> T | None:
        self.pending += 1
        self._idle.clear()
        try:
            return await answer
        except FileNotFoundError as error:
            problem = problem_of(error)
            if not problem.no_bucket:
                return None
        except self._taken:
            raise _Taken from None
        except Exception as error:
            problem = problem_of(error)
        finally:
            self.pending -= 1
            if not self.pending:
                self._idle.set()
        raise RequestFailed(f"{self.name}: {what} of {self.address}: {problem.words}", problem)


class _Taken(Exception):
    """There is an object of this name already."""


def _patience(settings: RemoteSettings, silence_s: float, length_bytes: int) -> dict[str, Any]:
    """How long requests are waited for: so long for the next byte, and for all of it."""
    options = settings.options
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=settings.timeout_s),
        "read_timeout": timedelta(seconds=silence_s),
        "timeout": timedelta(seconds=silence_s + length_bytes / _SLOWEST_BYTES_PER_S),
    }
    if options.get("allow_http"):
        client["allow_http"] = True
    if ca_file := options.get("tls_ca_file"):
        client["root_certificate"] = Path(ca_file).read_bytes()
    retry = {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=settings.timeout_s / 2),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=max(0.1, min(1.0, settings.timeout_s / 4))),
            "base": 2,
        },
    }
    return {"client_options": client, "retry_config": retry}


_open_clients: set[S3Client] = set()


@atexit.register
def _let_go() -> None:
    """A thread of the library that comes back to Python while the interpreter ends takes the process down with SIGABRT
    (Rust cannot be unwound as C can). So those that are about to come back get a moment to do it."""
    if not _open_clients:
        return
    until_s = time.monotonic() + _EXIT_S
    while any(client.pending for client in _open_clients) and time.monotonic() < until_s:
        time.sleep(_LET_GO_S)
    time.sleep(_LET_GO_S)
