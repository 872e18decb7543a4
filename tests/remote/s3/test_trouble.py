"""The S3 tier and stores that say no, say nothing, break off, or are not there."""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.remote.s3.conftest import settings_for
from tests.servers.certificates import make_certificates
from tests.servers.s3 import KEY, SECRET, STRANGER, STRANGERS_SECRET, S3Server
from tests.tiers.opened import open_tier
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.remote.s3 import S3Tier

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SECRETS = (SECRET, STRANGERS_SECRET, "hunter2")


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def answering(*responses: bytes) -> Answer:
    """Each request gets the next response, the last one again and again; then the connection is closed."""
    left = list(responses)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _whole_request(reader)
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return answer


async def _whole_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
    return head


def response(status: str, code: str = "") -> bytes:
    body = f"<Error><Code>{code}</Code><StringToSign>hunter2</StringToSign></Error>" if code else ""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


MISSING = response("404 Not Found", "NoSuchKey")
HALF = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Length: 65625\r\nContent-Range: bytes 0-65624/65625\r\n"
    b'ETag: "x"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n' + bytes(30000)
)
"""Response that breaks off in the middle of a chunk."""


@asynccontextmanager
async def server(answer: Answer, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[str]:
    connections: dict[asyncio.StreamWriter, asyncio.Task[Any]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        connections[writer] = serving
        try:
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client gave up
        finally:
            writer.close()
            del connections[writer]

    listening = await asyncio.start_server(serve, "127.0.0.1", port, ssl=tls)
    number = listening.sockets[0].getsockname()[1]
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{number}"
    finally:
        listening.close()
        serving = list(connections.values())
        for writer in list(connections):
            writer.transport.abort()
        await asyncio.gather(*serving)


@asynccontextmanager
async def opened(endpoint: str, **options: Any) -> AsyncIterator[S3Tier]:
    async with open_tier(S3Tier(settings_for(endpoint, **{"timeout_s": 1.0} | options))) as tier:
        yield tier


async def refusal(endpoint: str, **options: Any) -> str:
    """The sentence with which the tier does not open. Holds no secrets, and nothing hangs on it that does."""
    with pytest.raises(ConfigError) as caught:
        async with opened(endpoint, **options):
            pass
    error: BaseException | None = caught.value
    assert error is not None and error.__cause__ is None and error.__suppress_context__
    assert not any(secret in str(error) for secret in SECRETS)
    return str(error)


def operations(tier: S3Tier) -> list[Callable[[], Awaitable[object]]]:
    key, payload = chunk(1)
    return [
        lambda: tier.read(key, page_aligned(CHUNK_BYTES)),
        lambda: tier.write(key, payload, CHUNK_BYTES),
        lambda: tier.probe([chunk(number)[0] for number in range(200)]),
        lambda: tier.remove(key),
    ]


# A store that says no at the start


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"bucket": "nobodys-bucket"}, "url", "no such bucket"),
        ({"access_key_id": "AKIAUNKNOWN"}, "access_key_id", r"credentials of the settings: .*InvalidAccessKeyId"),
        ({"secret_access_key": "hunter2"}, "secret_access_key", "SignatureDoesNotMatch"),
        (
            {"access_key_id": STRANGER, "secret_access_key": STRANGERS_SECRET},
            "access_key_id",
            r"access is denied \(AccessDenied\); .* s3:ListBucket",
        ),
        ({"bucket": "elsewhere", "skip_signature": True}, "access_key_id|skip_signature|url", "denied|no such bucket"),
    ],
)
async def test_what_the_operator_has_to_mend_is_said_at_the_start(
    s3_server: S3Server, options: dict[str, Any], key: str, words: str
) -> None:
    said = await refusal(s3_server.endpoint, timeout_s=5.0, **options)
    assert re.match(rf"remote_storage_plugin\.s3\.test\.({key}): ", said)
    assert re.search(words, said)


async def test_credentials_of_the_environment_are_used_and_named(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    none = {"access_key_id": None, "secret_access_key": None}
    async with opened(s3_server.endpoint, timeout_s=5.0, **none) as tier:
        assert await tier.probe([chunk(99)[0]]) == 0
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    assert "credentials of the environment: " in await refusal(s3_server.endpoint, timeout_s=5.0, **none)


@pytest.mark.parametrize(
    "answer", [response("301 Moved", "PermanentRedirect"), response("400 Bad", "AuthorizationHeaderMalformed")]
)
async def test_a_wrong_region_is_said_at_the_start(answer: bytes) -> None:
    async with server(answering(answer)) as endpoint:
        assert "s3.test.region: " in await refusal(endpoint)


async def test_https_to_a_store_without_tls_is_said_at_the_start(s3_server: S3Server) -> None:
    said = await refusal(s3_server.endpoint.replace("http:", "https:"), timeout_s=5.0)
    assert "s3.test.allow_http: " in said and "does not speak TLS" in said


@pytest.mark.needs("openssl")
async def test_a_certificate_that_nobody_knows_is_said_and_can_be_trusted(tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificates = make_certificates(tmp_path)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    async with server(answering(MISSING), context) as endpoint:
        said = await refusal(endpoint, allow_http=False)
        assert "s3.test.tls_ca_file: " in said and "not trusted" in said
        async with opened(endpoint, allow_http=False, tls_ca_file=str(certificates / "ca.pem")) as tier:
            assert await tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES)) is None


