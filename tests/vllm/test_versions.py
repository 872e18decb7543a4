"""The connector on other versions of vLLM than the one that is installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ImportedVllm, close_answer, drive, same_answer, tiercache_settings
from tiercache.integrations.vllm.versions import TESTED, check_version

OTHERS = sorted(Path(sys.prefix).glob("vllm-*"))
"""`make test-setup` puts the oldest one that the connector works with there."""


@pytest.fixture(scope="module", params=OTHERS or [None], ids=lambda path: path.name if path else "none")
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImportedVllm]:
    assert request.param is not None, "no other version of vLLM is installed: make test-setup"
    vllm = ImportedVllm(tmp_path_factory.mktemp("other"), request.param)
    yield vllm
    vllm.close()


def test_another_version_answers_as_its_own_prefix_cache_does(
    other: ImportedVllm, model: str, prompts: list[str], tmp_path: Path
) -> None:
    (_, expected), _ = drive(
        {"model": model, "enable_prefix_caching": True}, [["generate", prompts[:1]]] * 2, vllm=other
    )
    steps = [["generate", prompts[:1]], ["flush"], ["generate", prompts[:1]], ["clear_hot"], ["generate", prompts[:1]]]
    settings = {"model": model, "enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path)}
    (cold, _, from_memory, _, from_disk, *wrong), log = drive(
        settings, [*steps, ["corrupt_hot"], ["generate", prompts[:1]]], vllm=other
    )
    assert cold[0]["cached"] == 0 < expected[0]["cached"]
    for (ours,) in (from_memory, from_disk):
        assert ours["cached"] == expected[0]["cached"]
        assert same_answer(ours, expected[0])
    assert not same_answer(wrong[-1][0], expected[0]), "with wrong KV this has to fail, or it proves nothing"
    assert "was not tested with this connector" not in log


def test_what_one_version_stored_is_a_hit_of_the_other(
    other: ImportedVllm, model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing that makes the KV of this model has changed between them, and back ends write the same bytes."""
    settings = {"model": model, "enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path)}
    drive(settings, [["generate", prompts[:1]], ["flush"]])
    (_, (hit,), _, (wrong,)), _ = drive(
        settings, [["scanned"], ["generate", prompts[:1]], ["corrupt_hot"], ["generate", prompts[:1]]], vllm=other
    )
    assert hit["cached"] == wrong["cached"] == oracle[0]["cached"]
    assert close_answer(hit, oracle[0])
    assert not close_answer(wrong, oracle[0]), "with wrong KV this has to fail, or it proves nothing"


@pytest.mark.parametrize(("version", "known"), [(f"{TESTED[0]}.1+cpu", True), ("0.99.0", False), ("1.0", False)])
def test_untested_version_says_so(version: str, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tiercache.vllm"):
        check_version(version)
    assert ("was not tested" in caplog.text) is not known
