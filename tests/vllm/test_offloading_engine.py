"""Real vLLM with its own offloading and our tier below it: a cached answer is that of vLLM's own prefix cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, close_answer, drive, same_answer
from tests.vllm.gemma import tiny_gemma
from tests.vllm.tiny import tiny_llama


def offloading(model: str, directory: Path, **settings: Any) -> dict[str, Any]:
    tier = {
        "type": "TierCacheTier",
        "module_path": "tiercache.integrations.vllm_offloading",
        "max_local_cpu_size": 0.1,
        "local_disk": str(directory),
        "max_local_disk_size": 1.0,
    }
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tiercache.integrations.vllm_offloading",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [tier | settings],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"model": model, "enable_prefix_caching": False, "kv_transfer_config": transfer}


@pytest.fixture(scope="module")
def lives(
    model: str, prompts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An engine that computes, loads from disk, is given damaged files, and at last wrong KV; and another one after it."""
    directory = tmp_path_factory.mktemp("kv")
    engine, ask, settle, forget = (
        offloading(model, directory),
        ["generate", prompts],
        ["settle_offloading"],
        "forgotten",
    )
    steps = {
        "cold": ask,
        "settled": settle,
        forget: ["forget_offloaded_memory"],
        "disk": ask,
        "memory": ask,
        "forgotten_again": ["forget_offloaded_memory"],
        "damaged": ["damage_files", str(directory), "flip", 1],
        "damaged_answer": ask,
        "settled_again": settle,
        "forgotten_at_last": ["forget_offloaded_memory"],
        "healed": ask,
        "corrupted": ["corrupt_offloaded"],
        "wrong": ask,
    }
    answers, _ = drive(engine, list(steps.values()))
    (restarted, _), _ = drive(engine, [ask, settle])
    return dict(zip(steps, answers, strict=True)), {"restarted": restarted}


def test_hits_give_the_prefix_caches_answer(
    lives: tuple[dict[str, Any], dict[str, Any]], oracle: list[dict[str, Any]]
) -> None:
    first, second = lives
    assert [answer["cached"] for answer in first["cold"]] == [0, 0]
    assert first["forgotten"] > 0
    for answers in (first["disk"], first["memory"], first["healed"], second["restarted"]):
        for ours, theirs in zip(answers, oracle, strict=True):
            assert ours["cached"] == theirs["cached"]
            assert same_answer(ours, theirs)


def test_damaged_chunks_are_computed(
    lives: tuple[dict[str, Any], dict[str, Any]], oracle: list[dict[str, Any]]
) -> None:
    first, _ = lives
    assert first["damaged"]
    found = list(zip(first["damaged_answer"], oracle, strict=True))
    assert any(ours["cached"] < theirs["cached"] for ours, theirs in found)
    assert all(close_answer(ours, theirs) for ours, theirs in found)


def test_wrong_kv_changes_the_answer(
    lives: tuple[dict[str, Any], dict[str, Any]], oracle: list[dict[str, Any]]
) -> None:
    """The negative control: if this passed with reversed bytes, the tests above would prove nothing."""
    for ours, theirs in zip(lives[0]["wrong"], oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert not same_answer(ours, theirs)


def tiny_engine(kind: str, directory: Path) -> dict[str, Any]:
    """Of models whose answers depend on every byte of their KV."""
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "enable_prefix_caching": True}
    settings |= {"kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": 1024}
    if kind == "two ranks":
        model = tiny_llama(directory / "model", kv_heads=2)
        settings |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    else:
        model = tiny_gemma(directory / "model", ["sliding_attention", "full_attention"] * 2)
    return offloading(str(model), directory / "kv") | settings


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("kind", ["two ranks", "windows"])
def test_other_kinds_of_engines_hit_too(kind: str, tmp_path: Path) -> None:
    numbers = random.Random(3)
    prompt = {"prompt_token_ids": [2, *(numbers.randrange(2, 250) for _ in range(299))]}
    ask, empty = ["generate", [prompt], 4], [["settle_offloading"], ["reset_prefix_cache"], ["forget_offloaded_memory"]]
    answers, _ = drive(tiny_engine(kind, tmp_path), [ask, ask, *empty, ask])
    (cold,), (oracle,), *_, (hit,) = answers
    assert (cold["cached"], oracle["cached"]) == (0, 299 // BLOCK_TOKENS * BLOCK_TOKENS)
    assert hit["cached"] == oracle["cached"]
    assert same_answer(hit, oracle)
