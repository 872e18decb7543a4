"""What comes from the cache is, bit for bit, what transformers' own cache holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from tests.transformers.models import CHUNK_TOKENS, WINDOW_TOKENS, Open, compute, make_model, tokens
from tiercache.errors import LayoutError
from tiercache.integrations.transformers import Generator, ModelKv, PrefixCache

PROMPT = tokens(7 * CHUNK_TOKENS + 5)
"""Several windows long."""
HIT_TOKENS = 7 * CHUNK_TOKENS
REST = PROMPT[HIT_TOKENS:]


with_windows = pytest.mark.parametrize("kv", ["gemma"], indirect=True)


def own_cache(kv: ModelKv, ids: list[int]) -> DynamicCache:
    """transformers' own, filled in one step."""
    past = DynamicCache(config=kv.model.config)
    compute(kv.model, past, ids)
    return past


async def store(prefixes: PrefixCache, ids: list[int], salt: str = "") -> None:
    past = await prefixes.load([], salt=salt)
    compute(prefixes.kv.model, past, ids)
    assert await prefixes.store(past, ids) == len(ids) // CHUNK_TOKENS * CHUNK_TOKENS


def same(one: Any, other: Any) -> bool:
    """Also with zeroes of another sign, bit for bit."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


async def test_logits_behind_a_hit_are_those_behind_transformers_own_cache(kv: ModelKv, open_cache: Open) -> None:
    own = own_cache(kv, PROMPT[:HIT_TOKENS])
    async with open_cache(kv) as cache:
        prefixes = PrefixCache(cache, kv)
        await store(prefixes, PROMPT[:HIT_TOKENS])
        past = await prefixes.load(PROMPT)
        assert past.hit_tokens == past.get_seq_length() == HIT_TOKENS
        assert past.hit_by_tier["cpu"] == HIT_TOKENS
        assert same(compute(kv.model, past, REST), compute(kv.model, own, REST))
        for mine, its in zip(past.layers, own.layers, strict=True):
            assert same(mine.keys, its.keys) and same(mine.values, its.values)
            assert mine.get_mask_sizes(3) == its.get_mask_sizes(3)
    async with open_cache(kv) as cache:
        again, own = await PrefixCache(cache, kv).load(PROMPT), own_cache(kv, PROMPT[:HIT_TOKENS])
        assert again.hit_by_tier["disk"] == HIT_TOKENS, "after a restart, too"
        assert same(compute(kv.model, again, REST), compute(kv.model, own, REST))


async def test_a_conversation_goes_on_behind_its_answers(kv: ModelKv, prefixes: PrefixCache) -> None:
    """The KV of an answer was computed a token at a time, and is what it was."""
    own = own_cache(kv, PROMPT)
    past = await prefixes.load(PROMPT)
    compute(kv.model, past, PROMPT)
    ids = list(PROMPT)
    while len(ids) < 9 * CHUNK_TOKENS:
        ids.append(7 + len(ids) % 5)
        assert same(compute(kv.model, past, ids[-1:]), compute(kv.model, own, ids[-1:]))
    await prefixes.store(past, ids)
    question = tokens(9, seed=3)
    again = await prefixes.load(ids + question)
    assert again.hit_tokens == len(ids)
    assert same(compute(kv.model, again, question), compute(kv.model, own, question))
    assert await prefixes.store(again, ids + question) == len(ids)


async def test_a_cold_answer_and_one_behind_a_hit_have_the_same_logits(kv: ModelKv, open_cache: Open) -> None:
    """The prompt is computed in the same steps. Those of the last four are the answer's."""
    seen: list[list[Any]] = []
    settings = GenerationConfig(max_new_tokens=4, do_sample=False)
    async with open_cache(kv) as cache, Generator(cache, kv) as generator:
        for hit_tokens in (0, HIT_TOKENS):
            seen.append([])
            hook = kv.model.register_forward_hook(lambda _, inputs, output: seen[-1].append(output.logits[:, -1].clone()))
            answer = await generator.generate(PROMPT, settings)
            hook.remove()
            assert answer.hit_tokens == hit_tokens
            assert len(answer.new_ids) == 4
    cold, warm = seen[0][-4:], seen[1]
    assert len(seen[0]) == 4 + HIT_TOKENS // CHUNK_TOKENS and len(warm) == 4
    assert all(same(one, other) for one, other in zip(cold, warm, strict=True))


@with_windows
async def test_of_windows_a_hit_loads_what_they_still_see(prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT)
    seen = -(-(WINDOW_TOKENS - 1) // CHUNK_TOKENS)
    assert len(prefixes.stored_as(PROMPT)) == HIT_TOKENS // CHUNK_TOKENS + 2 * seen
    past = await prefixes.load(PROMPT)
    assert [layer.keys.shape[2] for layer in past.layers] == [23, 23, HIT_TOKENS, 23, 23, HIT_TOKENS]


@with_windows
async def test_where_a_part_of_a_window_is_missing_the_hit_is_shorter(kv: ModelKv, prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT)
    await prefixes.cache.forget([prefixes.stored_as(PROMPT)[-1]])
    past = await prefixes.load(PROMPT)
    assert past.hit_tokens == HIT_TOKENS - CHUNK_TOKENS
    rest, own = PROMPT[past.hit_tokens :], own_cache(kv, PROMPT[: past.hit_tokens])
    # Its prefix was computed in one step with what followed, so it may be rounded otherwise.
    torch.testing.assert_close(compute(kv.model, past, rest), compute(kv.model, own, rest))


@with_windows
async def test_a_chunk_that_cannot_be_read_makes_a_shorter_hit(kv: ModelKv, prefixes: PrefixCache, tmp_path: Path) -> None:
    await store(prefixes, PROMPT)
    await prefixes.cache.flush()
    prefixes.cache.clear_hot()
    # Damaged behind the cache's back: the lookup finds it, the read does not.
    (path,) = (tmp_path / "kv").rglob(f"{prefixes.keys(PROMPT)[4].hex()}*")
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"wrong bytes")
    past = await prefixes.load(PROMPT)
    assert past.hit_tokens == 4 * CHUNK_TOKENS


