"""A chat server: FastAPI on uvloop, a small model by transformers, and tiercache below it.

    python examples/serve_fastapi.py [--port 8400] [--directory DIR]

http://127.0.0.1:8400/ shows the tiers live and lets you chat. Answers are streamed. A session's KV is fetched from disk
while its user types, and loaded when the question comes. $TIERCACHE_CONFIG_FILE names the configuration of the tiers;
without it there are 0.25 GB of memory above 2 GB of disk. `examples/serve_fastapi_load.py` sends load. The server listens
on this host only, and has no login.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer
from transformers.utils import logging as transformers_logging

from tiercache import Config, TierCache
from tiercache.config.plan import plan_of
from tiercache.demo.model import prepare_model
from tiercache.demo.server import quickest_dtype
from tiercache.integrations.transformers import Answer, Generator, ModelKv
from tiercache.signals import ended_by_signals

PAGE = Path(__file__).with_name("serve_fastapi.html")
SESSIONS = 200
"""More sessions make the server forget the oldest ones that are not answering; their chunks stay until they are evicted."""
WAITING = 64
"""Requests at a time. More are refused, since a queue without a limit would time out for all."""
BUSY = "the session has a question that is not answered yet"
SHOWN_SESSIONS = 12
SHOWN_ANSWERS = 120
TICK_S = 0.25
DEFAULTS = {"chunk_size": 128, "max_local_cpu_size": 0.25, "max_local_disk_size": 2.0}


class Message(BaseModel):
    session: str = Field(min_length=1, max_length=100)
    tenant: str = Field("", max_length=100)
    """The owner of the session: tenants share neither sessions nor KV. A real server takes this from a login."""


class Question(Message):
    text: str = Field(min_length=1, max_length=100_000)
    max_tokens: int = Field(64, ge=1, le=512)
    cached: bool = True
    """False computes the whole prompt, to compare."""


@dataclass
class Session:
    name: str
    tenant: str
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """Token ids of the last prompt and its answer, with which the next prompt begins."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of their chunks, for the page."""
    busy: bool = False

    @property
    def subject(self) -> str:
        """The session's name for the prediction of its next turn."""
        return json.dumps([self.tenant, self.name])


@dataclass(frozen=True)
class Asked:
    """One answer, for the page."""

    number: int
    ttft_s: float
    prompt_tokens: int
    hit_by_tier: dict[str, int]
    cached: bool


