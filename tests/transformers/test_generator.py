"""Requests one after the other, cancelled ones, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from tests.transformers.models import CHUNK_TOKENS, Open, make_model, tokens
from tiercache.errors import CacheClosed, LayoutError
from tiercache.integrations.transformers import Generator, ModelKv

PROMPT = tokens(7 * CHUNK_TOKENS + 5)
SHORT = GenerationConfig(max_new_tokens=2, do_sample=False)


@pytest.fixture
def kv() -> ModelKv:
    return ModelKv(make_model("llama"), chunk_tokens=CHUNK_TOKENS)


@contextmanager
def held(model: Any, number: int, before: Callable[[], object] = lambda: None) -> Iterator[tuple[HeldStep, list[int]]]:
    """The model's step of this number waits until it is let go on. Yields it, and the steps so far."""
    step, steps = HeldStep(), []

    def count(*_: object) -> None:
        steps.append(len(steps) + 1)
        if len(steps) == number:
            before()
            step.reached.set()
            assert step.go_on.wait(30)

    hook = model.register_forward_hook(count)
    yield step, steps
    hook.remove()


@pytest.fixture
async def generator(kv: ModelKv, open_cache: Open) -> AsyncIterator[Generator]:
    async with open_cache(kv) as cache, Generator(cache, kv) as generator:
        yield generator


class HeldStep:
    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 30)


async def test_many_at_once_get_their_own_answers(generator: Generator) -> None:
    prompts = [tokens(40, seed) for seed in range(4)]
    alone = [await generator.generate(one, SHORT, cached=False) for one in prompts]
    for hit_tokens in (0, 32):
        together = await asyncio.gather(*(generator.generate(one, SHORT) for one in prompts))
        assert [one.ids for one in together] == [one.ids for one in alone]
        assert {one.hit_tokens for one in together} == {hit_tokens}


async def test_what_a_cancelled_request_has_computed_is_stored(kv: ModelKv, generator: Generator) -> None:
    with held(kv.model, 3) as (step, steps):
        asking = asyncio.create_task(generator.generate(PROMPT, SHORT))
        await step.until_reached()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        step.go_on.set()
        answer = await generator.generate(PROMPT, SHORT)
    assert len(steps) == 3 + 4 + 2, "three chunks, then four others and two steps of the answer"
    assert answer.hit_tokens == 3 * CHUNK_TOKENS


async def test_closing_waits_until_all_is_stored(kv: ModelKv, open_cache: Open) -> None:
    async with open_cache(kv) as cache:
        async with Generator(cache, kv) as generator:
            await generator.generate(PROMPT, SHORT)
        assert (await generator.prefixes.load(PROMPT)).hit_tokens == 7 * CHUNK_TOKENS
        with pytest.raises(CacheClosed):
            await generator.generate(PROMPT, SHORT)


@pytest.mark.parametrize("step_of_close", [3, 9])
async def test_a_request_that_closing_cuts_off_is_told_and_stored(kv: ModelKv, open_cache: Open, step_of_close: int) -> None:
    """In its prompt, and in its answer. So is one that still waits for its turn."""
    settings = GenerationConfig(max_new_tokens=9, do_sample=False)
    async with open_cache(kv) as cache, Generator(cache, kv) as generator:
        with held(kv.model, step_of_close) as (step, _):
            asking = asyncio.create_task(generator.generate(PROMPT, settings))
            await step.until_reached()
            waiting = asyncio.create_task(generator.generate(PROMPT, settings))
            await asyncio.sleep(0)
            closing = asyncio.create_task(generator.close())
            await asyncio.sleep(0)
            step.go_on.set()
            for one in (asking, waiting):
                with pytest.raises(CacheClosed):
                    await one
            await closing
        assert (await generator.prefixes.load(PROMPT)).hit_tokens == min(step_of_close, 7) * CHUNK_TOKENS


async def test_what_goes_wrong_is_raised_and_stores_nothing(generator: Generator) -> None:
    with pytest.raises(ValueError, match="max_length"):
        await generator.generate(PROMPT, GenerationConfig(max_length=10))
    assert (await generator.prefixes.load(PROMPT)).hit_tokens == 0
    assert (await generator.generate(PROMPT, SHORT)).hit_tokens == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_no_answer_is_stored_during_which_weights_changed(kv: ModelKv, generator: Generator, cancelled: bool) -> None:
    def change() -> None:
        kv.model.load_state_dict({name: value * 1.5 for name, value in kv.model.state_dict().items()})

    with held(kv.model, 3, change) as (step, _):
        asking = asyncio.create_task(generator.generate(PROMPT, SHORT))
        await step.until_reached()
        if cancelled:
            asking.cancel()
        else:
            step.go_on.set()
        with pytest.raises(asyncio.CancelledError if cancelled else LayoutError):
            await asking
        step.go_on.set()
        await generator.close()
    assert not (await generator.prefixes.cache.lookup_keys(generator.prefixes.keys(PROMPT))).chunks


