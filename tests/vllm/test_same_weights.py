"""Two engines with the same weights at two paths share their KV; with one other byte in a tensor they do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import drive, same_answer, tiercache_settings

pytest.importorskip("vllm", reason="vLLM is not installed")


def copied(model: str, directory: Path) -> Path:
    """Files of its own, with other times."""
    shutil.copytree(model, directory)
    for path in directory.iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return directory


def change_one_byte(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.seek(-1001, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_the_same_weights_elsewhere_hit_what_was_stored_and_others_do_not(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Wrong KV changes the answer at last: what was compared is what was loaded."""
    settings = {"enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path / "kv")}
    generate = ["generate", prompts[:1]]
    ((cold,), _, stored), _ = drive({"model": model} | settings, [generate, ["flush"], ["layout"]])
    elsewhere = copied(model, tmp_path / "elsewhere" / "copy")
    (_, (hit,), _, (wrong,), found), log = drive(
        {"model": str(elsewhere)} | settings, [["scanned"], generate, ["corrupt_hot"], generate, ["layout"]]
    )
    assert found["fingerprint"] == stored["fingerprint"]
    assert cold["cached"] == 0
    assert hit["cached"] == wrong["cached"] == oracle[0]["cached"]
    assert same_answer(hit, oracle[0])
    assert not same_answer(wrong, oracle[0])
    assert f"the model's identity is {stored['model']}" in log

    change_one_byte(elsewhere / "model.safetensors")
    (_, (other,), other_layout), _ = drive({"model": str(elsewhere)} | settings, [["scanned"], generate, ["layout"]])
    assert other["cached"] == 0
    assert other_layout["fingerprint"] != stored["fingerprint"]
    named = settings | {"tiercache": settings["tiercache"] | {"model_id": "ours"}}
    ((layout,), _) = drive({"model": str(elsewhere)} | named, [["layout"]])
    assert layout["model"] == "id ours"
