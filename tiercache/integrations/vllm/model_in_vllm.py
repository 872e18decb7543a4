"""Which model an engine has loaded, from vLLM's configuration: by its content where that can be read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.integrations.vllm.engine_identity import digest
from tiercache.integrations.vllm.model_identity import NothingToRead, identity_of_model

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger("tiercache.vllm")

_FROM_DISK = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "sharded_state",
)  # fmt: skip
"""Load formats whose weights come from the model's directory and nowhere else."""
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Where and by what a configuration was written. The type that is computed in is part of the layout by itself."""


def model_of(config: VllmConfig, model: ModelConfig, load: LoadConfig) -> str:
    """What stands for the model's weights in a layout: their content, or what is known of it."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        import vllm

        # Random numbers are vLLM's and torch's affair.
        return f"dummy, seed {model.seed}, vllm {vllm.__version__}"
    name = f"{model.model} {model.revision or ''} {getattr(model.hf_config, '_commit_hash', None) or ''}"
    place = place_of(model.model, model.revision, load.download_dir)
    if place is None or model.model_weights:
        logger.warning("the weights of %s are not files here, so its name stands for them; see model_id", model.model)
        return f"name {name}"
    try:
        content = f"content {identity_of_model(place, load_format, with_code=model.trust_remote_code)}"
    except NothingToRead:
        return f"name {name}"
    except OSError as error:
        logger.warning("the model cannot be identified, and nothing is shared, also not with the next start: %s", error)
        return f"unknown, of {config.kv_transfer_config.engine_id} {config.instance_id}"
    if load_format not in _FROM_DISK and place.is_dir():
        content += f" with {load_format} {digest(load.model_loader_extra_config)} {name}"
    logger.info("the model's identity is %s", content)
    return content


def place_of(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The file or directory, or the snapshot in the Hugging Face cache where `model` is a name. Asks no server."""
    from vllm import envs

    place = Path(model).expanduser()
    if place.exists():
        return place
    if envs.VLLM_USE_MODELSCOPE:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def effective_config(model: ModelConfig) -> str:
    """A digest of the model's configuration as it is in effect: what config.json says, what was overridden, and what vLLM
    changed. What is None may as well be absent, which it was before a version of transformers came to know of it."""
    return digest(json.dumps(_plain(model.hf_config.to_dict(), f"{model.model}--"), sort_keys=True))


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if item is not None and key not in _NOT_OF_THE_MODEL}
        return {key: _plain(item, name) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, str):
        # Where classes come from a repository's own code, their names begin with the repository's.
        return value.removeprefix(name)
    return value if isinstance(value, (bool, int, float)) else repr(value)