@pytest.mark.parametrize("from_model", [False, True])
async def test_the_cache_is_used_whatever_the_settings_say(kv: ModelKv, generator: Generator, from_model: bool) -> None:
    expected = await generator.generate(PROMPT, GenerationConfig(max_new_tokens=12, do_sample=False))
    off = GenerationConfig(max_new_tokens=12, do_sample=False, use_cache=None if from_model else False)
    kv.model.generation_config.use_cache = False
    answer = await generator.generate(PROMPT, off)
    assert answer.ids == expected.ids and answer.hit_tokens == 7 * CHUNK_TOKENS
    await generator.close()
    assert off.use_cache is (None if from_model else False), "the caller's settings are not changed"


OTHER_WAYS = {
    "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "use_mtp": True, "penalty_alpha": 0.6, "dola_layers": "low",
    "cache_implementation": "static", "is_assistant": True, "num_beams": 2,
}  # fmt: skip


@pytest.mark.parametrize("from_model", [False, True])
@pytest.mark.parametrize(
    "setting", [*({name: value} for name, value in OTHER_WAYS.items()), {"num_return_sequences": 2, "do_sample": True}]
)
async def test_ways_to_decode_that_do_not_go_on_behind_a_cache_are_refused(
    kv: ModelKv, generator: Generator, setting: dict[str, Any], from_model: bool
) -> None:
    settings = GenerationConfig(max_new_tokens=2, **({} if from_model else setting))
    if from_model:
        kv.model.generation_config.update(**setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        await generator.generate(PROMPT, settings)


async def test_a_chunked_prefill_is_ignored_and_the_models_own_refused(kv: ModelKv, generator: Generator) -> None:
    expected = await generator.generate(PROMPT, SHORT)
    chunked = GenerationConfig(max_new_tokens=2, do_sample=False, prefill_chunk_size=8)
    assert (await generator.generate(PROMPT, chunked)).ids == expected.ids
    kv.model.generation_config.prefill_chunk_size = 8
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        await generator.generate(PROMPT, SHORT)


class Streamer(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ended = threading.Event()

    def put(self, value: Any) -> None:
        self.told += value.reshape(-1).tolist()

    def end(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()


async def test_a_streamer_is_told_all_and_ended_once(generator: Generator) -> None:
    streamer = Streamer()
    answer = await generator.generate(PROMPT, SHORT, streamer=streamer)
    assert streamer.told == answer.ids and streamer.ended.is_set()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_streamer_is_ended_however_its_request_ends(kv: ModelKv, generator: Generator, how: str) -> None:
    streamer, waiting, refused, late = (Streamer() for _ in range(4))
    with held(kv.model, 1) as (step, _):
        asking = asyncio.create_task(generator.generate(PROMPT, SHORT, streamer=streamer))
        await step.until_reached()
        gives_up = asyncio.create_task(generator.generate(PROMPT, SHORT, streamer=waiting))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.wait([gives_up])
        with pytest.raises(ValueError, match="num_beams"):
            await generator.generate(PROMPT, GenerationConfig(num_beams=2), streamer=refused)
        if how == "cancelled":
            asking.cancel()
        closing = asyncio.create_task(generator.close())
        await asyncio.sleep(0)
        step.go_on.set()
        await asyncio.gather(asking, closing, return_exceptions=True)
    with pytest.raises(CacheClosed):
        await generator.generate(PROMPT, SHORT, streamer=late)
    assert all(one.ended.is_set() and not one.told for one in (streamer, waiting, refused, late))


async def test_a_prefetch_brings_a_prefix_from_disk_into_memory(generator: Generator) -> None:
    await generator.generate(PROMPT, SHORT)
    await generator.close()
    await generator.prefixes.cache.flush()
    generator.prefixes.cache.clear_hot()
    progress = await generator.prefixes.cache.prefetch(generator.prefixes.stored_as(PROMPT))
    assert progress.promoted == 7
    assert (await generator.prefixes.load(PROMPT)).hit_by_tier["cpu"] == 7 * CHUNK_TOKENS
