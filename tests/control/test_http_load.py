"""What strangers may take of `tiercache serve-control`, a process of its own: nobody needs a token to open connections."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.control.conftest import TOKEN, token_file
from tests.control.test_http import serve

MIB = 1 << 20
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/lookup HTTP/1.1\r\nContent-Type: application/json\r\n"
AUTHORIZED_POST = POST + b"Host: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"


def memory_bytes(client: Any, field: str = "VmRSS") -> int:
    (line,) = (line for line in Path(f"/proc/{client.pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def server(tmp_path: Path) -> Any:
    return serve(tmp_path, "--token-file", str(token_file(tmp_path)))


async def connect(client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def push(client: Any, first: bytes, again: bytes, size_bytes: int, silent_s: float = 2.0) -> None:
    """`first`, then `again` and again up to `size_bytes`, until the server takes no more or hangs up; never read."""
    reader, writer = await connect(client)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.transport.set_write_buffer_limits(0)
    part = again * (65536 // len(again))
    try:
        writer.write(first)
        for _ in range(size_bytes // len(part)):
            writer.write(part)
            async with asyncio.timeout(silent_s):
                await writer.drain()
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def test_headers_without_an_end_are_cut_off(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        assert (await client.get("/healthz")).status_code == 200
        before_bytes = memory_bytes(client)
        await push(client, GET, b"a:b\r\n", 74 * MIB)
        await push(client, GET + b"a:", b"b", 74 * MIB)
        await push(client, b"GET /", b"b", 74 * MIB)
        assert memory_bytes(client, "VmHWM") - before_bytes < 40 * MIB
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "request_bytes", [GET + b"\r\n", AUTHORIZED_POST + b"Content-Length: 2\r\n\r\n{}"], ids=["get", "post"]
)
async def test_sixty_that_ask_ahead_and_never_read_take_little(tmp_path: Path, request_bytes: bytes) -> None:
    async with server(tmp_path) as client:
        assert (await client.get("/healthz")).status_code == 200
        before_bytes = memory_bytes(client)
        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                group.create_task(push(client, b"", request_bytes, 8 * MIB))
        assert memory_bytes(client, "VmHWM") - before_bytes < 120 * MIB
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "said", [b"", POST + b"Host: localhost\r\nContent-Length: 9\r\n\r\n{"], ids=["nothing", "half a body"]
)
async def test_every_request_is_answered_however_many_are_silent(tmp_path: Path, said: bytes) -> None:
    """No second of patience with the silent ones, and those that were hung up on are back at once."""
    async with serve(tmp_path, "--no-token") as client:
        silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        answers = []
        for _ in range(10):
            silent = [one for one in silent if not one[0].at_eof()]
            fresh = [await connect(client) for _ in range(300 - len(silent))]
            for _, writer in fresh:
                writer.write(said)
            silent += fresh
            answer = await client.get("/healthz", headers={"connection": "close"})  # connects, asks and goes
            answers.append(answer.status_code)
        for _, writer in silent:
            writer.transport.abort()
    assert answers == [200] * 10


@pytest.mark.parametrize("sent", [b"", b" " * (65 << 10)], ids=["nothing", "65 KiB"])
async def test_bodies_that_are_announced_and_not_sent_take_nobodys_room(tmp_path: Path, sent: bytes) -> None:
    async with serve(tmp_path, "--no-token") as client:
        silent = [await connect(client) for _ in range(64)]
        for _, writer in silent:
            writer.write(POST + b"Host: [::1]\r\nContent-Length: 1048576\r\n\r\n" + sent)
            await writer.drain()
        began_s = time.monotonic()
        for _ in range(2):
            answer = await client.post("/v1/lookup", json={"tokens": list(range(30_000))})
            assert answer.json()["error"]["kind"] == "unreachable"  # there is no cache: the body was read
        assert time.monotonic() - began_s < 60
        for _, writer in silent:
            writer.transport.abort()


async def test_server_that_stops_says_so_to_who_has_not_sent_all(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        reader, writer = await connect(client)
        writer.write(AUTHORIZED_POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")  # the body is being waited for
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.transport.abort()
    assert "Traceback" not in client.said
    assert b"HTTP/1.1 503 " in answer and b"the server stops" in answer
