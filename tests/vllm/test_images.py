"""Prompts with an image: the same text with another image is another prompt, and a hit gives the prefix cache's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import (
    BLOCK_TOKENS,
    assert_hits,
    assert_wrong_hits,
    drive,
    drive_named,
    same_answer,
    tiercache_settings,
)
from tests.vllm.models import IMAGE_TOKENS, tiny_blip, words

TEXT_TOKENS = 200
HIT_TOKENS = (IMAGE_TOKENS + TEXT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.usefixtures("imported")
def test_a_hit_is_of_the_same_text_with_the_same_image(tmp_path: Path) -> None:
    engine: dict[str, Any] = {
        "model": str(tiny_blip(tmp_path / "model")),
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
    }
    text = words(TEXT_TOKENS, seed=1)
    one, other, third = (["generate_seeing", text, image] for image in range(3))
    (first, reference, unlike, its_reference), _ = drive(engine, [one, one, other, other])
    assert (first["cached"], unlike["cached"]) == (0, 0) and reference["cached"] == HIT_TOKENS
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