async def test_at_least_one_token_is_left_to_compute(prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT[:HIT_TOKENS])
    assert (await prefixes.load(PROMPT[:HIT_TOKENS])).hit_tokens == HIT_TOKENS - CHUNK_TOKENS


async def test_tenants_share_nothing(prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT, salt="one")
    assert (await prefixes.load(PROMPT, salt="one")).hit_tokens == HIT_TOKENS
    assert (await prefixes.load(PROMPT, salt="other")).hit_tokens == 0
    assert (await prefixes.load(PROMPT)).hit_tokens == 0


def test_other_weights_attention_or_types_have_another_fingerprint() -> None:
    model = make_model("llama")
    layouts = [ModelKv(model).layout, ModelKv(make_model("llama", seed=1)).layout]
    layouts.append(ModelKv(make_model("llama").float()).layout)
    model.set_attn_implementation("eager")
    layouts.append(ModelKv(model).layout)
    assert len({layout.fingerprint for layout in layouts}) == 4
    assert ModelKv(make_model("llama")).layout == layouts[0]


def write_through_data(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.5)


def write_through_numpy(model: Any) -> None:
    next(model.parameters()).detach().view(torch.int16).numpy()[:] += 1


def write_one_column(model: Any) -> None:
    next(model.parameters()).data[:, 7] += 1


def transpose(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("write", [write_through_data, write_through_numpy, write_one_column])
@pytest.mark.parametrize("form", ["usual", "not contiguous", "of inference mode"])
def test_writes_that_torch_does_not_count_are_noticed(write: Callable[[Any], None], form: str) -> None:
    with torch.inference_mode(form == "of inference mode"):
        model = make_model("llama")
        if form == "not contiguous":
            transpose(model)
        kv = ModelKv(model)
        kv.check_unchanged()
        write(model)
    with pytest.raises(LayoutError, match="weights have changed"):
        kv.check_unchanged()


async def test_a_copy_of_a_cache_is_of_the_same_model(kv: ModelKv, prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT)
    past = await prefixes.load(PROMPT)
    other = copy.deepcopy(past)
    assert other.kv is kv
    assert same(compute(kv.model, other, REST), compute(kv.model, past, REST))
    assert await prefixes.store(other, PROMPT) == HIT_TOKENS


async def test_under_autocast_nothing_is_computed(kv: ModelKv, prefixes: PrefixCache) -> None:
    past = await prefixes.load(PROMPT)
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(LayoutError, match="autocast"):
            compute(kv.model, past, PROMPT)
        with pytest.raises(LayoutError, match="autocast"):
            ModelKv(kv.model)


async def test_what_was_computed_with_other_weights_is_not_stored(kv: ModelKv, prefixes: PrefixCache) -> None:
    past = await prefixes.load(PROMPT)
    with torch.no_grad():
        next(kv.model.parameters())[0, 0] += 1
    compute(kv.model, past, PROMPT)
    for use in (prefixes.store(past, PROMPT), prefixes.load(PROMPT)):
        with pytest.raises(LayoutError, match="weights have changed"):
            await use
    assert not (await prefixes.cache.lookup_keys(prefixes.keys(PROMPT))).chunks


async def test_what_another_model_computed_is_not_stored_nor_its_cache_taken(open_cache: Open) -> None:
    model = make_model("llama")
    old = ModelKv(model, chunk_tokens=CHUNK_TOKENS)
    async with open_cache(old) as cache:
        past = await PrefixCache(cache, old).load(PROMPT)
        compute(model, past, PROMPT)
        kv = ModelKv(make_model("llama", seed=1), chunk_tokens=CHUNK_TOKENS)
        with pytest.raises(LayoutError, match="another layout"):
            PrefixCache(cache, kv)
    async with open_cache(kv) as cache:
        with pytest.raises(LayoutError, match="another model"):
            await PrefixCache(cache, kv).store(past, PROMPT)


async def test_the_ids_of_another_conversation_are_refused(kv: ModelKv, prefixes: PrefixCache) -> None:
    await store(prefixes, PROMPT)
    past = await prefixes.load(PROMPT)
    compute(kv.model, past, REST)
    with pytest.raises(ValueError, match="another conversation"):
        await prefixes.store(past, tokens(len(PROMPT), seed=9))
    with pytest.raises(ValueError, match=f"expected the ids of the {len(PROMPT)} tokens"):
        await prefixes.store(past, PROMPT[:-1])


async def test_a_batch_is_refused(kv: ModelKv, prefixes: PrefixCache) -> None:
    past = await prefixes.load(PROMPT)
    with pytest.raises(LayoutError, match="batch of 2"):
        kv.model(input_ids=torch.ones(2, 3, dtype=torch.long), past_key_values=past, use_cache=True)


def test_what_the_token_ids_do_not_say_is_refused() -> None:
    model = make_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(LayoutError, match="dynamic"):
        ModelKv(model)
    with pytest.raises(LayoutError, match=r"call model.eval\(\)"):
        ModelKv(make_model("llama").train())
