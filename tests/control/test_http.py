"""HTTP on loopback in front of the socket of a real cache; and `tiercache serve-control` as a process of its own."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.control.conftest import CHUNKS, LAYOUT, RANKS, TOKEN, TOKENS, config_of, token_file
from tiercache import TierCache
from tiercache.control.client import Fleet
from tiercache.control.http import make_app, server_config
from tiercache.control.messages import LARGEST_MESSAGE_BYTES


@asynccontextmanager
async def serve(place: Path, *arguments: str, **environment: str) -> AsyncIterator[Any]:
    """A client of a server for the sockets at `place`; at the end, what the server printed is in `client.said`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "tiercache", "serve-control", "--socket", str(place / "c.sock"), "--port", "0"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    said = ""
    while (found := re.search(r"running on (http://\S+)", said)) is None:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, said
        said += line.decode()
    async with httpx.AsyncClient(base_url=found[1], trust_env=False, timeout=30) as client:
        client.pid = process.pid  # type: ignore[attr-defined]
        try:
            yield client
        finally:
            process.send_signal(signal.SIGINT)
            client.said = said + (await asyncio.wait_for(process.stdout.read(), 30)).decode()
            await process.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Any]:
    """A client of a server in this process."""
    config = server_config(make_app(Fleet([tmp_path / "c.sock"]), TOKEN), "127.0.0.1", 0)
    running = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        serving = asyncio.create_task(running.serve([listening]))
        url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
            yield client
        running.should_exit = True
        await serving


