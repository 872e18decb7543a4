"""A real engine says by ZMQ, as vLLM does for its own blocks, what the tiers of this host have and have no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, drive, tiercache_settings
from tests.vllm.gemma import tiny_gemma
from tests.vllm.published import Subscriber, there
from tests.vllm.test_parallel import GENERATE, PROMPT_TOKENS, engine_of, settings_of
from tests.vllm.tiny import tiny_llama, tiny_mla
from tiercache.core.keys import keys_from_hashes

HI = ["generate", ["Hi"], 2]
"""Less than a block: a step, with which events go out."""
NO_TAILS = {"save_unfull_chunk": False}


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    made = Subscriber()
    yield made
    made.close()


def blocks_of(events: list[Any], medium: str) -> dict[Any, tuple[Any, ...]]:
    """Of all that was ever stored in a medium, by hash: group, what sees it, the block before it, and its tokens. Of blocks
    that a window leaves behind nothing."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if getattr(event, "token_ids", None) is None or event.medium != medium or event.kv_cache_spec_sliding_window:
            continue
        before, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, block in enumerate(event.block_hashes):
            kind = event.group_idx, event.kv_cache_spec_kind
            found[block] = *kind, before, size, *event.token_ids[number * size : (number + 1) * size]
            before = block
    return found


