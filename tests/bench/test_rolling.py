"""The rolling restart's balancer and what it concludes; the servers themselves take minutes to start."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.bench.vllm.rolling import AFTER, RESTARTS, STEADY, Backend, Balancer, Sample, conversations, findings
from tests.bench.vllm.workload import BLOCK_TOKENS, Ask
from tiercache.demo.server import Server

ASK = Ask((1, 2, 3, 4), 1)


def answer(hit_tokens: int) -> bytes:
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": hit_tokens}}}
    events = [json.dumps({"choices": [{"text": "x"}]}), json.dumps(usage), "[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


class Servers:
    """Two servers that answer, or refuse, as a test says."""

    def __init__(self, place: Path) -> None:
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        (place / "log").touch()
        self.backends = [
            Backend(name, 0, place, ExitStack(), Server(f"http://{name}", place / "log", 0), in_rotation=True)
            for name in ("a", "b")
        ]
        self.connection = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))
        self.balancer = Balancer(self.backends, self.connection)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.refused:
            raise httpx.ConnectError("refused")
        if request.url.host in self.broken:
            return httpx.Response(500, content=b"broken")
        return httpx.Response(200, content=answer(2))

    async def servers_of(self, requests: int) -> list[str]:
        del self.balancer.samples[:]
        for _ in range(requests):
            await self.balancer.send(ASK)
        return [sample.server for sample in self.balancer.samples]


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


async def test_requests_go_to_both_in_turn_and_to_one_that_is_in_rotation(servers: Servers) -> None:
    assert sorted(await servers.servers_of(4)) == ["a", "a", "b", "b"]
    servers.backends[0].in_rotation = False
    assert await servers.servers_of(3) == ["b", "b", "b"]
    assert {(sample.hit_tokens, sample.prompt_tokens) for sample in servers.balancer.samples} == {(2, 4)}


async def test_a_refused_connection_is_tried_at_the_other_and_an_error_is_a_failed_request(servers: Servers) -> None:
    servers.refused = {"a"}
    assert await servers.servers_of(3) == ["b", "b", "b"]
    assert not servers.backends[0].in_rotation
    servers.broken = {"b"}
    await servers.servers_of(1)
    assert [sample.ttft_s for sample in servers.balancer.samples] == [None]
    assert "500 broken" in servers.balancer.errors[0]
    servers.backends[1].in_rotation = False
    await servers.servers_of(1)
    assert "no server is in rotation" in servers.balancer.errors[1]


def test_every_turn_continues_a_prompt_with_a_document_before_it() -> None:
    asks = list(itertools.islice(conversations(1), 60))
    assert {ask.prompt for ask in asks} == {ask.prompt for ask in itertools.islice(conversations(1), 60)}
    assert len({ask.prompt[: 6 * BLOCK_TOKENS] for ask in asks}) <= 6
    assert max(len(ask.prompt) for ask in asks) <= 6 * BLOCK_TOKENS + 8 * 64


def test_what_is_said_of_each_goal() -> None:
    before = [Sample(float(number), STEADY, "A", 0.1, 100, 90) for number in range(50)]
    restarts = [Sample(60.0 + number, RESTARTS, "B", 0.11, 100, 90) for number in range(50)]
    after = [Sample(120.0, AFTER, "A", 0.2, 100, 50), Sample(130.0, AFTER, "B", None, 100, 0)]
    said = findings([*before, *restarts, *after], {"A": 119.0, "B": 60.0})
    assert [line.partition(":")[0] for line in said] == ["missed", "missed", "reached", "reached", "missed"]
    assert said[0] == "missed: 1 of 102 requests failed, the goal is 0"
