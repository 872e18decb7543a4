"""A recurrent state is found where the engine left it at the end of a block, and a hit gives the prefix cache's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import drive, same_answer, tiercache_settings
from tests.vllm.recurrent import DTYPES, VOCABULARY, tiny_recurrent
from tests.vllm.test_sliding_windows import prompt_of

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.usefixtures("imported")

BLOCK_TOKENS = {"lfm2": 64, "qwen3_next": 384}
"""vLLM makes an attention block as large as a state."""
PROMPT_TOKENS = 900
PROMPT = prompt_of(3, PROMPT_TOKENS, range(3, VOCABULARY))
GENERATE: list[Any] = ["generate", [PROMPT], 8]
NOTHING = {"claims": 0, "leases": 0, "prefetched": 0, "blocks": 0, "requests": 0}


def engine_of(directory: Path, kind: str) -> dict[str, Any]:
    return {
        "model": str(tiny_recurrent(directory, kind)),
        "skip_tokenizer_init": True,
        "dtype": DTYPES[kind],
        "block_size": BLOCK_TOKENS[kind],
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 64 << 20,
    }


@pytest.mark.parametrize("kind", list(DTYPES))
def test_a_hit_is_the_prefix_caches_answer(kind: str, tmp_path: Path) -> None:
    """From RAM, from disk, and in a new process; and with wrong bytes it is another one."""
    engine = engine_of(tmp_path / "model", kind)
    hit_tokens = (PROMPT_TOKENS - 1) // BLOCK_TOKENS[kind] * BLOCK_TOKENS[kind]
    ((cold,), (reference,)), _ = drive(engine, [GENERATE, GENERATE])
    assert cold["cached"] == 0 and reference["cached"] == hit_tokens
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv")}
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
