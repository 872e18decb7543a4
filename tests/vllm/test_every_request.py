"""Requests of every kind, in an engine with few blocks, while chunks are damaged and requests are given up and preempted:
each answer is the one of an engine without a cache, and nothing is left behind. `TEST_REQUESTS=1000` for more."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import drive, tiercache_settings
from tests.vllm.gemma import tiny_gemma
from tests.vllm.test_sliding_windows import prompt_of

pytestmark = pytest.mark.usefixtures("imported")

REQUESTS = int(os.environ.get("TEST_REQUESTS", "120"))
TOKENS = 12
KINDS = ["plain"] * 5 + ["salted", "prompt logprobs", "urgent"]
HAPPENINGS = ["clear hot", "preempt", "damage", "clear hot", "remove", "preempt", "weights changed"]


def workload(
    seed: int, directory: Path, kinds: list[str]
) -> tuple[list[list[int]], list[dict[str, Any]], dict[str, list[Any]]]:
    """Prompts, requests, and what happens at which step."""
    numbers = random.Random(seed)
    vocabulary = range(3, 2048)
    documents = [prompt_of(n, numbers.randrange(70, 260), vocabulary)["prompt_token_ids"] for n in range(20)]
    prompts = [
        [*numbers.choice(documents), *(numbers.choice(vocabulary) for _ in range(numbers.randrange(1, 40)))]
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
    for number, step in enumerate(range(15, 20000, 15)):
        match HAPPENINGS[number % len(HAPPENINGS)]:
            case "damage":
                happenings[str(step)] = ["damage", str(directory), numbers.choice(["flip", "truncate"]), 5]
            case "remove":
                happenings[str(step)] = ["remove", str(directory)]
            case name:
                happenings[str(step)] = [name]
    return prompts, requests, happenings


LATER = {"enable_async_loading": True}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("layers", "blocks", "kinds", "more"),
    [
        # Without "two": where some of a batch are drawn and others are not, vLLM's rejection sampler draws them all.
        (["full_attention"] * 3, 90, KINDS, {"speculative_config": SPECULATION}),
        (["full_attention"] * 3, 90, [*KINDS, "two"], {"tiercache": LATER}),
        (["sliding_attention", "sliding_attention", "full_attention"], 150, [*KINDS, "two"], {}),
    ],
    ids=["speculating", "loading later", "windows"],
)
def test_requests_of_every_kind(
    layers: list[str], blocks: int, kinds: list[str], more: dict[str, Any], tmp_path: Path
) -> None:
    more = dict(more)
    ours = more.pop("tiercache", {})
    prompts, requests, happenings = workload(11, tmp_path / "kv", kinds)
    engine = {
        "model": str(tiny_gemma(tmp_path / "model", layers)),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": blocks,
        "scheduling_policy": "priority",
        **more,
    }
    alone = [{"prompt": number, "tokens": TOKENS, "kind": "plain"} for number in range(len(prompts))]
    (oracle,), _ = drive(engine, [["crowd", prompts, alone, {}]])
    expected = [oracle["answers"][f"r{number}"] for number in range(len(prompts))]
    settings = tiercache_settings(tmp_path / "kv", save_decode_cache=True, max_local_cpu_size=0.02) | ours
    again: list[Any] = ["crowd", prompts, alone, {}]
    (found, left, statistics, *_, corrupted, wrong), _ = drive(
        engine | {"tiercache": settings},
        [
            ["crowd", prompts, requests, happenings],
            ["left_behind"],
            ["statistics"],
            again,
            ["reset_prefix_cache"],
            ["corrupt_hot"],
            again,
        ],
    )
    assert len(found["answers"]) + found["aborted"] == REQUESTS
    for name, answer in found["answers"].items():
        request = requests[int(name[1:])]
        right = expected[request["prompt"]]
        assert answer["tokens"] == [right["tokens"][0][: request["tokens"]]] * (2 if request["kind"] == "two" else 1), name
        if request["kind"] != "two":
            assert answer["logprobs"][0] == pytest.approx(right["logprobs"][0][: request["tokens"]], abs=1e-3), name
    # What was promoted for a request that was then given up is kept for another while: nobody else came for it.
    assert left.pop("prefetched") < 20
    assert left == {"claims": 0, "leases": 0, "blocks": 0, "requests": 0}
    assert found["aborted"] > 3 and found["preempted"] > 3 and set(found["happened"]) == set(HAPPENINGS)
    assert min(statistics["reader"]["hits"].values()) > 0
    assert corrupted > 0 and any(
        wrong["answers"][name]["tokens"] != answer["tokens"] for name, answer in oracle["answers"].items()
    ), "with wrong KV this has to fail, or it proves nothing"
