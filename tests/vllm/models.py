"""Models for tests: tiny ones of any shape, and the first layers of the demo's.

The random weights of tiny models are large enough for an answer to depend on every byte of its KV or state. vLLM's
`load_format: dummy` has weights that are so small that answers stay what they are when the KV is garbage.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 2048
LAYERS = 2
WINDOW_TOKENS = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    # Without experts, with the latent of 512 + 64 that vLLM's CPU kernel is made for.
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 2,
        "first_k_dense_replace": LAYERS,
        "hidden_act": "silu",
    },
    "gemma3_text": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW_TOKENS,
    },
    # Short convolutions.
    "lfm2": {
        "hidden_size": 128,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "block_dim": 128,
        "conv_dim": 128,
        "norm_eps": 1e-5,
    },
    # Gated delta nets. Mamba 2 cannot be run: vLLM 0.32's CPU kernel fails with prefix caching, without a connector too.
    "qwen3_next": {
        "hidden_size": 128,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
}


def tiny_model(directory: Path, kind: str, **config: Any) -> Path:
    """Make `directory` hold a model of that kind, and return it."""
    import torch
    import transformers

    settings = _COMMON | _KINDS[kind] | config
    if "layer_types" in settings:
        settings["num_hidden_layers"] = len(settings["layer_types"])
    transformers.utils.logging.disable_progress_bar()  # it starts a thread that stays
    torch.manual_seed(14)
    described = transformers.AutoConfig.for_model(kind, **settings)
    transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).save_pretrained(directory)
    return directory


def tiny_gemma(directory: Path, *layers: str) -> Path:
    """Make `directory` hold a tiny Gemma 3, and return it. `layers` are "full" or "sliding", which sees `WINDOW_TOKENS`."""
    return tiny_model(directory, "gemma3_text", layer_types=[f"{layer}_attention" for layer in layers])


def untrained_llama(directory: Path, weights: int = 4096, **config: Any) -> Path:
    """Make `directory` hold a Llama that nobody runs, with any weights and this `config` as it is, and return it."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(_COMMON | _KINDS["llama"] | named | config))
    save_file({"layer": np.arange(weights, dtype=np.uint32)}, directory / "model.safetensors")
    return directory


IMAGE_TOKENS = 32
_IMAGE_SIZE = 56
_FIRST_WORD = 5


def words(tokens: int, seed: int) -> str:
    """Return so many tokens of text for `tiny_blip`."""
    numbers = random.Random(seed)
    return " ".join(f"w{numbers.randrange(_FIRST_WORD, VOCABULARY)}" for _ in range(tokens))


def tiny_blip(directory: Path) -> Path:
    """Make `directory` hold a model that sees images, with tokenizer and processor, and return it.

    BLIP-2: `IMAGE_TOKENS` for an image, in front of the prompt.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.utils.logging.disable_progress_bar()
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<image>": 4}
    vocabulary = special | {f"w{number}": number for number in range(_FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<image>"], **named
    )
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    config = transformers.Blip2Config(
        vision_config=common | {"image_size": _IMAGE_SIZE, "patch_size": 14},
        qformer_config=common | {"vocab_size": 64, "encoder_hidden_size": 32, "max_position_embeddings": 64},
        text_config=text | {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048},
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=special["<image>"],
    )
    torch.manual_seed(3)
    model = transformers.Blip2ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    sees = transformers.BlipImageProcessor(size={"height": _IMAGE_SIZE, "width": _IMAGE_SIZE})
    transformers.Blip2Processor(sees, fast, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)
    return directory


SHORTENED_LAYERS = 6


def shorten(model: Path, directory: Path) -> Path:
    """Make `directory` hold the first layers of `model`, whose answers a CPU computes four times sooner, and return it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    def is_kept(name: str) -> bool:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        return layer is None or int(layer[1]) < SHORTENED_LAYERS

    directory.mkdir()
    with safe_open(model / "model.safetensors", "pt") as weights:
        kept = {name: weights.get_tensor(name) for name in filter(is_kept, weights.keys())}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": SHORTENED_LAYERS}
    (directory / "config.json").write_text(json.dumps(config))
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (directory / path.name).symlink_to(path)
    return directory
