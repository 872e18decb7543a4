"""Compute a digest, for keys, of everything in a model that changes its KV, and a number that changes with it.

Refuses everything that can be neither hashed nor watched: hooks, modules with a `forward` of their own, packed weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import torch

from tiercache.errors import LayoutError

_NOT_OF_THE_KV = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that give a location, or a value that the model reports more reliably."""
_NOT_OF_A_MODULE = ("training", "name_or_path")
"""Attributes to ignore: `training` is checked separately, and the other gives a location."""
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TRUSTED = ("transformers", "accelerate")
"""Packages whose hooks move or inspect the results of modules without changing them."""
_PLAIN = (bool, int, float, str)
_HASHING_THREADS = 4
_SAMPLE = 256
"""Approximate sample size per weight for detecting changes."""


def check_modules(model: Any) -> None:
    """Raise LayoutError for a module in training, or with an untrusted hook, or a `forward` that is not its class's."""
    for name, module in model.named_modules():
        own = vars(module)
        if own["training"]:
            raise LayoutError(
                f"{name or 'the model'} is in training, where dropout makes other KV of the same tokens: call model.eval()"
            )
        kinds = _HOOKS[:1] if module is model else _HOOKS  # hooks after the whole model change nothing
        if any(own[kind] and not all(map(_is_trusted, own[kind].values())) for kind in kinds):
            raise LayoutError(f"{name or 'the model'} has a hook, which may change KV without a trace: remove it")
        if "forward" in own and not _is_placed(own):
            raise LayoutError(f"{name or 'the model'} has a `forward` of its own, not its class's: it cannot be cached")


def _is_trusted(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] in _TRUSTED


def _is_placed(own: dict[str, Any]) -> bool:
    """Return True for the `forward` of accelerate, which moves inputs and weights and calls that of the class."""
    before = own.get("_old_forward")
    return (
        type(own.get("_hf_hook")).__module__.startswith("accelerate.")
        and isinstance(before, MethodType)
        and before.__func__ is getattr(type(before.__self__), "forward", None)
    )


def state_of(model: Any) -> int:
    """Return a number that changes with any write to or move of a weight, and with numbers of modules and
    configurations.

    Writes through `.data` or numpy, and to tensors of inference mode, change no version, which is why samples are
    included.
    """
    written = []
    samples: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    with torch.no_grad():
        for _, weight in _weights(model):
            written.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
            if not weight.is_meta:
                samples.setdefault((weight.dtype, weight.device), []).append(_sample(weight))
        numbers = [torch.cat(alike).view(torch.uint8).cpu().numpy().tobytes() for alike in samples.values()]
    configurations = [str(vars(config)) for _, config in _configurations(model)]
    return hash((*written, *numbers, *configurations, *_attributes(model)))


def check_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return everything to hash, by name; shared tensors appear under each name.

    Raises LayoutError if something cannot be hashed.
    """
    weights = sorted([*_weights(model, shared=True), *_saved_beside(model)], key=lambda one: one[0])
    if missing := [name for name, weight in weights if weight.is_meta]:
        raise LayoutError(f"the weights are not in memory and cannot be told from others: {missing[0]}")
    if packed := [name for name, weight in weights if not _is_plain(weight)]:
        raise LayoutError(f"{packed[0]}: expected a plain tensor: packed weights cannot be hashed")
    return weights


def digest_of_weights(model: Any) -> str:
    """Return a digest of the weights, and of the other saved state and the numbers of modules."""
    weights = check_weights(model)
    once = list({id(weight): weight for _, weight in weights}.values())
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = dict(zip(map(id, once), threads.map(_digest_of_weight, once), strict=True))
    named = [(name, digests[id(weight)]) for name, weight in weights]
    return _digest([named, sorted(_attributes(model, shared=True), key=lambda one: one[:2])], 16)


def digest_of_config(model: Any) -> str:
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return _digest({name: value for name, value in fields.items() if name not in _NOT_OF_THE_KV}, 12)


def implementations(model: Any) -> str:
    """Return the implementations of attention and experts by module, with those of a shared configuration once."""
    found = [
        (name, *(str(getattr(config, which, None)) for which in _IMPLEMENTATIONS))
        for name, config in _configurations(model)
    ]
    return json.dumps(found)


def _weights(model: Any, shared: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, including unsaved buffers such as the frequencies of rotary embeddings."""
    yield from model.named_parameters(remove_duplicate=not shared)
    yield from model.named_buffers(remove_duplicate=not shared)


def _saved_beside(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield saved tensors that are neither parameters nor buffers, such as packed weights and their scales.

    Raises LayoutError for saved state that is not a tensor.
    """
    weights = {name for name, _ in _weights(model, shared=True)}
    for name, value in model.state_dict().items():
        if name not in weights:
            if not isinstance(value, torch.Tensor):
                raise LayoutError(
                    f"{name}: expected a tensor, found {type(value).__name__}: packed weights cannot be hashed"
                )
            yield name, value


def _configurations(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each configuration once, with the name of the first module that has it."""
    seen = set()
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield name, config


def _attributes(model: Any, shared: bool = False) -> Iterator[tuple[Any, ...]]:
    """Yield plain numbers and words that modules compute with, such as the epsilon of a norm.

    Leaves out private attributes, in which transformers records its work on a module.
    """
    for name, module in model.named_modules(remove_duplicate=not shared):
        for key, value in vars(module).items():
            if type(value) in _PLAIN and key[0] != "_" and key not in _NOT_OF_A_MODULE:
                yield name, key, value


def _is_plain(weight: torch.Tensor) -> bool:
    """Return True if the bytes in memory are the whole weight. A parameter with separate scales may have another class."""
    return not weight.is_quantized and weight.layout == torch.strided and type(weight.data) is torch.Tensor


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return every n-th number for an odd n, since an even n samples a single column if rows are a power of two long."""
    step = weight.numel() // _SAMPLE | 1
    if weight.is_contiguous():
        return weight.view(-1)[::step]
    return weight.take(torch.arange(0, weight.numel(), step, device=weight.device))


def _digest_of_weight(weight: torch.Tensor) -> str:
    memory = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(
        memory, digest_size=16, key=f"{weight.dtype} {tuple(weight.shape)}".encode()[:64]
    ).hexdigest()


def _digest(fields: Any, size_bytes: int) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=size_bytes).hexdigest()
