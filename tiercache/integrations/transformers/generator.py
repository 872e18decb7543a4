"""`generate` for an event loop: one model, one thread that computes, and prefixes from tiercache."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed
from tiercache.integrations.transformers.kv_cache import TieredCache
from tiercache.integrations.transformers.model_kv import ModelKv, positions, prefill
from tiercache.integrations.transformers.prefix_cache import PrefixCache

_STORES = 2
"""Conversations that may wait to be stored, each with its KV. Before more are computed, one has to be done."""

_COMPUTE_AGAIN = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "cache_implementation",
    "is_assistant",
)
"""Settings of ways to decode that do not begin behind a cache that is filled: tokens would be computed twice."""
_WHY = "it does not go on behind a cache that is filled"

_ONE_ANSWER = ("num_beams", "num_return_sequences")


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    """Prompt and answer."""
    prompt_tokens: int
    hit_tokens: int
    """Tokens of the prompt that were loaded instead of computed."""
    hit_by_tier: dict[str, int]
    """The tiers that these were found in."""

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_tokens :]


class Generator:
    """Answers one request after the other, in the order in which they come. `async with`, or `await close()` at the end.

    A prompt is computed a chunk at a time, whether some of it came from the cache or not: so the numbers are the same, bit
    for bit, as long as what is stored was computed as a prompt (what was generated was computed a token at a time, and
    rounds otherwise), and a request that is cancelled ends within a chunk.
    """

    def __init__(self, cache: TierCache, kv: ModelKv) -> None:
        self.prefixes = PrefixCache(cache, kv)
        self.kv = kv
        self._thread = ThreadPoolExecutor(1, "model")
        self._turn = asyncio.Lock()
        self._stops: set[threading.Event] = set()
        self._computing: asyncio.Future[list[int]] | None = None
        """The thread's last request, which may have ended."""
        self._stores: dict[asyncio.Task[int], list[ChunkKey]] = {}
        """The running stores, with the first chunk of each."""
        self._closed = False

    async def __aenter__(self) -> Generator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        ids: Sequence[int],
        settings: GenerationConfig | None = None,
        *,
        salt: str = "",
        streamer: Any = None,
        cached: bool = True,
    ) -> Answer:
        """Go on behind `ids`: load what is known of them, compute the rest, and store what is new behind the answer.

        `settings` as for the model's own `generate` (one conversation: no beams, no batch, and no assisted or
        contrastive decoding, for which a ValueError is raised; its `prefill_chunk_size` and `use_cache` have no effect).
        `streamer` is told the tokens on the model's thread, and is to be one that hands them over to the loop, such
        as AsyncTextIteratorStreamer; it is ended once, however the request ends. `cached=False` neither loads nor
        stores. Cancelled, the model stops after the token or chunk that it is at, and what was computed is stored.
        Raises what `generate` raises, and LayoutError where the weights changed before all was computed: nothing is
        stored then, and there is no answer, since some of it would be the old model's and some the new one's.
        `cached=False` does not look at the weights. Raises CacheClosed when the generator is closed before the answer
        is there; what was computed is stored.
        """
        told = None if streamer is None else _EndedOnce(streamer)
        try:
            return await self._generate(ids, settings, salt, told, cached)
        finally:
            if told is not None and not told.is_of_the_thread:
                told.end()

    async def _generate(
        self,
        ids: Sequence[int],
        settings: GenerationConfig | None,
        salt: str,
        streamer: _EndedOnce | None,
        cached: bool,
    ) -> Answer:
        self._check_open()
        if not len(ids):
            raise ValueError("ids: expected at least one token, found none")
        ids = [int(one) for one in ids]
        settings = _settings(self.kv.model, settings)
        if cached:
            self.prefixes.cache.warm_soon(self.prefixes.stored_as(ids, salt=salt))
        stop = threading.Event()
        self._stops.add(stop)
        try:
            async with self._turn:
                first = self.prefixes.keys(ids[: self.kv.chunk_tokens], salt=salt)
                await self._settled(first)
                past = await self.prefixes.load(ids, salt=salt) if cached else TieredCache(self.kv, salt)
                self._check_open()  # this has waited
                computing = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._compute_checked, past, ids, settings, streamer, stop, cached
                )
                if cached:
                    computing.add_done_callback(lambda done: self._store(past, first, done))
                self._computing = computing
                if streamer is not None:
                    streamer.is_of_the_thread = True
                computed = await asyncio.shield(computing)
                if stop.is_set():  # by `close`, and the answer is cut off
                    raise CacheClosed("the generator was closed while it answered")
        finally:
            stop.set()
            self._stops.discard(stop)
        return Answer(computed, len(ids), past.hit_tokens, past.hit_by_tier)

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the generator is closed")

    async def close(self) -> None:
        """Stop what is computed, whose requests get CacheClosed, and wait until what was computed is stored. Idempotent. The
        cache stays open."""
        self._closed = True
        for stop in self._stops:
            stop.set()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.sleep(0)  # the callbacks that begin to store
        if self._stores:
            await asyncio.wait(self._stores)

    async def _settled(self, first: list[ChunkKey]) -> None:
        """Wait until the thread is free, there is room for another conversation, and what begins alike is stored."""
        if self._computing is not None:
            await asyncio.wait([self._computing])
        if alike := [task for task, key in self._stores.items() if key == first]:
            await asyncio.wait(alike)
        while len(self._stores) >= _STORES:
            await asyncio.wait(self._stores, return_when=asyncio.FIRST_COMPLETED)

    def _store(self, past: TieredCache, first: list[ChunkKey], done: asyncio.Future[list[int]]) -> None:
        """Begin to store what the thread has computed."""
        if not done.cancelled() and done.exception() is None:
            task = asyncio.get_running_loop().create_task(self.prefixes.store(past, done.result()))
            self._stores[task] = first
            task.add_done_callback(self._stored)

    def _stored(self, task: asyncio.Task[int]) -> None:
        del self._stores[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "what was generated could not be stored", "exception": error, "task": task}
            )

    # In the model's thread

    def _compute_checked(self, *request: Any) -> list[int]:
        """Compute. The last argument says whether the weights have to be those of what is stored."""
        *what, cached = request
        streamer: _EndedOnce | None = what[3]
        try:
            computed = self._compute(*what)
            if cached:
                self.kv.check_unchanged()
            return computed
        finally:
            if streamer is not None:
                streamer.end()

    def _compute(
        self,
        past: TieredCache,
        ids: list[int],
        settings: GenerationConfig,
        streamer: _EndedOnce | None,
        stop: threading.Event,
    ) -> list[int]:
        """Return all ids; of a request that was stopped in its prompt, those that were computed."""
        model = self.kv.model
        prompt = torch.tensor([ids], device=model.device)
        whole = (len(ids) - 1) // self.kv.chunk_tokens * self.kv.chunk_tokens
        for begin in range(past.get_seq_length(), whole, self.kv.chunk_tokens):
            if stop.is_set():
                return ids[:begin]
            prefill(model, past, prompt, begin + self.kv.chunk_tokens)
        answered = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),  # else it is guessed from tokens that look like padding
            generation_config=settings,
            past_key_values=past,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([_Stopped(stop)]),
            **positions(model, len(ids)),
        )
        found: list[int] = answered[0].tolist()
        return found


