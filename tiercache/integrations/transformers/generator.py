"""Run `generate` from an event loop: one model, one compute thread, and prefixes from tiercache."""

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
from tiercache.errors import CacheClosed
from tiercache.integrations.transformers.kv_cache import TieredCache
from tiercache.integrations.transformers.model_kv import ModelKv, positions, prefill
from tiercache.integrations.transformers.prefix_cache import PrefixCache

_COMPUTE_AGAIN = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "cache_implementation",
    "is_assistant",
)
"""Settings of decoding methods that do not continue a filled cache and would compute tokens twice."""
_WHY = "it does not go on behind a cache that is filled"

_ONE_ANSWER = ("num_beams", "num_return_sequences")


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    """Token ids of the prompt and the answer."""
    prompt_tokens: int
    hit_tokens: int
    """Tokens of the prompt that were loaded instead of computed."""
    hit_by_tier: dict[str, int]
    """Loaded tokens by source tier."""

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_tokens :]


class Generator:
    """Answers requests one after another, in order of arrival. Use `async with`, or `await close()` at the end.

    A prompt is computed chunk by chunk even after a miss. So results are identical bit for bit, as long as the stored
    KV was computed as a prompt (generated tokens are computed one by one and round differently), and a cancelled
    request ends within a chunk.
    """

    def __init__(self, cache: TierCache, kv: ModelKv) -> None:
        self.prefixes = PrefixCache(cache, kv)
        self.kv = kv
        self._thread = ThreadPoolExecutor(1, "model")
        self._turn = asyncio.Lock()
        self._stops: set[threading.Event] = set()
        self._last: asyncio.Task[None] | None = None
        """The thread's last request and the store of its KV, which may have ended. The next one begins after it."""
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
        """Continue `ids`: load the stored prefix, compute the rest, and store the new KV after the answer.

        `settings` are those of the model's own `generate` for a single conversation. Beams, batches, and assisted or
        contrastive decoding raise ValueError; `prefill_chunk_size` and `use_cache` have no effect. `streamer` gets the
        tokens on the model's thread and has to pass them to the loop, as AsyncTextIteratorStreamer does; it is ended
        once, however the request ends. `cached=False` neither loads nor stores, and does not check the weights.
        Cancellation stops the model after the current token or chunk, and the computed KV is stored. Raises the errors
        of `generate`; LayoutError if the weights changed during the computation, in which case nothing is stored; and
        CacheClosed if the generator is closed before the answer, in which case the computed KV is stored.
        """
        computing: asyncio.Future[list[int]] | None = None
        stop = threading.Event()
        self._stops.add(stop)
        try:
            self._check_open()
            if not len(ids):
                raise ValueError("ids: expected at least one token, found none")
            ids = [int(one) for one in ids]
            settings = _settings(self.kv.model, settings)
            if cached:
                self.prefixes.cache.warm_soon(self.prefixes.stored_as(ids, salt=salt))
            async with self._turn:
                if self._last is not None:
                    await asyncio.wait([self._last])
                past = await self.prefixes.load(ids, salt=salt) if cached else TieredCache(self.kv, salt)
                self._check_open()  # the generator may have been closed during the wait
                passed_on = None if streamer is None else _PassedOn(streamer)
                computing = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._compute, past, ids, settings, passed_on, stop, cached
                )
                if streamer is not None:
                    computing.add_done_callback(lambda _: streamer.end())
                self._last = asyncio.create_task(self._store(past, computing, cached))
                computed = await asyncio.shield(computing)
                if stop.is_set():  # `close` stopped the answer
                    raise CacheClosed("the generator was closed while it answered")
        finally:
            stop.set()
            self._stops.discard(stop)
            if streamer is not None and computing is None:
                streamer.end()
        return Answer(computed, len(ids), past.hit_tokens, past.hit_by_tier)

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the generator is closed")

    async def close(self) -> None:
        """Stop the computation, whose requests raise CacheClosed, and wait until the computed KV is stored.

        Idempotent. The cache stays open.
        """
        self._closed = True
        for stop in self._stops:
            stop.set()
        await asyncio.to_thread(self._thread.shutdown)
        if self._last is not None:
            await asyncio.wait([self._last])

    async def _store(self, past: TieredCache, computing: asyncio.Future[list[int]], cached: bool) -> None:
        """Wait for the model's thread. With `cached`, store the computed KV. asyncio logs an error of the store."""
        await asyncio.wait([computing])
        if computing.exception() is None and cached:
            await self.prefixes.store(past, computing.result())

    # On the model's thread

    def _compute(
        self,
        past: TieredCache,
        ids: list[int],
        settings: GenerationConfig,
        streamer: _PassedOn | None,
        stop: threading.Event,
        cached: bool,
    ) -> list[int]:
        """Return all ids, or the computed ids of a request that was stopped within its prompt.

        With `cached`, raises LayoutError if weights changed.
        """
        model = self.kv.model
        prompt = torch.tensor([ids], device=model.device)
        whole = (len(ids) - 1) // self.kv.chunk_tokens * self.kv.chunk_tokens
        computed: list[int]
        for begin in range(past.get_seq_length(), whole, self.kv.chunk_tokens):
            if stop.is_set():
                computed = ids[:begin]
                break
            prefill(model, past, prompt, begin + self.kv.chunk_tokens)
        else:
            answered = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # otherwise it is guessed from tokens that look like padding
                generation_config=settings,
                past_key_values=past,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_Stopped(stop)]),
                **positions(model, len(ids)),
            )
            computed = answered[0].tolist()
        if cached:
            self.kv.check_unchanged()
        return computed


def _settings(model: Any, settings: GenerationConfig | None) -> GenerationConfig:
    """Return a copy of `settings` that continues a filled cache. Raises ValueError if that is impossible.

    Unset values come from the model's own settings, as in `generate`.
    """
    own = model.generation_config
    settings = copy.copy(settings or own)
    settings.use_cache = True
    settings.return_dict_in_generate = False
    settings.prefill_chunk_size = None  # it would compute the prefix again, after itself
    found = {name: _first(getattr(settings, name, None), getattr(own, name, None)) for name in _COMPUTE_AGAIN}
    found["prefill_chunk_size"] = getattr(own, "prefill_chunk_size", None)  # None does not override it
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
    """Stop when no caller waits for the answer."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device, dtype=torch.bool)


class _PassedOn(BaseStreamer):  # type: ignore[misc]
    """Pass tokens on. `generate` ends its streamer on success only, so the generator ends the caller's."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer

    def put(self, value: Any) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        pass