class Pieces(TextStreamer):  # type: ignore[misc]
    """Called on the model's thread; passes pieces of text to the loop. An empty piece marks the first token."""

    def __init__(self, tokenizer: Any, give: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._give = give
        self._loop = asyncio.get_running_loop()
        self._is_first = True

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt and self._is_first:
            self._is_first = False
            self._loop.call_soon_threadsafe(self._give, "")
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._loop.call_soon_threadsafe(self._give, text)


class Chat:
    """The sessions, and the figures that the page shows."""

    def __init__(self, cache: TierCache, generator: Generator, tokenizer: Any) -> None:
        self.cache = cache
        self.generator = generator
        self.tokenizer = tokenizer
        self.sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self.asked: deque[Asked] = deque(maxlen=SHOWN_ANSWERS)
        self.count = 0
        self.waiting = 0
        self.loop_lag_s = 0.0
        self.ending = asyncio.Event()
        """Set to end the event streams of pages, for which the server would wait otherwise."""
        self.tokens = {"computed": 0, **{tier.name: 0 for tier in (cache.cpu, *cache.tiers)}}
        """Tokens of prompts, by the source of their KV."""
        self.caps = {tier.name: tier.cap_bytes for tier in plan_of(cache.config)}

    def session(self, message: Message) -> Session:
        """Return the session; make it if there is none."""
        if (known := self.known(message)) is not None:
            return known
        if len(self.sessions) >= SESSIONS:
            oldest = next((key for key, one in self.sessions.items() if not one.busy), None)
            if oldest is not None:
                del self.sessions[oldest]
        session = self.sessions[message.tenant, message.session] = Session(message.session, message.tenant)
        return session

    def known(self, message: Message) -> Session | None:
        key = message.tenant, message.session
        session = self.sessions.get(key)
        if session is not None:
            self.sessions.move_to_end(key)
        return session

    def prompt(self, session: Session, text: str) -> list[int]:
        messages = [*session.messages, {"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(rendered, add_special_tokens=False).input_ids)

    def typing(self, session: Session | None) -> int:
        """Prefetch the chunks of a session whose user has begun to type, and return their number."""
        if session is not None and session.ids and not session.busy:
            keys = self.generator.prefixes.stored_as(session.ids, salt=session.tenant)
            return self.cache.prefetch(keys, deadline=1.0).progress.asked
        return 0

    async def answer(self, session: Session, question: Question) -> AsyncIterator[dict[str, Any]]:
        """Yield pieces of the answer, and at last its figures."""
        began_s, first_s = time.perf_counter(), 0.0
        if session.busy:  # another question of this session came first
            raise ValueError(BUSY)
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        text = ""
        session.busy = True
        self.waiting += 1
        asking = asyncio.create_task(self._ask(session, question, Pieces(self.tokenizer, pieces.put_nowait)))
        asking.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                first_s = first_s or time.perf_counter() - began_s
                text += piece
                yield {"text": piece}
            answer = asking.result()
        finally:
            asking.cancel()  # the client may have closed the connection
            session.busy = False
            self.waiting -= 1
        session.messages += [{"role": "user", "content": question.text}, {"role": "assistant", "content": text}]
        asked = self._note(session, question, answer, first_s)
        yield {"done": True, "prompt_tokens": asked.prompt_tokens, "hit_by_tier": asked.hit_by_tier, "ttft_s": first_s}

    async def _ask(self, session: Session, question: Question, pieces: Pieces) -> Answer:
        ids = await asyncio.to_thread(self.prompt, session, question.text)
        room = self.generator.kv.model.config.max_position_embeddings - question.max_tokens
        if len(ids) > room:
            raise ValueError(f"the session has become too long: {len(ids)} tokens, the model takes at most {room}")
        settings = GenerationConfig(
            max_new_tokens=question.max_tokens,
            do_sample=False,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        if question.cached:
            keys = self.generator.prefixes.stored_as(ids, salt=session.tenant)
            self.cache.ahead.began(session.subject, keys)
        return await self.generator.generate(
            ids, settings, salt=session.tenant, streamer=pieces, cached=question.cached
        )

    def _note(self, session: Session, question: Question, answer: Answer, ttft_s: float) -> Asked:
        session.ids = answer.ids
        if question.cached:
            prefixes = self.generator.prefixes
            session.keys = prefixes.keys(answer.ids, salt=session.tenant)
            self.cache.ahead.ended(session.subject, prefixes.stored_as(answer.ids, salt=session.tenant))
        for tier, tokens in answer.hit_by_tier.items():
            self.tokens[tier] += tokens
        self.tokens["computed"] += answer.prompt_tokens - answer.hit_tokens
        self.count += 1
        asked = Asked(self.count, ttft_s, answer.prompt_tokens, answer.hit_by_tier, question.cached)
        self.asked.append(asked)
        return asked

    def snapshot(self, seen: int) -> dict[str, Any]:
        """Return all figures of the page, with the answers after number `seen`. Looks up in memory only."""
        statistics = self.cache.statistics()
        tiers = (self.cache.cpu, *self.cache.tiers)
        shown = [one for one in self.sessions.values() if one.keys or one.busy][-SHOWN_SESSIONS:]
        return {
            "tiers": [self._tier(statistics, tier.name) for tier in tiers],
            "sessions": [
                {
                    "name": one.name,
                    "busy": one.busy,
                    "chunks": [sum(tier.contains(key) << bit for bit, tier in enumerate(tiers)) for key in one.keys],
                }
                for one in reversed(shown)
            ],
            "asked": [vars(one) for one in self.asked if one.number > seen],
            "tokens": self.tokens,
            "count": self.count,
            "waiting": self.waiting,
            "loop_lag_ms": round(1000 * self.loop_lag_s, 1),
            "chunk_tokens": self.cache.layout.chunk_tokens,
            "chunk_bytes": self.cache.layout.chunk_bytes,
            "model": self.cache.layout.model,
            "prefetched_bytes": {
                name: sum(getattr(account, f"{name}_bytes") for account in statistics.prefetch.values())
                for name in ("promoted", "used", "late", "wasted")
            },
        }

    def _tier(self, statistics: Any, name: str) -> dict[str, Any]:
        tier, writer, reads = statistics.tiers[name], statistics.writers.get(name), statistics.reads.get(name)
        cap_bytes = self.caps.get(name)
        return {
            "name": name,
            "occupied_bytes": tier.occupied_bytes,
            "cap_bytes": statistics.slots * self.cache.layout.chunk_bytes if name == "cpu" else cap_bytes,
            "resident": tier.resident,
            "hits": statistics.reader.hits.get(name, 0),
            "reads": tier.reads,
            "writes": tier.writes,
            "evicted": tier.evicted,
            "queued": writer.queued + writer.writing if writer else 0,
            "queued_bytes": writer.queued_bytes if writer else 0,
            "reading": reads.reading if reads else 0,
            "breaker": statistics.breakers.get(name, "closed"),
        }

    async def watch_loop(self) -> None:
        """Measure how late the loop runs its timers: the maximum of the last second."""
        lags: deque[float] = deque(maxlen=20)
        while True:
            due_s = time.perf_counter() + 0.05
            await asyncio.sleep(0.05)
            lags.append(max(0.0, time.perf_counter() - due_s))
            self.loop_lag_s = max(lags)


def event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


async def events(found: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Report an error as the last event of an answer, since the HTTP status was sent before."""
    try:
        async for one in found:
            yield event(one)
    except Exception as error:
        yield event({"error": str(error)})


async def live(chat: Chat) -> AsyncIterator[str]:
    seen = 0
    while not chat.ending.is_set():
        yield event(chat.snapshot(seen))
        seen = chat.count
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await chat.ending.wait()


class Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.chat.ending.set()  # type: ignore[union-attr]
        await super().shutdown(sockets)


async def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
    """Leave out the input, which may contain characters that JSON cannot represent."""
    found = (": ".join([".".join(map(str, one["loc"][1:])), one["msg"]]) for one in error.errors())
    return JSONResponse({"detail": "; ".join(one.removeprefix(": ") for one in found)}, 422)


def make_app(config: Config, model_directory: Path) -> FastAPI:
    """Return the application. `app.state.chat` exists while it runs."""

    def load() -> tuple[ModelKv, Any]:
        transformers_logging.disable_progress_bar()
        dtype = getattr(torch, quickest_dtype())
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=dtype).eval()
        return ModelKv(model, chunk_tokens=config.chunk_size), AutoTokenizer.from_pretrained(model_directory)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        kv, tokenizer = await asyncio.to_thread(load)
        async with TierCache.open(config, kv.layout) as cache, Generator(cache, kv) as generator:
            app.state.chat = Chat(cache, generator, tokenizer)
            watching = asyncio.create_task(app.state.chat.watch_loop())
            try:
                yield
            finally:
                watching.cancel()

    app = FastAPI(title="tiercache", lifespan=running, exception_handlers={RequestValidationError: refuse})

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    @app.post("/chat")
    async def chat(question: Question) -> StreamingResponse:
        it: Chat = app.state.chat
        if it.waiting >= WAITING:
            raise HTTPException(503, f"{WAITING} requests are waiting", headers={"Retry-After": "5"})
        session = it.session(question)
        if session.busy:
            raise HTTPException(409, BUSY)
        return StreamingResponse(events(it.answer(session, question)), media_type="text/event-stream")

    @app.post("/typing")
    async def typing(message: Message) -> dict[str, int]:
        return {"chunks": app.state.chat.typing(app.state.chat.known(message))}

    @app.get("/live")
    async def live_events() -> StreamingResponse:
        return StreamingResponse(live(app.state.chat), media_type="text/event-stream")

    @app.get("/state")
    async def state() -> dict[str, Any]:
        found: dict[str, Any] = app.state.chat.snapshot(0)
        return found

    return app


def main(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8400,
    directory: Annotated[
        Path | None, typer.Option(help="Directory of the disk tier; by default one that is removed at the end.")
    ] = None,
    hot_gb: Annotated[float, typer.Option(help="Memory of the hot cache, without a configuration file.")] = 0.25,
) -> None:
    with tempfile.TemporaryDirectory(prefix="tiercache-serve-") as place:
        overrides = {**DEFAULTS, "max_local_cpu_size": hot_gb, "local_disk": str(directory or Path(place) / "kv")}
        config = Config.load(overrides={} if os.environ.get("TIERCACHE_CONFIG_FILE") else overrides)
        app = make_app(config, prepare_model())
        settings = uvicorn.Config(
            app, host="127.0.0.1", port=port, loop="uvloop", log_level="warning", timeout_graceful_shutdown=5
        )
        server = Server(settings)
        with suppress(KeyboardInterrupt):  # raised again after all is closed
            server.run()
        if not server.started:
            raise typer.Exit(1)  # uvicorn has logged the reason


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
