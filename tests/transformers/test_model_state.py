"""What changes KV is in the key, or noticed, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.transformers.models import make_model
from tiercache.errors import LayoutError
from tiercache.integrations.transformers import ModelKv


def add_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + 1.0)


def add_pre_hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, inputs: None)


def patch_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda states: 2 * own(states)


def train_a_layer(model: Any) -> None:
    model.model.layers[1].train()


def scale_attention(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 3


def other_epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def other_window(model: Any) -> None:
    model.config.sliding_window = 8


def other_attention_of_a_part(model: Any) -> None:
    model.model.set_attn_implementation("eager")


def share_a_module(model: Any) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


REFUSED = [add_hook, add_pre_hook, patch_forward, train_a_layer]
IN_THE_KEY = [scale_attention, other_epsilon, other_attention_of_a_part, share_a_module]


@pytest.mark.parametrize("change", [*REFUSED, *IN_THE_KEY, other_window])
def test_a_change_is_noticed_and_then_in_the_key_or_refused(change: Callable[[Any], None]) -> None:
    model = make_model("llama")
    kv = ModelKv(model)
    kv.check_unchanged()
    change(model)
    with pytest.raises(LayoutError):
        kv.check_unchanged()
    if change in REFUSED:
        with pytest.raises(LayoutError, match="hook|forward|training"):
            ModelKv(model)
    elif change in IN_THE_KEY:
        assert ModelKv(model).layout.fingerprint != kv.layout.fingerprint


def test_modules_that_are_shared_otherwise_make_another_key() -> None:
    first, second = make_model("llama"), make_model("llama")
    first.model.layers[2].mlp = first.model.layers[0].mlp
    second.model.layers[2].mlp = second.model.layers[1].mlp
    assert ModelKv(first).layout.fingerprint != ModelKv(second).layout.fingerprint


def test_another_implementation_of_experts_makes_another_key_and_is_noticed() -> None:
    config = transformers.MixtralConfig(
        vocab_size=120, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    kv = ModelKv(model)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(LayoutError, match="make another ModelKv"):
        kv.check_unchanged()
    assert ModelKv(model).layout.fingerprint != kv.layout.fingerprint


def test_a_model_that_was_saved_and_loaded_has_the_same_key(tmp_path: Path) -> None:
    transformers.logging.disable_progress_bar()  # it leaves a thread behind
    model = make_model("gemma")
    model.save_pretrained(tmp_path)
    loaded = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path).eval()
    assert ModelKv(loaded).layout == ModelKv(model).layout


def test_generating_changes_nothing(kv: ModelKv) -> None:
    kv.model.generate(torch.full((1, 40), 7), max_new_tokens=3, do_sample=False, output_attentions=True)
    kv.check_unchanged()


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_refused() -> None:
    quantised = torch.ao.quantization.quantize_dynamic(make_model("llama").float(), {torch.nn.Linear}, torch.qint8).eval()
    with pytest.raises(LayoutError, match="packed weights"):
        ModelKv(quantised)


def test_what_is_saved_beside_packed_weights_is_in_the_key() -> None:
    """As bitsandbytes does with the scales of its weights."""

    def with_scale(scale: float) -> Any:
        class Scaled(torch.nn.Linear):  # type: ignore[misc]
            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                super()._save_to_state_dict(destination, prefix, keep_vars)
                destination[prefix + "weight.scale"] = torch.tensor(scale)

        model = make_model("llama")
        model.model.layers[0].mlp.down_proj.__class__ = Scaled
        return model

    assert ModelKv(with_scale(1.0)).layout.fingerprint != ModelKv(with_scale(2.0)).layout.fingerprint


def test_a_model_that_accelerate_has_placed_is_cached_and_one_that_was_patched_before_it_is_not() -> None:
    from accelerate import hooks

    model = make_model("llama")
    fingerprint = ModelKv(model).layout.fingerprint
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", io_same_device=True), append=True)
    hooks.add_hook_to_module(model.model.layers[0], hooks.AlignDevicesHook("cpu"), append=True)
    assert ModelKv(model).layout.fingerprint == fingerprint
    patched = make_model("llama")
    patch_forward(patched)
    hooks.add_hook_to_module(patched.model.layers[0].mlp, hooks.AlignDevicesHook("cpu"), append=True)
    with pytest.raises(LayoutError, match="forward"):
        ModelKv(patched)
