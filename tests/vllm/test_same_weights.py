"""Two engines with the same weights at two paths share their KV; with one other byte in a tensor they do not. An adapter
that was trained again is another one, though its name and its path are the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.vllm.answers import assert_hits, assert_wrong_hits, same_answer
from tests.vllm.engines import drive, tiercache_settings
from tests.vllm.models import SHORTENED_LAYERS


def test_the_same_weights_elsewhere_hit_what_was_stored_and_others_do_not(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Wrong KV changes the answer at last: what was compared is what was loaded."""
    settings: dict[str, Any] = {"enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path / "kv")}
    generate = ["generate", prompts[:1]]
    ((cold,), _, stored), _ = drive({"model": model} | settings, [generate, ["flush"], ["layout"]])
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    for path in elsewhere.iterdir():
        os.utime(path, (1_600_000_000, 1_600_000_000))
    settings["model"] = str(elsewhere)
    (_, hit, _, wrong, found), log = drive(settings, [["scanned"], generate, ["corrupt_hot"], generate, ["layout"]])
    assert found["fingerprint"] == stored["fingerprint"]
    assert cold["cached"] == 0
    assert_hits(hit, oracle[:1])
    assert_wrong_hits(wrong, oracle[:1])
    assert f"the model's identity is {stored['model']}" in log

    with (elsewhere / "model.safetensors").open("r+b") as file:
        file.seek(-1001, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    (_, (other,), other_layout), _ = drive(settings, [["scanned"], generate, ["layout"]])
    assert other["cached"] == 0
    assert other_layout["fingerprint"] != stored["fingerprint"]
    settings["tiercache"] |= {"model_id": "ours"}
    ((layout,), _) = drive(settings, [["layout"]])
    assert layout["model"] == "id ours"


def save_adapter(directory: Path, seed: int) -> None:
    """A LoRA for the attention of the first layers of SmolLM2, large enough to be seen."""
    import torch
    from safetensors.torch import save_file

    random_numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(SHORTENED_LAYERS):
        for module, outputs in (("q_proj", 576), ("v_proj", 192)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, 576, generator=random_numbers) / 24
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, 8, generator=random_numbers) / 24
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def test_an_adapter_that_was_trained_again_is_another_one(model: str, prompts: list[str], tmp_path: Path) -> None:
    engine = {
        "model": model,
        "enable_prefix_caching": False,
        "enable_lora": True,
        "max_lora_rank": 8,
        "tiercache": tiercache_settings(tmp_path / "kv", lookup_timeout_ms=30_000, blocking_timeout_secs=30),
    }
    adapted = ["generate_adapted", prompts[0], "ours", str(tmp_path / "adapter")]
    answers = {}
    for name, seed in (("one", 1), ("other", 2)):
        save_adapter(tmp_path / name, seed)
    # What was written as an engine began is shared with nobody: this one takes longer to start than files stay that new.
    drive(engine | {"tiercache": None}, [["idle"]])
    for life, name in (("first", "one"), ("trained again", "other"), ("as before", "one")):
        (tmp_path / name).rename(tmp_path / "adapter")
        (_, *answers[life], _), _ = drive(engine, [["scanned"], adapted, adapted, ["flush"]])
        (tmp_path / "adapter").rename(tmp_path / name)
    for life, from_disk in (("first", 0), ("trained again", 0), ("as before", 256)):
        assert [answer["cached"] for answer in answers[life]] == [from_disk, 256]
    first, again, as_before = (answers[life][1] for life in answers)
    assert same_answer(first, as_before)
    assert not same_answer(first, again)