def _settings(model: Any, settings: GenerationConfig | None) -> GenerationConfig:
    """Return a copy of `settings` that goes on behind a filled cache. Raises ValueError if there is none.

    What `settings` leave open, `generate` takes from the model's own.
    """
    own = model.generation_config
    settings = copy.copy(settings or own)
    settings.use_cache = True
    settings.return_dict_in_generate = False
    settings.prefill_chunk_size = None  # it would compute the prefix again, behind itself
    found = {name: _first(getattr(settings, name, None), getattr(own, name, None)) for name in _COMPUTE_AGAIN}
    found["prefill_chunk_size"] = getattr(own, "prefill_chunk_size", None)  # which None does not override
    if found["cache_implementation"] == "hybrid":
        found["cache_implementation"] = None  # `generate` ignores it, and old models still have it
    for name, value in found.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected None, here and in model.generation_config, found {value!r}: {_WHY}")
    for name in _ONE_ANSWER:
        if (value := _first(getattr(settings, name, None), getattr(own, name, None))) not in (None, 1):
            raise ValueError(
                f"{name}: expected 1, here and in model.generation_config, found {value!r}: one answer at a time"
            )
    return settings


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


class _Stopped(StoppingCriteria):  # type: ignore[misc]
    """Stop when the answer is not waited for any more."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device, dtype=torch.bool)


class _EndedOnce(BaseStreamer):  # type: ignore[misc]
    """End a streamer however a request ends: `generate` does so only at its own end, and a reader would wait for ever."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_ended = False
        self.is_of_the_thread = False
        """The model's thread ends it."""

    def put(self, value: Any) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._streamer.end()
