"""Most layers of Gemma 3 see a window only: a hit loads what they still see of it, and gives the prefix cache's answer."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.needs import LONG
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, REPOSITORY, drive, same_answer, tiercache_settings
from tests.vllm.gemma import LAYERS, WINDOW_TOKENS, prepare_gemma, tiny_gemma
from tiercache.demo.server import quickest_dtype

pytestmark = pytest.mark.usefixtures("imported")

PROMPT_TOKENS = 6020 if LONG else 1100
HIT_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
assert HIT_TOKENS == (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 2 * WINDOW_TOKENS
FULL_LAYERS = 3


def prompt_of(seed: int, tokens: int, vocabulary: range, head: list[int] | None = None) -> dict[str, list[int]]:
    """So many tokens behind `head`."""
    numbers = random.Random(seed)
    return {"prompt_token_ids": [2, *(head or ())[1:], *(numbers.choice(vocabulary) for _ in range(tokens - 1))]}


@pytest.fixture(scope="module")
def gemma() -> dict[str, Any]:
    """In bfloat16 where this CPU has it."""
    return {
        "model": str(prepare_gemma(REPOSITORY / "demo" / "gemma-3-270m")),
        "skip_tokenizer_init": True,
        "dtype": quickest_dtype(),
        "max_model_len": PROMPT_TOKENS + 436,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }


PROMPT = prompt_of(3, PROMPT_TOKENS, range(1000, 200000))
GENERATE: list[Any] = ["generate", [PROMPT], 8]


@pytest.fixture(scope="module")
def alone(gemma: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What vLLM's own prefix cache answers, and what it logs."""
    ((cold,), (reference,)), log = drive(gemma, [GENERATE, GENERATE])
    assert cold["cached"] == 0 and reference["cached"] == HIT_TOKENS
    return reference, log


def capacity(log: str) -> set[str]:
    return set(re.findall(r"KV cache size: [\d,]+ tokens, Maximum concurrency.*", log))


def test_a_hit_is_the_prefix_caches_answer_and_loads_what_windows_leave(
    gemma: dict[str, Any], alone: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    """From RAM, from disk, and in a new process; vLLM has as much room for KV as without."""
    reference, log_alone = alone
    cached = gemma | {"tiercache": tiercache_settings(tmp_path)}
    again: list[list[Any]] = [["reset_prefix_cache"], GENERATE]
    steps = [GENERATE, ["flush"], *again, ["clear_hot"], *again, ["left_behind"]]
    ((first,), flushed, _, (hot,), _, _, (disk,), left), log = drive(cached, steps)
    (_, (later,), left_later), log_later = drive(cached, [["scanned"], GENERATE, ["left_behind"]])
    assert first["cached"] == 0 and flushed
    for answer in (hot, disk, later):
        assert answer["cached"] == reference["cached"] == HIT_TOKENS
        assert same_answer(answer, reference)
    assert left == left_later == {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}
    windows = LAYERS - FULL_LAYERS
    kept = WINDOW_TOKENS  # whole blocks, and chunks, are a part of it
    a_token = 2 * 256 * (2 if gemma["dtype"] == "bfloat16" else 4)
    bytes_loaded = (FULL_LAYERS * HIT_TOKENS + windows * kept) * a_token
    loads = re.findall(r"Loaded (\d+) out of (\d+) tokens .*\(chunks: \d+, groups: 6, MiB: ([\d.]+)\)", log + log_later)
    assert [float(mib) for _, _, mib in loads] == [pytest.approx(bytes_loaded / 2**20, abs=0.06)] * 3
    assert len(capacity(log_alone)) == 1 and capacity(log_alone) == capacity(log) == capacity(log_later)
    assert "of no use" not in log + log_later


def test_wrong_kv_in_windows_changes_the_answer_or_is_seen(
    gemma: dict[str, Any], alone: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    """In the hot cache, where nobody looks again, it changes the answer; in a file it is seen, and computed instead."""
    reference, _ = alone
    cached = gemma | {"tiercache": tiercache_settings(tmp_path)}
    steps: list[list[Any]] = [
        GENERATE,
        ["flush"],
        ["reset_prefix_cache"],
        ["corrupt_windows", PROMPT["prompt_token_ids"]],
        GENERATE,
        ["clear_hot"],
        ["damage_files", str(tmp_path), "flip", 3],
        ["reset_prefix_cache"],
        GENERATE,
        ["left_behind"],
    ]
    ((first,), _, _, corrupted, (wrong,), _, damaged, _, (seen,), left), log = drive(cached, steps)
    assert corrupted == 5 * (HIT_TOKENS // CHUNK_TOKENS) and damaged > 10
    assert wrong["cached"] == HIT_TOKENS and not same_answer(wrong, reference)
    assert seen["cached"] < HIT_TOKENS and seen["tokens"] == first["tokens"]
    assert left == {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}
    assert "of no use" not in log


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [(["sliding_attention"] * 5 + ["full_attention"], 90), (["sliding_attention"] * 3, 20)],
    ids=["six groups", "windows alone"],
)
def test_preempted_and_aborted_requests_leave_nothing_behind_and_the_others_are_answered(
    layers: list[str], blocks: int, tmp_path: Path
) -> None:
    """In an engine with few blocks: windows' blocks go from one request to the next while they are being saved. Of a tiny
    model, in float32, where how requests share a step moves no answer. With windows in all layers there is one group."""
    vocabulary = range(3, 2048)
    head = prompt_of(5, 200, vocabulary)["prompt_token_ids"]
    prompts = [prompt_of(n, 100 + 13 * n, vocabulary, head[: 200 * (n % 2)]) for n in range(10)]
    tokens = 150
    engine = {
        "model": str(tiny_gemma(tmp_path / "model", layers)),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 768,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
    }
    (oracle,), _ = drive(engine, [["generate", prompts, tokens, True]])
    settings = tiercache_settings(tmp_path / "kv", save_decode_cache=True, max_local_cpu_size=0.03)
    all_of_them: list[Any] = ["generate_and_abort", prompts, tokens]
    preempt_at = [7, 60, 130]
    (_, first, left, _, _, second, left_second, _, third, left_third, _, corrupted, wrong), log = drive(
        engine | {"num_gpu_blocks_override": blocks, "tiercache": settings},
        [
            ["loads_always"],
            [*all_of_them, {}, preempt_at],
            ["left_behind"],
            ["reset_prefix_cache"],
            ["clear_hot"],
            [*all_of_them, {"0": 3, "3": 40, "4": 90, "7": 1}, preempt_at],
            ["left_behind"],
            ["reset_prefix_cache"],
            [*all_of_them, {}, []],
            ["left_behind"],
            ["reset_prefix_cache"],
            ["corrupt_hot"],
            [*all_of_them, {}, []],
        ],
    )
    assert min(first["preempted"], second["preempted"]) >= len(preempt_at)
    assert set(second["tokens"]) < set(first["tokens"]) == set(third["tokens"]) == {f"r{n}" for n in range(10)}
    for answers in (first, second, third):
        assert {name: oracle[int(name[1:])]["tokens"] for name in answers["tokens"]} == answers["tokens"]
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    found = {f"r{number}": (length - 1) // CHUNK_TOKENS * CHUNK_TOKENS for number, length in enumerate(lengths)}
    assert third["cached"] == found
    assert left == left_second == left_third == {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}
    assert corrupted > 0 and wrong["tokens"] != third["tokens"], "with wrong KV this has to fail, or it proves nothing"
    assert "of no use" not in log
