"""A forward pass that raises an error: vLLM's V1 model runner has its blocks saved all the same, and then ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.drive import chunk_files
from tests.vllm.engines import CHUNK_TOKENS, STEP_TOKENS, drive, prompt_of, tiercache_settings, tiny_engine
from tests.vllm.models import tiny_gemma

pytestmark = pytest.mark.usefixtures("imported")


def test_blocks_that_a_failed_forward_pass_did_not_fill_are_not_stored(tmp_path: Path) -> None:
    """Those of the steps before are."""
    engine = tiny_engine(tiny_gemma(tmp_path / "model", *["full"] * 3), tiercache=tiercache_settings(tmp_path / "kv"))
    (said,), log = drive(engine, [["generate_failing", prompt_of(0, STEP_TOKENS + CHUNK_TOKENS + 8), 1]])
    assert said == "no memory for a forward pass"
    assert len(chunk_files(str(tmp_path / "kv"))) == STEP_TOKENS // CHUNK_TOKENS
    assert "a forward pass failed: this engine stores nothing any more" in log
