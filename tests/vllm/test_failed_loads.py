"""Chunks that cannot be loaded, of a prefix that several requests begin with at the same time.

vLLM 0.32 lets all of them but the first go on with blocks of a synchronous load that failed: it relies on the first to
compute them in the next step, which an abort, a preemption or a prefill in parts keeps it from. So what may fail is loaded
asynchronously.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import drive, prompt_of, tiercache_settings, tiny_engine
from tests.vllm.models import tiny_gemma

pytestmark = pytest.mark.usefixtures("imported")

PAIRS = 6


@pytest.mark.parametrize("how", ["the first is given up", "prefill in parts"])
def test_nobody_reads_blocks_that_another_one_has_yet_to_compute(tmp_path: Path, how: str) -> None:
    documents = [prompt_of(number, 200)["prompt_token_ids"] for number in range(PAIRS)]
    prompts = [[*documents[number // 2], *range(10 + number, 20 + number)] for number in range(2 * PAIRS)]
    requests: list[dict[str, Any]] = [{"prompt": number, "tokens": 8, "kind": "plain"} for number in range(2 * PAIRS)]
    engine = tiny_engine(tiny_gemma(tmp_path / "model", *["full"] * 3), tiercache=tiercache_settings(tmp_path / "kv"))
    given_up = requests
    if how == "prefill in parts":
        engine["long_prefill_token_threshold"] = 32
    else:
        given_up = [one | {"abort": 0 if number % 2 else 1 + number // 2} for number, one in enumerate(requests)]
    steps: list[list[Any]] = [["crowd", prompts, requests, {}], ["flush"], ["clear_hot"], ["reset_prefix_cache"]]
    steps += [["damage_files", str(tmp_path / "kv"), "flip", 1], ["crowd", prompts, given_up, {}], ["statistics"]]
    (cold, flushed, cleared, emptied, damaged, found, statistics), _ = drive(engine, steps)
    assert flushed and cleared and emptied and damaged > 2 * PAIRS
    assert statistics["reader"]["corrupt"] > 0, "the damaged chunks were never read"
    assert len(found["answers"]) + found["aborted"] == 2 * PAIRS
    wrong = [name for name, one in found["answers"].items() if one["tokens"] != cold["answers"][name]["tokens"]]
    assert not wrong
