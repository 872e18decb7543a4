"""Real vLLM with its own offloading and our tier below it: a cached answer is that of vLLM's own prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.answers import assert_hits, assert_wrong_hits, close_answer
from tests.vllm.engines import BLOCK_TOKENS, drive, drive_named, offloading_settings, prompt_of, tiny_engine
from tests.vllm.models import tiny_gemma, tiny_model


def test_hits_give_the_prefix_caches_answer_and_damaged_chunks_are_computed(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Loads from disk and from memory, in a new process too; damaged files, and at last wrong KV."""
    engine = {"model": model, "enable_prefix_caching": False, "kv_transfer_config": offloading_settings(tmp_path)}
    ask, settle, forget = ["generate", prompts], ["settle_offloading"], ["forget_offloaded_memory"]
    found, _ = drive_named(
        engine,
        [
            *(("cold", ask), ("", settle), ("forgotten", forget)),
            *(("disk", ask), ("memory", ask), ("", forget)),
            ("damaged", ["damage_files", str(tmp_path), "flip", 1]),
            *(("damaged answer", ask), ("", settle), ("", forget)),
            *(("healed", ask), ("", ["corrupt_offloaded"]), ("wrong", ask)),
        ],
    )
    (restarted, _), _ = drive(engine, [ask, settle])
    assert [answer["cached"] for answer in found["cold"]] == [0, 0]
    assert found["forgotten"] > 0 and found["damaged"]
    for answers in (found["disk"], found["memory"], found["healed"], restarted):
        assert_hits(answers, oracle)
    damaged = list(zip(found["damaged answer"], oracle, strict=True))
    assert any(ours["cached"] < theirs["cached"] for ours, theirs in damaged)
    assert all(close_answer(ours, theirs) for ours, theirs in damaged)
    assert_wrong_hits(found["wrong"], oracle)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("kind", ["two ranks", "windows"])
def test_other_kinds_of_engines_hit_too(kind: str, tmp_path: Path) -> None:
    if kind == "two ranks":
        engine = tiny_engine(tiny_model(tmp_path / "model", "llama"), tensor_parallel_size=2)
        engine["distributed_executor_backend"] = "mp"
    else:
        engine = tiny_engine(tiny_gemma(tmp_path / "model", *["sliding", "full"] * 2))
    engine |= {"kv_transfer_config": offloading_settings(tmp_path / "kv"), "max_num_batched_tokens": 1024}
    ask: list[Any] = ["generate", [prompt_of(3, 300)], 4]
    emptied = [["settle_offloading"], ["reset_prefix_cache"], ["forget_offloaded_memory"]]
    (cold, oracle, *_, hit), _ = drive(engine, [ask, ask, *emptied, ask])
    assert (cold[0]["cached"], oracle[0]["cached"]) == (0, 299 // BLOCK_TOKENS * BLOCK_TOKENS)
    assert_hits(hit, oracle)
