"""Prompts with an image: the same text with another image is another prompt, and a hit gives the prefix cache's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.blip import IMAGE_TOKENS, tiny_blip, words
from tests.vllm.engines import BLOCK_TOKENS, drive, same_answer, tiercache_settings

pytestmark = pytest.mark.usefixtures("imported")

TEXT_TOKENS = 200
HIT_TOKENS = (IMAGE_TOKENS + TEXT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_hit_is_of_the_same_text_with_the_same_image(tmp_path: Path) -> None:
    engine = {
        "model": str(tiny_blip(tmp_path / "model")),
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
    }
    text = words(TEXT_TOKENS, seed=1)
    one, other, third = ([["generate_seeing", text, image]] for image in range(3))
    (first, reference, unlike, its_reference), _ = drive(engine, [*one, *one, *other, *other])
    assert (first["cached"], unlike["cached"]) == (0, 0) and reference["cached"] == its_reference["cached"] == HIT_TOKENS
    assert not same_answer(reference, its_reference), "the image makes no difference"
    cached = engine | {"tiercache": tiercache_settings(tmp_path / "kv")}
    empty: list[list[Any]] = [["idle"], ["reset_prefix_cache"]]
    found, _ = drive(
        cached,
        [
            *(["loads_always"], *one, ["flush"], *empty),
            *(*other, ["flush"], *empty),
            *(*one, *empty, ["clear_hot"], *one, *other),
            *(*empty, ["corrupt_hot"], *one),
        ],
    )
    answers = [answer for answer in found if isinstance(answer, dict)]
    cold, not_its, ram, disk, its_disk, wrong = answers
    assert cold["cached"] == not_its["cached"] == 0, "another image's KV was taken"
    assert same_answer(not_its, unlike)
    for answer in (ram, disk):
        assert answer["cached"] == HIT_TOKENS and same_answer(answer, reference)
    assert its_disk["cached"] == HIT_TOKENS and same_answer(its_disk, its_reference)
    assert wrong["cached"] == HIT_TOKENS and not same_answer(wrong, reference)
    (_, later, no_hit), _ = drive(cached, [["loads_always"], *one, *third])
    assert later["cached"] == HIT_TOKENS and same_answer(later, reference)
    assert no_hit["cached"] == 0
