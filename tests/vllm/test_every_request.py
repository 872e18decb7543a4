"""Requests of every kind, in an engine with few blocks, while chunks are damaged and requests are given up and preempted:
each answer is the one of an engine without a cache, and nothing is left behind. `TEST_REQUESTS=1000` for more."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import NOTHING_LEFT, drive, prompt_of, tiercache_settings, tiny_engine
from tests.vllm.models import VOCABULARY, tiny_gemma, tiny_model

pytestmark = pytest.mark.usefixtures("imported")

REQUESTS = int(os.environ.get("TEST_REQUESTS", "120"))
TOKENS = 12
KINDS = ["plain"] * 5 + ["salted", "prompt logprobs", "urgent"]
HAPPENINGS = ["clear_hot", "preempt", "damage_files", "clear_hot", "remove_files", "preempt", "change_weights"]


def workload(directory: Path, kinds: list[str]) -> tuple[list[list[int]], list[dict[str, Any]], dict[str, list[Any]]]:
    """Prompts, requests, and what happens at which step."""
    numbers = random.Random(11)
    documents = [prompt_of(n, numbers.randrange(70, 260))["prompt_token_ids"] for n in range(20)]
    prompts = [
        [*numbers.choice(documents), *(numbers.randrange(3, VOCABULARY) for _ in range(numbers.randrange(1, 40)))]
        for _ in range(60)
    ]
    requests = [
        {
            "prompt": numbers.randrange(len(prompts)),
            "tokens": numbers.randrange(2, TOKENS + 1),
            "kind": numbers.choice(kinds),
            "abort": numbers.randrange(1, 30) if numbers.random() < 0.1 else 0,
        }
        for _ in range(REQUESTS)
    ]
    happenings: dict[str, list[Any]] = {}
    for number, step in enumerate(range(12, 20000, 12)):
        match HAPPENINGS[number % len(HAPPENINGS)]:
            case "damage_files" as name:
                happenings[str(step)] = [name, str(directory), numbers.choice(["flip", "truncate"]), 5]
            case "remove_files" as name:
                happenings[str(step)] = [name, str(directory)]
            case name:
                happenings[str(step)] = [name]
    return prompts, requests, happenings


def crowded(model: Path, blocks: int, **engine: Any) -> dict[str, Any]:
    few = {"max_model_len": 512, "num_gpu_blocks_override": blocks, "scheduling_policy": "priority"}
    return tiny_engine(model, **few, **engine)


def assert_nothing_left(left: dict[str, int]) -> None:
    # What was promoted for a request that was then given up is kept for another while: nobody else came for it.
    assert left["prefetched"] < 20
    assert left | {"prefetched": 0} == NOTHING_LEFT


LATER = {"enable_async_loading": True, "device": "cpu"}
SPECULATION = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@pytest.mark.parametrize(
    ("layers", "blocks", "kinds", "engine", "ours"),
    [
        # Without "two": where some of a batch are drawn and others are not, vLLM's rejection sampler draws them all.
        (["full"] * 3, 90, KINDS, SPECULATION, {}),
        (["full"] * 3, 90, [*KINDS, "two"], {}, LATER),
        ([*["sliding"] * 5, "full"], 300, [*KINDS, "two"], {}, {}),
        (["sliding"] * 3, 60, [*KINDS, "two"], {}, {}),
    ],
    ids=["speculating", "loading later into a device", "six groups", "windows alone"],
)
def test_requests_of_every_kind(
    layers: list[str], blocks: int, kinds: list[str], engine: dict[str, Any], ours: dict[str, Any], tmp_path: Path
) -> None:
    """With windows their blocks go from one request to the next while they are being saved."""
    prompts, requests, happenings = workload(tmp_path / "kv", kinds)
    engine = crowded(tiny_gemma(tmp_path / "model", *layers), blocks, **engine)
    plain = [{"prompt": number, "tokens": TOKENS, "kind": "plain"} for number in range(len(prompts))]
    alone: list[Any] = ["crowd", prompts, plain, {}]
    (oracle,), _ = drive(engine, [alone])
    expected = [oracle["answers"][f"r{number}"] for number in range(len(prompts))]
    settings = tiercache_settings(tmp_path / "kv", save_decode_cache=True, max_local_cpu_size=0.02) | ours
    steps = [["crowd", prompts, requests, happenings], ["left_behind"], ["statistics"]]
    steps += [alone, ["reset_prefix_cache"], ["corrupt_hot"], alone]
    (found, left, statistics, *_, corrupted, wrong), log = drive(engine | {"tiercache": settings}, steps)
    assert len(found["answers"]) + found["aborted"] == REQUESTS
    for name, answer in found["answers"].items():
        request = requests[int(name[1:])]
        right, times = expected[request["prompt"]], 2 if request["kind"] == "two" else 1
        assert answer["tokens"] == [right["tokens"][0][: request["tokens"]]] * times, name
        if request["kind"] != "two":
            assert answer["logprobs"][0] == pytest.approx(right["logprobs"][0][: request["tokens"]], abs=1e-3), name
    assert_nothing_left(left)
    assert found["aborted"] > 3 and found["preempted"] > 3 and set(found["happened"]) == set(HAPPENINGS)
    assert min(statistics["reader"]["hits"][tier] for tier in ("cpu", "disk")) > 0
    assert "of no use" not in log
    assert corrupted > 0 and any(
        wrong["answers"][name]["tokens"] != answer["tokens"] for name, answer in oracle["answers"].items()
    ), "with wrong KV this has to fail, or it proves nothing"


def test_a_crowd_with_recurrent_states_is_answered_bit_for_bit_as_without_a_cache(tmp_path: Path) -> None:
    """Where requests are preempted that cannot be asked: what they had generated is computed by another kernel then, whose
    sums differ.

    Of Qwen3-Next: with LFM2 vLLM's CPU build itself answers a crowd otherwise than it answers one after the other.
    """
    prompts, requests, everything = workload(tmp_path / "kv", KINDS)
    happenings = {step: one for step, one in everything.items() if one[0] != "preempt"}
    engine = crowded(tiny_model(tmp_path / "model", "qwen3_next"), 90, dtype="bfloat16", block_size=64)
    engine["max_num_batched_tokens"] = 512
    (alone,), _ = drive(engine, [["crowd", prompts, requests, {}]])
    settings = tiercache_settings(tmp_path / "kv", save_decode_cache=True, max_local_cpu_size=0.02)
    steps = [["crowd", prompts, requests, happenings], ["left_behind"], ["statistics"]]
    steps += [["crowd", prompts, requests, everything], ["left_behind"]]
    (found, left, statistics, preempted, left_later), _ = drive(engine | {"tiercache": settings}, steps)
    assert len(found["answers"]) + found["aborted"] == len(preempted["answers"]) + preempted["aborted"] == REQUESTS
    assert found["answers"].keys() & alone["answers"].keys() > set()
    for name in found["answers"].keys() & alone["answers"].keys():
        answer, right = found["answers"][name], alone["answers"][name]
        assert answer["tokens"] == right["tokens"] and answer["logprobs"] == right["logprobs"], name
    assert_nothing_left(left)
    assert_nothing_left(left_later)
    assert sum(statistics["reader"]["hits"].values()) > 0 and preempted["preempted"] > 3
