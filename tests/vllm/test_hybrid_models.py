"""Layers that see a window only, layers with a recurrent state, models that see images: a hit loads what they need, and
gives the prefix cache's answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.answers import assert_hits, assert_wrong_hits, same_answer
from tests.vllm.engines import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    NOTHING_LEFT,
    drive,
    drive_named,
    prompt_of,
    tiercache_settings,
    tiny_engine,
)
from tests.vllm.models import IMAGE_TOKENS, WINDOW_TOKENS, tiny_blip, tiny_gemma, tiny_model, words

pytestmark = pytest.mark.usefixtures("imported")

DTYPES = {"lfm2": "float32", "qwen3_next": "bfloat16"}
"""vLLM's CPU kernel for delta nets knows bfloat16 only."""


def generate(prompt_tokens: int) -> list[Any]:
    return ["generate", [prompt_of(3, prompt_tokens)], 8]


def capacity(log: str) -> set[str]:
    return set(re.findall(r"KV cache size: [\d,]+ tokens, Maximum concurrency.*", log))


def test_a_hit_loads_what_windows_leave_and_is_the_prefix_caches_answer(tmp_path: Path) -> None:
    """From RAM, from disk, and in a new process; vLLM has as much room for KV as without."""
    windows, prompt_tokens = 5, 980
    hit_tokens = (prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert hit_tokens == (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 2 * WINDOW_TOKENS
    model = tiny_gemma(tmp_path / "model", *["sliding"] * windows, "full")
    engine, ask = tiny_engine(model, disable_log_stats=False), generate(prompt_tokens)
    ((cold,), reference), log_alone = drive(engine, [ask, ask])
    assert cold["cached"] == 0 and reference[0]["cached"] == hit_tokens
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv")}
    again: list[list[Any]] = [["reset_prefix_cache"], ask]
    steps = [["loads_always"], ask, ["flush"], *again, ["clear_hot"], *again, ["left_behind"]]
    (_, (first,), flushed, _, hot, _, _, disk, left), log = drive(cached, steps)
    steps = [["loads_always"], ["scanned"], ask, ["corrupt_hot"], *again]
    steps += [["clear_hot"], ["damage_files", str(tmp_path / "kv"), "flip", 3], *again, ["left_behind"]]
    (_, _, later, corrupted, _, wrong, _, damaged, _, (seen,), left_later), log_later = drive(cached, steps)
    assert first["cached"] == 0 and flushed
    for answers in (hot, disk, later):
        assert_hits(answers, reference)
    assert corrupted > 10 and damaged > 10
    assert_wrong_hits(wrong, reference)
    assert seen["cached"] < hit_tokens and seen["tokens"] == first["tokens"]
    assert left == left_later == NOTHING_LEFT
    a_token = 2 * 64 * 4
    bytes_loaded = (hit_tokens + windows * WINDOW_TOKENS) * a_token  # whole blocks, and chunks, are a part of a window
    loads = re.findall(r"Loaded \d+ out of \d+ tokens .*\(chunks: \d+, groups: 6, MiB: ([\d.]+)\)", log + log_later)
    assert [float(mib) for mib in loads[:3]] == [pytest.approx(bytes_loaded / 2**20, abs=0.06)] * 3
    assert len(capacity(log_alone)) == 1 and capacity(log_alone) == capacity(log) == capacity(log_later)
    assert "of no use" not in log + log_later


KINDS = [("lfm2", "auto", 1), ("lfm2", "auto", 2), ("qwen3_next", "cpu", 1), ("qwen3_next", "auto", 2)]


@pytest.mark.parametrize(("kind", "device", "ranks"), KINDS)
def test_a_hit_on_recurrent_states_is_the_answer(kind: str, device: str, ranks: int, tmp_path: Path) -> None:
    """From RAM, from disk, and in a new process. Each rank has states of its own."""
    block_tokens, prompt_tokens = 128, 900  # an attention block is as large as a state at least
    engine = tiny_engine(tiny_model(tmp_path / "model", kind), dtype=DTYPES[kind], block_size=block_tokens)
    engine["max_num_batched_tokens"] = 512
    if ranks > 1:
        engine |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    ask, emptied = generate(prompt_tokens), [("", ["idle"]), ("", ["reset_prefix_cache"])]
    ((cold,), (reference,)), _ = drive(engine, [ask, ask])
    assert (cold["cached"], reference["cached"]) == (0, (prompt_tokens - 1) // block_tokens * block_tokens)
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv", device=device)}
    found, log = drive_named(
        cached,
        [
            *(("", ["loads_always"]), ("cold", ask), ("", ["on_workers", "flush"]), *emptied),
            *(("hot", ask), ("", ["on_workers", "clear_hot"]), *emptied),
            *(("disk", ask), ("corrupted", ["on_workers", "corrupt_hot"]), *emptied, ("wrong", ask)),
        ],
    )
    left = [("left", ["left_behind"])] if ranks == 1 else []
    later, _ = drive_named(cached, [("", ["loads_always"]), ("", ["on_workers", "scanned"]), ("later", ask), *left])
    assert found["cold"]["cached"] == 0
    assert_hits([found["hot"], found["disk"], later["later"]], [reference] * 3)
    assert all(found["corrupted"])
    assert_wrong_hits([found["wrong"]], [reference])
    assert later.get("left", NOTHING_LEFT) == NOTHING_LEFT
    assert "keep a recurrent state" in log, log


TEXT_TOKENS = 200
SEEN_TOKENS = (IMAGE_TOKENS + TEXT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_hit_is_of_the_same_text_with_the_same_image(tmp_path: Path) -> None:
    """The same text with another image is another prompt."""
    limits = {"max_model_len": 512, "max_num_batched_tokens": 512}
    engine = tiny_engine(tiny_blip(tmp_path / "model"), skip_tokenizer_init=False, **limits)
    text = words(TEXT_TOKENS, seed=1)
    one, other, third = (["generate_seeing", text, image] for image in range(3))
    (first, reference, unlike, its_reference), _ = drive(engine, [one, one, other, other])
    assert (first["cached"], unlike["cached"]) == (0, 0) and reference["cached"] == SEEN_TOKENS
    assert not same_answer(reference, its_reference), "the image makes no difference"
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv")}
    emptied: list[tuple[str, list[Any]]] = [("", ["idle"]), ("", ["reset_prefix_cache"])]
    found, _ = drive_named(
        cached,
        [
            *(("", ["loads_always"]), ("cold", one), ("", ["flush"]), *emptied),
            *(("not its", other), ("", ["flush"]), *emptied),
            *(("ram", one), ("", ["clear_hot"]), *emptied),
            *(("disk", one), ("its disk", other), ("", ["corrupt_hot"]), *emptied),
            ("wrong", one),
        ],
    )
    assert found["cold"]["cached"] == found["not its"]["cached"] == 0, "another image's KV was taken"
    assert same_answer(found["not its"], unlike)
    (_, later, no_hit), _ = drive(cached, [["loads_always"], one, third])
    assert_hits([found["ram"], found["disk"], found["its disk"], later], [reference] * 2 + [its_reference, reference])
    assert_wrong_hits([found["wrong"]], [reference])
    assert no_hit["cached"] == 0
