"""What in an engine changes the KV that it computes from given weights, in the place of its version.

Its version changes every two weeks, and the KV does so seldom. What does change it:

- The bytes that a back end makes of K and V: their order in a block, packing for an instruction set, rounding, scales.
  `byte_format` does not deduce them, it lets the back end write a known K and V, and takes what lies in the block then.
- What is computed. `code_of_model` has the source text of what is the model's own: its module, those of its classes' bases,
  and its rotary embeddings with the parameters that they got in the end. The parts that all models share (matrix products,
  norms, attention kernels) are taken to compute what they are named after, to rounding, which differs from one batch to
  the next as well. Models within models (the language model in one that sees images) are made by name and not seen.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("tiercache.vllm")

_NULL_BLOCK = 0
"""vLLM's: no request's KV ever lies in it. vLLM itself lets padding write there."""
_MODELS = "vllm.model_executor.models."
_NOT_THE_MODELS_OWN = ("interfaces", "interfaces_base", "utils", "adapters")
"""How models are loaded, split, adapted and pooled."""


def byte_format(
    layers: Mapping[str, Any], tensors: Mapping[str, Any], computed_in: Any, parts: int = 1
) -> str | None:
    """A digest of what the back ends write for known K and V; None where they cannot be asked. With `parts`, of what they
    write for each of so many parts of the heads, which has to be the same.

    `layers` are attention layers, `tensors` their KV by the same names, (kernel blocks, heads, tokens, K and V of a token).
    `computed_in` is torch's dtype of K and V before they are stored, which may be in fewer bits. The null block is written
    to, and is afterwards what it was before; no step may be under way.
    """
    formats: dict[str, str] = {}
    try:
        for name, layer in layers.items():
            implementation = layer.impl
            kind = f"{type(implementation).__qualname__} {getattr(implementation, 'kv_cache_dtype', '')}"
            if kind not in formats:
                formats[kind] = _written(layer, tensors[name], computed_in, parts)
    except Exception as error:
        logger.info("a back end does not show its byte format, so KV is shared within this version of vLLM only: %r", error)
        return None
    return digest(sorted(formats.values())) if formats else None


def _written(layer: Any, tensor: Any, computed_in: Any, parts: int) -> str:
    """What one layer's back end writes for the K and V of one kernel block."""
    import torch

    tokens, heads, head_size = tensor.shape[2], layer.num_kv_heads // parts, layer.head_size
    numbers = torch.arange(2 * tokens * heads * head_size) * 7919 % 251 - 125
    # Whole numbers below 256 are exact in every type that KV is computed in.
    key, value = numbers.to(computed_in).reshape(2, tokens, heads, head_size).repeat(1, 1, parts, 1).to(tensor.device)
    block = tensor[_NULL_BLOCK : _NULL_BLOCK + 1]
    before = block.clone()
    try:
        slots = torch.arange(tokens, dtype=torch.int64, device=tensor.device)
        layer.impl.do_kv_cache_update(layer, key, value, tensor, slots)
        written = block.clone(memory_format=torch.contiguous_format).cpu()
    finally:
        block.copy_(before)
    if torch.equal(written.view(torch.uint8), before.contiguous().cpu().view(torch.uint8)):
        raise ValueError(f"{type(layer.impl).__qualname__} wrote nothing into the block")
    first, *others = written.view(torch.uint8).chunk(parts, dim=1)
    if not all(torch.equal(first, other) for other in others):
        raise ValueError(f"{type(layer.impl).__qualname__} does not write each head by itself")
    return hashlib.sha256(first.contiguous().numpy().tobytes()).hexdigest()


def code_of_model(model_config: Any) -> str | None:
    """A digest of the source text of what is the model's own, and of the rotary embeddings that this process has made.
    None where there is no source, or another one than was expected."""
    try:
        return _code_of_model(model_config)
    except Exception as error:
        logger.info("a model does not show its code, so KV is shared within this version of vLLM only: %r", error)
        return None


def _code_of_model(model_config: Any) -> str:
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import get_model_cls

    model_class = get_model_cls(model_config)
    embeddings = list(rotary_embedding._ROPE_DICT.values())
    sources = _modules_of(sys.modules[model_class.__module__]) | {
        name: inspect.getsource(base)
        for embedding in embeddings
        for base in type(embedding).__mro__
        if (name := f"{base.__module__}.{base.__qualname__}").startswith(f"{rotary_embedding.__name__}.")
    }
    parts: list[Any] = [model_class.__qualname__, sorted(sources.items()), sorted(map(_parameters, embeddings))]
    if any("max_model_len" in source for source in sources.values()):
        # Some models choose a scaling by the longest prompt that they may get.
        parts.append(model_config.max_model_len)
    if any(name.startswith(f"{_MODELS}transformers") for name in sources):
        import transformers

        parts.append(transformers.__version__)
    return digest(parts)


def _modules_of(module: Any) -> dict[str, str]:
    """The source text of the module and of those that its classes are derived from, by name."""
    sources = {module.__name__: _source(module)}
    for _, found in inspect.getmembers(module, inspect.isclass):
        if found.__module__ != module.__name__:
            continue
        for base in found.__mro__:
            name = base.__module__
            if name.startswith(_MODELS) and name.removeprefix(_MODELS) not in _NOT_THE_MODELS_OWN and name not in sources:
                sources |= _modules_of(sys.modules[name])
    return sources


def _source(module: Any) -> str:
    return Path(inspect.getfile(module)).read_text()


def _parameters(embedding: Any) -> str:
    """The plain numbers and words of a rotary embedding: base, dimension, scaling, style."""
    plain = {name: value for name, value in vars(embedding).items() if isinstance(value, (int, float, str))}
    return f"{type(embedding).__qualname__} {json.dumps(plain, sort_keys=True)}"


def digest(values: Any) -> str:
    """24 hex digits for what has a `repr` that says all of it."""
    return hashlib.blake2b(repr(values).encode(), digest_size=12).hexdigest()
