"""A tiny model that sees images (BLIP-2: 32 tokens for an image, in front of the prompt), whose random weights are large
enough for an answer to depend on the image."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
IMAGE_SIZE = 56
IMAGE_TOKENS = 32
_FIRST_WORD = 5


def words(tokens: int, seed: int) -> str:
    """So many tokens of text."""
    import random

    numbers = random.Random(seed)
    return " ".join(f"w{numbers.randrange(_FIRST_WORD, VOCABULARY)}" for _ in range(tokens))


def tiny_blip(directory: Path) -> Path:
    """Make `directory` hold such a model with its tokenizer and processor; returns it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.utils.logging.disable_progress_bar()  # it starts a thread that stays
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<image>": 4}
    vocabulary = special | {f"w{number}": number for number in range(_FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<image>"], **named
    )
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.Blip2Config(
        vision_config=common | {"image_size": IMAGE_SIZE, "patch_size": 14},
        qformer_config=common | {"vocab_size": 64, "encoder_hidden_size": 32, "max_position_embeddings": 64},
        text_config={
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 2048,
        },
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=special["<image>"],
    )
    torch.manual_seed(3)
    model = transformers.Blip2ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    sees = transformers.BlipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    transformers.Blip2Processor(sees, fast, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)
    return directory
