"""Models of which it shows, when they are asked, that their KV cannot be cached; and those that remember something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from tests.transformers.models import CHUNK_TOKENS, Open, make_model, tokens
from tiercache.errors import LayoutError
from tiercache.integrations.transformers import Generator, ModelKv

SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 514,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 16}
PROPHET = {"vocab_size": 120, "hidden_size": 64, "num_decoder_layers": 1, "num_encoder_layers": 1, "decoder_ffn_dim": 64}


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def show_an_image(model: Any) -> None:
    """After which the model remembers by how much the positions behind an image are shifted."""
    ids = torch.tensor([[10, 5, *[3] * 16, 6, 11, 12]])
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == 3).long(),
        pixel_values=torch.randn(64, 1176),
        image_grid_thw=torch.tensor([[1, 8, 8]]),
        generation_config=GenerationConfig(max_new_tokens=2, do_sample=False),
    )
    assert model.model.rope_deltas.item() != 0


async def test_somebodys_image_does_not_shift_the_positions_of_later_texts(open_cache: Open) -> None:
    model, settings = qwen2_vl(), GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None)
    prompt = [10 + one % 100 for one in tokens(7 * CHUNK_TOKENS + 5)]
    kv = ModelKv(model, chunk_tokens=CHUNK_TOKENS)
    logits: list[Any] = []
    model.register_forward_hook(lambda _, inputs, output: logits.append(output.logits[:, -1].clone()))
    async with open_cache(kv) as cache, Generator(cache, kv) as generator:
        before = await generator.generate(prompt, settings, cached=False)
        expected = logits[-4:]
        for hit_tokens in (0, 7 * CHUNK_TOKENS):
            show_an_image(model)
            answer = await generator.generate(prompt, settings)
            assert answer.hit_tokens == hit_tokens
            assert answer.ids == before.ids
            assert all(torch.equal(one, other) for one, other in zip(logits[-4:], expected, strict=True))


def test_a_model_that_takes_other_positions_when_it_is_called_is_refused() -> None:
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**SIZES, is_decoder=True)).eval()
    with pytest.raises(LayoutError, match="other KV when it is called"):
        ModelKv(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.BertLMHeadModel, transformers.BertConfig(**SIZES, is_decoder=False)),
        (transformers.GemmaForCausalLM, transformers.GemmaConfig(**GEMMA, use_bidirectional_attention=True)),
    ],
)
def test_a_model_that_looks_ahead_is_refused(kind: Any, config: Any, dtype: torch.dtype) -> None:
    config.initializer_range = 0.2
    with pytest.raises(LayoutError, match="looks ahead|when it is called"):
        ModelKv(kind(config).to(dtype).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_refuses_no_model(dtype: torch.dtype) -> None:
    """Nor experts, which rounding may exchange."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, initializer_range=0.2)
    ModelKv(make_model("gemma").to(dtype))
    ModelKv(transformers.MixtralForCausalLM(config).to(dtype).eval())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.MiniMaxForCausalLM, transformers.MiniMaxConfig(**SIZES, num_local_experts=2)),
        (transformers.ProphetNetForCausalLM, transformers.ProphetNetConfig(**PROPHET)),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused_with_its_own_words(kind: Any, config: Any) -> None:
    model = kind(config).eval()
    with pytest.raises(LayoutError, match=f"{kind.__name__}.*Error: ") as refused:
        ModelKv(model)
    assert refused.value.__cause__ is not None
