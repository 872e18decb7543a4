"""examples/serve_fastapi.py's app on the test's own loop, above a model of random weights: what it refuses and forgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.examples import load_example
from tests.transformers.models import CHUNK_TOKENS, make_model
from tiercache import Config

TEXT = " ".join(f"w{number}" for number in range(2, 2 + 5 * CHUNK_TOKENS))
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("serve_fastapi")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its words are w0 to w299."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", chat_template=TEMPLATE)
    tokenizer.save_pretrained(directory)
    return directory


class Served:
    def __init__(self, app: Any, client: httpx.AsyncClient) -> None:
        self.chat = app.state.chat
        self.client = client

    async def ask(self, session: str, **more: Any) -> None:
        response = await self.client.post("/chat", json={"session": session, "text": TEXT, "max_tokens": 2, **more})
        assert '"done": true' in response.text

    async def type(self, session: str) -> int:
        """Of how many chunks it fetches."""
        response = await self.client.post("/typing", json={"session": session})
        assert response.status_code == 200
        chunks: int = response.json()["chunks"]
        return chunks


@pytest.fixture
async def server(example: ModuleType, model: Path, tmp_path: Path) -> AsyncIterator[Served]:
    settings = {"max_local_cpu_size": 0.02, "local_disk": str(tmp_path / "kv"), "max_local_disk_size": 0.1}
    config = Config.load(overrides={"chunk_size": CHUNK_TOKENS, **settings}, environ={})
    app = example.make_app(config, model)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://example") as client:
        yield Served(app, client)


async def test_typing_fetches_what_the_session_is_known_to_begin_with(server: Served) -> None:
    await server.ask("one")
    assert await server.type("one") == 5


async def test_typing_makes_no_session(example: ModuleType, server: Served) -> None:
    await server.ask("one")
    for number in range(example.SESSIONS):
        assert await server.type(f"invented {number}") == 0
    assert await server.type("one") == 5 and len(server.chat.sessions) == 1


async def test_a_session_that_is_answering_is_not_forgotten(example: ModuleType, server: Served) -> None:
    busy, idle = (server.chat.session(example.Message(session=name)) for name in ("busy", "idle"))
    busy.busy = True
    for number in range(example.SESSIONS):
        server.chat.session(example.Message(session=f"later {number}"))
    assert server.chat.session(example.Message(session="busy")) is busy
    assert idle not in server.chat.sessions.values() and len(server.chat.sessions) == example.SESSIONS


async def test_what_is_refused_since_too_many_wait_makes_no_session(example: ModuleType, server: Served) -> None:
    server.chat.waiting = example.WAITING
    refused = await server.client.post("/chat", json={"session": "one", "text": TEXT})
    assert refused.status_code == 503 and not server.chat.sessions


@pytest.mark.parametrize(
    "body",
    [
        rb'{"session": "\ud800", "text": "w1"}',
        rb'{"session": "one", "tenant": "\ud800", "text": "w1"}',
        rb'{"session": "one", "text": "w1 \ud800"}',
        rb'{"session": "one", "text": "w1", "max_tokens": Infinity}',
        rb'{"session": "one", "text": "w1", "max_tokens": NaN}',
        rb'{"session": "one", "text": "w1", "max_tokens": 1e999}',
        rb'{"session": NaN, "\ud800": 1, "text": ["\ud800"]}',
        b'{"session": "\xff", "text": "w1"}',
        b"\xff",
        rb'"\ud800"',
        b"[" * 100_000,
        b"",
    ],
    ids=lambda body: ascii(body[:60]),
)
@pytest.mark.parametrize("path", ["/chat", "/typing"])
@pytest.mark.parametrize("type_", ["application/json", "text/plain"])
async def test_what_cannot_be_read_is_refused(server: Served, path: str, body: bytes, type_: str) -> None:
    response = await server.client.post(path, content=body, headers={"content-type": type_})
    if path == "/typing" and b'"session": "one", "text"' in body and type_ == "application/json":
        assert response.status_code == 200, "it takes no text"
    else:
        assert 400 <= response.status_code < 500 and response.json()["detail"]
    assert not server.chat.sessions


async def test_a_refusal_says_what_is_wrong_without_what_was_sent(server: Served) -> None:
    refused = await server.client.post("/chat", json={"session": "one", "text": "w1", "max_tokens": 513})
    assert refused.json()["detail"] == "max_tokens: Input should be less than or equal to 512"


async def test_sessions_of_two_tenants_are_two_for_the_prediction(server: Served) -> None:
    await server.ask("b/c", tenant="a")
    await server.ask("c", tenant="a/b")
    assert len(server.chat.cache.ahead.sessions) == 2


async def test_a_session_that_goes_on_is_known_to_the_prediction(server: Served) -> None:
    for _ in range(2):
        await server.ask("one", text="w1")
    assert server.chat.cache.ahead.sessions.came_back('["", "one"]')
