"""Run `python -m tiercache.demo.convert FILE.gguf DIRECTORY`: dequantise the weights of a Llama model for vLLM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def convert(weights: Path, directory: Path) -> None:
    """Dequantise a GGUF file into `directory`: safetensors in bfloat16, configuration, tokenizer.

    The head has to be tied to the embedding.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # `save_pretrained` refuses a quantised model; these are its plain weights.
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