async def samples(client: Any) -> dict[frozenset[str], float]:
    """Of /metrics: by name and values of the labels."""
    text = (await client.get("/metrics")).text
    return {
        frozenset((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_gateway_announces_a_prefix_and_finds_out_what_became_of_it(cache: TierCache, server: Any) -> None:
    begun = await server.post("/v1/prefetch", json={"tokens": TOKENS, "deadline_s": 2})
    assert begun.status_code == 200
    handle = begun.json()["handle"]
    ended = (await server.post("/v1/progress", json={"handle": handle, "until_s": 20})).json()
    assert ended.items() >= {"handle": handle, "done": True, "asked": CHUNKS, "promoted": CHUNKS, "missing": 0}.items()
    assert cache.lookup_hot(cache.keys(TOKENS)) == CHUNKS
    keys = cache.keys(TOKENS)
    await cache.get_into(keys, [np.empty(LAYOUT.chunk_bytes, np.uint8) for _ in keys])
    found = await samples(server)
    expected: dict[tuple[str, ...], float] = {
        ("tiercache_prefetch_bytes_total", "hints", "used"): CHUNKS * LAYOUT.chunk_bytes,
        ("tiercache_prefetch_bytes_total", "hints", "wasted"): 0,
        ("tiercache_hits_total", "cpu"): CHUNKS,
        ("tiercache_up",): 1,
        ("tiercache_tier_read_bytes_total", "disk"): CHUNKS * LAYOUT.chunk_bytes,
        ("tiercache_breaker", "disk", "closed"): 1,
    }
    assert {labels: found.get(frozenset((*labels, "c.sock"))) for labels in expected} == expected


async def test_every_command_has_a_path(cache: TierCache, server: Any) -> None:
    tokens = {"tokens": TOKENS}
    expected: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("lookup", tokens, {"asked": CHUNKS, "found": CHUNKS, "by_tier": {"cpu": 0, "disk": CHUNKS}}),
        ("pin", tokens | {"ttl_s": 60, "until_s": 20}, {"asked": CHUNKS, "pinned": CHUNKS}),
        ("unpin", tokens, {}),
        ("began", tokens | {"session": "s"}, {"chunks": CHUNKS}),
        ("ended", tokens | {"session": "s", "kind": "tool"}, {"chunks": CHUNKS}),
        ("over", {"session": "s"}, {}),
        ("forget", tokens, {}),
    ]
    for command, body, answer in expected:
        response = await server.post(f"/v1/{command}", json=body)
        assert response.status_code == 200, response.text
        assert answer.items() <= (response.json() | {"by_tier": answer.get("by_tier")}).items()
    assert (await server.get("/v1/statistics")).json()["c.sock"]["rank"] == 0
    handle = (await server.post("/v1/prefetch", json=tokens)).json()["handle"]
    assert (await server.post("/v1/cancel", json={"handle": handle})).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"])
async def test_without_the_token_nothing_is_said_or_done(cache: TierCache, server: Any, header: str | None) -> None:
    del server.headers["authorization"]
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in (("POST", "/v1/forget"), ("GET", "/v1/statistics"), ("GET", "/metrics"), ("POST", "/v1/none")):
        response = await server.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["kind"] == "unauthorised"
    assert (await server.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "says"),
    [
        ("prefetch", b"{", 400, "malformed", "malformed body"),
        ("prefetch", b'{"tokens": ' + b"[" * 100_000, 400, "malformed", "malformed body"),
        ("prefetch", b'{"command": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, 400, "malformed", "malformed body"),
        ("prefetch", b"\xff\xfe", 400, "malformed", "malformed body"),
        ("progress", b'{"handle": "none"}', 404, "unknown", "no prefetch 'none'"),
        ("lookup", b'{"tokens": [1], "lora": {"name": "a", "path": "/a"}}', 409, "refused", "in vLLM only"),
        ("prefect", b"{}", 404, "unknown", "no command 'prefect'; known are prefetch, "),
    ],
)
async def test_what_cannot_be_done_is_a_sentence_in_json(
    cache: TierCache, server: Any, path: str, body: bytes, status: int, kind: str, says: str
) -> None:
    response = await server.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["kind"] == kind
    assert re.search(says, response.json()["error"]["message"])


async def test_other_paths_methods_and_content_types_are_json_too(cache: TierCache, server: Any) -> None:
    for response, status in (
        (await server.get("/nowhere"), 404),
        (await server.get("/v1/prefetch"), 405),
        (await server.post("/v1/prefetch", content=b"{}", headers={"content-type": "text/plain"}), 415),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_oversized_body_is_refused_announced_or_not(cache: TierCache, server: Any) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(LARGEST_MESSAGE_BYTES // 2**20 + 1):
            yield b" " * 2**20

    for content in (b" " * (LARGEST_MESSAGE_BYTES + 1), parts()):
        headers = {"content-type": "application/json"}
        try:
            response = await server.post("/v1/prefetch", content=content, headers=headers)
        except httpx.WriteError:
            continue  # it was hung up on before it had sent everything
        assert response.status_code == 413
        assert response.json()["error"]["kind"] == "too_large"


async def test_dead_cache_is_said_to_be_unreachable(tmp_path: Path, server: Any) -> None:
    """None was ever there; then one is; then it has gone; at last something hangs there that never answers."""
    response = await server.post("/v1/lookup", json={"tokens": TOKENS})
    assert (response.status_code, response.json()["error"]["kind"]) == (503, "unreachable")
    assert "control_socket" in response.json()["error"]["message"]
    async with TierCache.open(config_of(tmp_path), LAYOUT):
        assert (await server.post("/v1/lookup", json={"tokens": TOKENS})).status_code == 200
    assert (await server.post("/v1/lookup", json={"tokens": TOKENS})).status_code == 503
    assert await samples(server) == {}
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "c.sock"))
        assert (await server.post("/v1/lookup", json={"tokens": TOKENS})).status_code == 503
        assert await samples(server) == {frozenset(("tiercache_up", "c.sock")): 0}


async def test_a_cache_that_hangs_does_not_keep_the_figures_of_others_from_a_scrape(tmp_path: Path, server: Any) -> None:
    async with TierCache.open(config_of(tmp_path), RANKS[0]):
        with socket.socket(socket.AF_UNIX) as frozen:
            frozen.bind(str(tmp_path / "c.sock.1"))
            frozen.listen()
            async with asyncio.timeout(15):
                found = await samples(server)
    assert [found[frozenset(("tiercache_up", f"c.sock.{rank}"))] for rank in (0, 1)] == [1, 0]


async def test_all_ranks_are_told_and_answer_as_one(tmp_path: Path, server: Any) -> None:
    """A prefix is where every rank has its part of it; a rank that is gone is named."""
    async with TierCache.open(config_of(tmp_path), RANKS[0]) as one:
        async with TierCache.open(config_of(tmp_path), RANKS[1]) as other:
            for cache, chunks in ((one, 8), (other, 5)):
                await cache.store(TOKENS[: 16 * chunks], [b"x" * LAYOUT.chunk_bytes] * chunks)
                await cache.flush()
                cache.clear_hot()
            found = (await server.post("/v1/lookup", json={"tokens": TOKENS})).json()
            assert (found["found"], found["asked"], found["by_tier"]) == (5, CHUNKS, {"cpu": 0, "disk": 5})
            handle = (await server.post("/v1/prefetch", json={"tokens": TOKENS})).json()["handle"]
            ended = (await server.post("/v1/progress", json={"handle": handle, "until_s": 20})).json()
            assert (ended["done"], ended["promoted"], ended["missing"]) == (True, 5, 7)
            assert (one.lookup_hot(one.keys(TOKENS)), other.lookup_hot(other.keys(TOKENS))) == (8, 5)
            each = (await server.post("/v1/statistics", json={})).json()
            assert {name: answer["rank"] for name, answer in each.items()} == {"c.sock.0": 0, "c.sock.1": 1}
            metrics = await samples(server)
            assert all(metrics[frozenset(("tiercache_up", f"c.sock.{rank}"))] == 1 for rank in (0, 1))
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "c.sock.1"))
            found = (await server.post("/v1/lookup", json={"tokens": TOKENS})).json()
            assert found["found"] == 8
            assert [Path(path).name for path in found["failed"]] == ["c.sock.1"]


@pytest.mark.parametrize("words", [[], ["--host", "127.0.0.2"]], ids=["default", "another address"])
async def test_without_a_token_only_this_machine_by_its_name_is_served(
    cache: TierCache, tmp_path: Path, words: list[str]
) -> None:
    """A page in a browser whose name was pointed at the loopback address says another host."""
    async with serve(tmp_path, "--no-token", *words) as client:
        assert (await client.post("/v1/lookup", json={"tokens": TOKENS})).json()["found"] == CHUNKS
        other = await client.post("/v1/lookup", json={"tokens": TOKENS}, headers={"host": "evil.example"})
        assert other.status_code == 400
        assert (await client.get("/healthz", headers={"host": "evil.example"})).status_code == 400


@pytest.mark.parametrize("from_file", [False, True], ids=["environment", "file"])
async def test_token_is_asked_for_and_never_printed(cache: TierCache, tmp_path: Path, from_file: bool) -> None:
    arguments = ["--token-file", str(token_file(tmp_path))] if from_file else []
    async with serve(tmp_path, *arguments, TIERCACHE_CONTROL_TOKEN="" if from_file else TOKEN) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"authorization": f"bearer {TOKEN}"})).status_code == 200
    assert "running on" in client.said and TOKEN not in client.said
