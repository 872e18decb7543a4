"""A recurrent state is found where the engine left it at the end of a block, and a hit gives the prefix cache's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import drive, same_answer, tiercache_settings
from tests.vllm.recurrent import DTYPES, VOCABULARY, tiny_recurrent
from tests.vllm.test_every_request import KINDS, REQUESTS, workload
from tests.vllm.test_sliding_windows import prompt_of

pytestmark = pytest.mark.usefixtures("imported")

BLOCK_TOKENS = 128
"""An attention block is as large as a state at least."""
PROMPT_TOKENS = 900
PROMPT = prompt_of(3, PROMPT_TOKENS, range(3, VOCABULARY))
GENERATE: list[Any] = ["generate", [PROMPT], 8]
NOTHING = {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}


def engine_of(directory: Path, kind: str) -> dict[str, Any]:
    return {
        "model": str(tiny_recurrent(directory, kind)),
        "skip_tokenizer_init": True,
        "dtype": DTYPES[kind],
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
    }


@pytest.mark.parametrize(("kind", "device"), [("lfm2", "auto"), ("qwen3_next", "auto"), ("qwen3_next", "cpu")])
def test_a_hit_is_the_prefix_caches_answer(kind: str, device: str, tmp_path: Path) -> None:
    """From RAM, from disk, and in a new process; and with wrong bytes it is another one."""
    engine = engine_of(tmp_path / "model", kind)
    hit_tokens = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    ((cold,), (reference,)), _ = drive(engine, [GENERATE, GENERATE])
    assert cold["cached"] == 0 and reference["cached"] == hit_tokens
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv", device=device)}
    again: list[list[Any]] = [["reset_prefix_cache"], GENERATE]
    steps = [["loads_always"], GENERATE, ["flush"], *again, ["clear_hot"], *again, ["left_behind"], ["corrupt_hot"], *again]
    (_, (first,), flushed, _, (hot,), _, _, (disk,), left, corrupted, _, (wrong,)), log = drive(cached, steps)
    (_, (later,), left_later), _ = drive(cached, [["scanned"], GENERATE, ["left_behind"]])
    assert first["cached"] == 0 and flushed
    for answer in (hot, disk, later):
        assert answer["cached"] == hit_tokens
        assert same_answer(answer, reference)
    assert left == left_later == NOTHING
    assert corrupted > 0 and wrong["cached"] == hit_tokens and not same_answer(wrong, reference)
    assert "keep a recurrent state" in log, log


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_two_ranks_have_states_of_their_own(kind: str, tmp_path: Path) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = engine_of(tmp_path / "model", kind) | ranks
    hit_tokens = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    ((cold,), (reference,)), _ = drive(engine, [GENERATE, GENERATE])
    assert cold["cached"] == 0 and reference["cached"] == hit_tokens
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv")}
    again: list[list[Any]] = [["idle"], ["reset_prefix_cache"], GENERATE]
    steps = [["loads_always"], GENERATE, ["on_workers", "flush"], *again, ["on_workers", "clear_hot"], *again]
    steps += [["on_workers", "corrupt_hot"], *again]
    (_, (first,), _, _, _, (hot,), _, _, _, (disk,), corrupted, _, _, (wrong,)), _ = drive(cached, steps)
    (_, (later,)), _ = drive(cached, [["loads_always"], GENERATE])
    assert first["cached"] == 0
    for place, answer in {"hot": hot, "disk": disk, "later": later}.items():
        assert answer["cached"] == hit_tokens and same_answer(answer, reference), place
    assert all(corrupted) and wrong["cached"] == hit_tokens and not same_answer(wrong, reference)


def test_a_crowd_is_answered_as_without_a_cache_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """While chunks are damaged and removed and requests given up: bit for bit what vLLM alone answers. Where requests are
    preempted that cannot be asked: what they had generated is computed by another kernel then, whose sums differ.

    Of Qwen3-Next: with LFM2 vLLM's CPU build itself answers a crowd otherwise than it answers one after the other.
    """
    prompts, requests, everything = workload(11, tmp_path / "kv", KINDS)
    happenings = {step: one for step, one in everything.items() if one[0] != "preempt"}
    engine = engine_of(tmp_path / "model", "qwen3_next") | {
        "block_size": 64,
        "max_model_len": 512,
        "num_gpu_blocks_override": 90,
        "scheduling_policy": "priority",
    }
    (alone,), _ = drive(engine, [["crowd", prompts, requests, {}]])
    settings = tiercache_settings(tmp_path / "kv", save_decode_cache=True, max_local_cpu_size=0.02)
    (found, left, statistics, preempted, left_later), _ = drive(
        engine | {"tiercache": settings},
        [
            ["crowd", prompts, requests, happenings],
            ["left_behind"],
            ["statistics"],
            ["crowd", prompts, requests, everything],
            ["left_behind"],
        ],
    )
    assert len(found["answers"]) + found["aborted"] == len(preempted["answers"]) + preempted["aborted"] == REQUESTS
    assert found["answers"].keys() & alone["answers"].keys() > set()
    for name in found["answers"].keys() & alone["answers"].keys():
        answer, right = found["answers"][name], alone["answers"][name]
        assert answer["tokens"] == right["tokens"] and answer["logprobs"] == right["logprobs"], name
    for one in (left, left_later):
        assert one.pop("prefetched") < 20  # promoted for requests that were then given up
        assert one == {"claims": 0, "leases": 0, "blocks": 0, "requests": 0}
    assert sum(statistics["reader"]["hits"].values()) > 0 and preempted["preempted"] > 3