def chunk_files(namespace: str, chunks: list[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Of chunks, each its blocks' hashes: by the name of its file."""
    keys = keys_from_hashes(bytes.fromhex(namespace), [chunk[-1] for chunk in chunks])
    return {key.hex(): chunk for key, chunk in zip(keys, chunks, strict=True)}


def test_what_the_tiers_have_is_published_and_what_others_evicted_is_taken_back(
    model: str, prompts: list[str], tmp_path: Path, subscriber: Subscriber
) -> None:
    engine = {"model": model, "tiercache": tiercache_settings(tmp_path, **NO_TAILS)}
    engine["kv_events_config"] = subscriber.config
    directory = str(tmp_path)
    steps = [
        ["generate", prompts],
        ["flush"],
        HI,
        ["now"],
        ["known_files", directory],
        ["namespace"],
        ["clear_hot"],
        HI,
        ["now"],
        ["evict_elsewhere", directory, 3 * 2**20],
        HI,
        ["now"],
        ["reset_everything"],
        HI,
    ]
    whole = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}  # not cut to 64 bits: files are named by them
    (answers, _, _, stored_s, stored, namespace, cleared, _, cleared_s, left, _, evicted_s, _, _), _ = drive(
        engine, steps, whole
    )
    chunks = sum(answer["prompt_tokens"] // CHUNK_TOKENS for answer in answers)
    assert chunks >= 8

    events = subscriber.until(stored_s)
    gpu, cpu, storage = (blocks_of(events, medium) for medium in ("GPU", "CPU", "STORAGE"))
    assert len(cpu) == chunks * CHUNK_TOKENS // BLOCK_TOKENS
    assert cpu == storage
    assert {block: gpu[block] for block in cpu} == cpu, "our blocks are the engine's, with the same hashes and parents"
    ours = [event for event in events if getattr(event, "token_ids", None) and event.medium != "GPU"]
    assert {(event.group_idx, event.lora_name, event.locality) for event in ours} == {(0, None, "LOCAL")}
    assert all(event.extra_keys == [None] * len(event.block_hashes) for event in ours)
    files = chunk_files(namespace, [tuple(event.block_hashes) for event in ours if event.medium == "STORAGE"])
    assert set(files) == set(stored) and len(files) == chunks

    assert cleared == chunks
    now = there(subscriber.until(cleared_s))
    assert not now["CPU"] and now["STORAGE"].keys() == storage.keys()

    assert 0 < len(left) < chunks
    now = there(subscriber.until(evicted_s))
    assert now["STORAGE"].keys() == {block for name in left for block in files[name]}

    now = there([event for event in subscriber.until() if type(event).__name__ != "AllBlocksCleared"])
    assert not now["STORAGE"] and not now["CPU"], "after a reset nothing that was stored is found"


def test_after_a_restart_chunks_are_published_when_a_request_loads_them(
    model: str, prompts: list[str], tmp_path: Path, subscriber: Subscriber
) -> None:
    engine = {"model": model, "tiercache": tiercache_settings(tmp_path, **NO_TAILS)}
    (answers, _), _ = drive(engine, [["generate", prompts], ["flush"]])
    engine["kv_events_config"] = subscriber.config
    (_, _, found_s, _, _), _ = drive(engine, [["scanned"], HI, ["now"], ["generate", prompts[:1]], HI])
    assert not [event for event in subscriber.until(found_s) if getattr(event, "medium", None) != "GPU"]
    now = there(subscriber.until())
    usable = (answers[0]["prompt_tokens"] - 1) // CHUNK_TOKENS * CHUNK_TOKENS // BLOCK_TOKENS
    assert len(now["STORAGE"]) == len(now["CPU"]) == usable


def test_of_several_groups_of_layers_those_that_see_every_token_are_published(
    tmp_path: Path, subscriber: Subscriber, imported: None
) -> None:
    layers = ["sliding_attention", "full_attention"]
    engine = {
        "model": str(tiny_gemma(tmp_path / "model", layers)),
        "skip_tokenizer_init": True,
        "max_model_len": 768,
        "kv_cache_memory_bytes": 64 << 20,
        "tiercache": tiercache_settings(tmp_path / "kv", max_local_cpu_size=0.03),
        "kv_events_config": subscriber.config,
    }
    prompt = {"prompt_token_ids": list(range(2, 2 + 3 * CHUNK_TOKENS + 5))}
    hi = ["generate", [{"prompt_token_ids": [2, 3]}], 2, True]
    _, _ = drive(engine, [["generate", [prompt], 2, True], ["flush"], hi])
    events = subscriber.until()
    gpu, cpu, storage = (blocks_of(events, medium) for medium in ("GPU", "CPU", "STORAGE"))
    assert len(cpu) == 3 * CHUNK_TOKENS // BLOCK_TOKENS and cpu == storage
    assert {block: gpu[block] for block in cpu} == cpu


def test_what_every_rank_has_is_published_once_and_what_one_has_lost_is_taken_back(
    tmp_path: Path, subscriber: Subscriber, imported: None
) -> None:
    engine = engine_of(tiny_llama(tmp_path / "model", kv_heads=2), settings_of(tmp_path, **NO_TAILS))
    hi = ["generate", [{"prompt_token_ids": [2, 3]}], 2, True]
    steps = [GENERATE, ["on_workers", "flush"], hi, ["now"], ["lose_tail", 1], hi]
    (_, _, _, stored_s, kept, _), _ = drive(engine | {"kv_events_config": subscriber.config}, steps)
    chunks = PROMPT_TOKENS // CHUNK_TOKENS
    assert kept == [chunks, chunks - 1]
    now = there(subscriber.until(stored_s))
    assert len(now["CPU"]) == len(now["STORAGE"]) == chunks * CHUNK_TOKENS // BLOCK_TOKENS
    now = there(subscriber.until())
    assert len(now["CPU"]) == len(now["STORAGE"]) == (chunks - 1) * CHUNK_TOKENS // BLOCK_TOKENS


def test_what_ranks_have_alike_is_published_once(tmp_path: Path, subscriber: Subscriber, imported: None) -> None:
    engine = engine_of(tiny_mla(tmp_path / "model"), settings_of(tmp_path, **NO_TAILS))
    hi = ["generate", [{"prompt_token_ids": [2, 3]}], 2, True]
    steps = [GENERATE, ["on_workers", "flush"], hi, ["now"], ["on_workers", "clear_hot"], hi]
    (_, _, _, stored_s, _, _), _ = drive(engine | {"kv_events_config": subscriber.config}, steps)
    before = there(subscriber.until(stored_s))
    assert sum(event.block_size for event in before["CPU"].values()) == PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    assert before["STORAGE"].keys() == before["CPU"].keys()
    now = there(subscriber.until())
    assert not now["CPU"] and now["STORAGE"].keys() == before["STORAGE"].keys()
