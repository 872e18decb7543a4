"""The connector on other versions of vLLM than the one that is installed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.answers import assert_hits, assert_wrong_hits, close_answer
from tests.vllm.engines import drive, tiercache_settings
from tiercache.integrations.needed import TESTED_VLLM, check_version

OTHERS = sorted(Path(sys.prefix).glob("vllm-*"))
"""`make test-setup` puts the oldest one that the connector works with there."""


@pytest.mark.parametrize("other", OTHERS or [None], ids=lambda path: path.name if path else "none")
def test_another_version_answers_as_its_own_prefix_cache_does_and_hits_what_this_one_stored(
    other: Path | None, model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing that makes the KV of this model has changed between them, and back ends write the same bytes."""
    assert other is not None, "no other version of vLLM is installed: make test-setup"
    generate: list[Any] = ["generate", prompts[:1]]
    (_, expected), _ = drive({"model": model, "enable_prefix_caching": True}, [generate, generate], vllm=other)
    alone: dict[str, Any] = {"model": model, "enable_prefix_caching": False}
    its_own, shared = (alone | {"tiercache": tiercache_settings(tmp_path / name)} for name in ("own", "shared"))
    steps = [generate, ["flush"], generate, ["clear_hot"], generate, ["corrupt_hot"], generate]
    (cold, _, from_memory, _, from_disk, _, wrong), log = drive(its_own, steps, vllm=other)
    assert cold[0]["cached"] == 0 < expected[0]["cached"]
    assert_hits(from_memory, expected)
    assert_hits(from_disk, expected)
    assert_wrong_hits(wrong, expected)
    assert "was not tested with this connector" not in log
    drive(shared, [generate, ["flush"]])
    (_, (hit,), _, (wrong,)), _ = drive(shared, [["scanned"], generate, ["corrupt_hot"], generate], vllm=other)
    assert hit["cached"] == wrong["cached"] == oracle[0]["cached"]
    assert close_answer(hit, oracle[0])
    assert not close_answer(wrong, oracle[0]), "with wrong KV this has to fail, or it proves nothing"


@pytest.mark.parametrize(("version", "known"), [(f"{TESTED_VLLM[0]}.1+cpu", True), ("0.99.0", False), ("1.0", False)])
def test_untested_version_says_so(version: str, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tiercache.vllm"):
        check_version(version)
    assert ("was not tested" in caplog.text) is not known
