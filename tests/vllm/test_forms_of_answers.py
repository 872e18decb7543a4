"""Answers that have to be of a form, and beams: what the cache gives makes them what vLLM's own prefix cache makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, assert_hits, drive, tiercache_settings

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "pages": {"enum": [1, 20, 300]}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
WIDTH, BEAM_TOKENS = 3, 6


def test_structured_answers_and_beams(model: str, prompts: list[str], continued: str, tmp_path: Path) -> None:
    """With what lies on the disk."""
    engine: dict[str, Any] = {
        "model": model,
        "max_logprobs": 2 * WIDTH,
        "structured_outputs_config": {"disable_any_whitespace": True, "backend": "xgrammar"},
    }
    compute = ["generate", [*prompts, continued]]
    asked = [["generate_structured", prompts[0], {"json": SCHEMA}, 80], ["beam_search", continued, WIDTH, BEAM_TOKENS]]
    (*_, theirs, their_beams), _ = drive(engine | {"enable_prefix_caching": True}, [compute, *asked])
    ours = engine | {"enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path)}
    (*_, hit, beams), _ = drive(ours, [["loads_always"], compute, ["flush"], ["clear_hot"], *asked])

    assert hit["cached"] == (hit["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert_hits([hit], [theirs])
    assert json.loads(hit["text"]).keys() == {"title", "pages"}
    assert len({tuple(beam["tokens"]) for beam in beams}) == WIDTH
    assert [beam["tokens"] for beam in beams] == [beam["tokens"] for beam in their_beams]
    assert [beam["logprob"] for beam in beams] == pytest.approx([beam["logprob"] for beam in their_beams], abs=1e-3)