async def test_plain_http_to_a_store_with_tls_is_said_at_the_start() -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x15\x03\x01\x00\x02\x02\x16")  # a fatal alert: unexpected message
        await writer.drain()

    async with server(alert) as endpoint:
        assert "s3.test.endpoint: " in await refusal(endpoint)


async def test_without_any_credentials_the_tier_does_not_start() -> None:
    none = {"access_key_id": None, "secret_access_key": None}
    async with server(answering(MISSING)) as endpoint:
        assert "no credentials" in await refusal(endpoint, **none)


async def test_a_certificate_file_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    assert "s3.test.tls_ca_file: /nowhere cannot be read" in await refusal("http://127.0.0.1:1", tls_ca_file="/nowhere")
    place = tmp_path / "ca.pem"
    for text in ("junk", "-----BEGIN CERTIFICATE-----\nhunter2\n-----END CERTIFICATE-----\n"):
        place.write_text(text)
        said = await refusal("http://127.0.0.1:1", tls_ca_file=str(place))
        assert "s3.test.tls_ca_file: the client does not take it" in said


@pytest.mark.parametrize(("virtual_hosted", "name"), [(True, "/deep/"), (False, "/chunks/deep/")])
async def test_the_bucket_is_in_the_path_or_in_the_name_of_the_host(virtual_hosted: bool, name: str) -> None:
    asked: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await _whole_request(reader)).split(b" ")[1].decode())
        writer.write(MISSING)
        await writer.drain()

    async with server(note) as endpoint:
        tier = S3Tier(settings_for(endpoint, prefix="deep"))
        # As if the name of the host had the bucket in it, which no resolver here would know.
        tier.address = replace(tier.address, virtual_hosted=virtual_hosted)
        await tier.open()
        await tier.close()
    assert asked[0].startswith(name)


# A store that is away


async def test_a_store_that_is_down_does_not_stop_the_start_and_comes_back_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with server(say_nothing) as endpoint:
        port = int(endpoint.rpartition(":")[2])
    with caplog.at_level(logging.WARNING, "tiercache.s3"):
        tier = S3Tier(settings_for(endpoint, timeout_s=1.0))
        await tier.open()
    assert "s3.test: get of s3://chunks/tiercache" in caplog.text and "connection was refused" in caplog.text
    for operation in operations(tier):
        with pytest.raises(TierUnavailable, match=r"s3\.test: .*refused"):
            await operation()
    async with server(answering(MISSING), port=port):
        assert await tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES)) is None
    await tier.close()


async def test_a_store_that_hangs_costs_no_more_than_its_time_out() -> None:
    loop = asyncio.get_running_loop()
    async with server(say_nothing) as endpoint, opened(endpoint, timeout_s=1.0) as tier:
        for operation in operations(tier):
            began_s = loop.time()
            with pytest.raises(TierUnavailable, match="no answer in time"):
                await operation()
            assert loop.time() - began_s < 2.0


async def test_a_transfer_that_breaks_off_is_unavailable_and_no_hit() -> None:
    async with server(answering(MISSING, HALF)) as endpoint, opened(endpoint) as tier:
        with pytest.raises(TierUnavailable, match="the connection broke"):
            await tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES))
        assert tier.statistics().reads == 0


async def test_a_transfer_that_stalls_is_given_up() -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _whole_request(reader)
        writer.write(HALF)
        await reader.read()

    async with server(stall) as endpoint, opened(endpoint, timeout_s=1.0) as tier:
        with pytest.raises(TierUnavailable):
            await tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (response("503 Slow Down", "SlowDown"), "answered 503 SlowDown"),
        (response("500 Internal", "InternalError"), "answered 500 InternalError"),
        (response("403 Forbidden", "ExpiredToken"), "ExpiredToken"),
        (response("404 Not Found", "NoSuchBucket"), "no such bucket"),
    ],
)
async def test_a_store_that_fails_later_is_unavailable(answer: bytes, words: str) -> None:
    async with server(answering(MISSING, answer)) as endpoint, opened(endpoint) as tier:
        with pytest.raises(TierUnavailable, match=words) as caught:
            await tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES))
        assert "hunter2" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__


async def test_close_does_not_wait_for_requests_that_hang() -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _whole_request(reader)
        if asked.is_set():
            await reader.read()
        writer.write(MISSING)
        asked.set()

    async with server(once) as endpoint, opened(endpoint, timeout_s=2.5) as tier:
        read = asyncio.create_task(tier.read(chunk(1)[0], page_aligned(CHUNK_BYTES)))
        while not tier.pending:
            await asyncio.sleep(0)
        began_s = loop.time()
        await tier.close()
        assert loop.time() - began_s < 2.0
        with pytest.raises(TierUnavailable):
            await read


async def test_a_closed_tier_is_unavailable() -> None:
    async with server(answering(MISSING)) as endpoint, opened(endpoint) as tier:
        await tier.close()
        for operation in operations(tier):
            with pytest.raises(TierUnavailable, match="closed"):
                await operation()
