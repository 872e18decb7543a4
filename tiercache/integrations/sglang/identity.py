"""The layout that names the KV's bytes, from what SGLang says of itself: the storage's configuration, the server's arguments
and the pools.

What a pool's pages mean is in the names of its chunks (`HostPool.describe`). The rest is here: which weights, by their
content where they are files on this machine; what of the server's arguments changes what they compute; the version; and
which part of the KV this rank holds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.errors import ConfigError
from tiercache.integrations.sglang.pools import HostPool
from tiercache.integrations.vllm.model_identity import NothingToRead, identity_of_model

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

logger = logging.getLogger("tiercache.sglang")

TESTED = ("0.5.23",)
"""Versions whose pools, cache controllers and back-end factory the tests drive (tests/sglang)."""

_CHANGES_KV = (
    "dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "load_format", "model_loader_extra_config",
    "model_impl", "json_model_override_args", "context_length", "is_embedding", "modelopt_quant", "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend", "mm_process_config",
    "linear_attn_backend", "mamba_ssm_dtype", "speculative_algorithm", "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization", "rl_quant_profile", "weight_version", "enable_page_major_kv_layout",
    "enable_dsa_cache_layer_split", "dllm_algorithm",
)  # fmt: skip
"""Of the server's arguments, besides where the weights are."""


def make_layout(
    config: HiCacheStorageConfig, pools: Sequence[HostPool], page_tokens: int, model_id: str | None
) -> Layout:
    """A chunk is a page of a pool, and slots are made for the largest. Raises ConfigError where nothing says which model it
    is. `model_id` stands for the weights."""
    from sglang.version import __version__

    if __version__ not in TESTED:
        logger.warning("SGLang %s was not tested with this back end; tested were %s", __version__, ", ".join(TESTED))
    server = _server_args()
    rank, shards = shard_of(config)
    largest = max(pools, key=lambda pool: pool.page_bytes)
    extra = [(name, str(getattr(server, name))) for name in _CHANGES_KV if hasattr(server, name)]
    return Layout(
        model=f"id {model_id}" if model_id else model_of(config, server, __version__),
        chunk_tokens=page_tokens,
        bytes_per_token=-(-largest.page_bytes // page_tokens),
        kv_dtype=largest.dtype,
        block_tokens=page_tokens,
        byte_format="sglang host pages",
        engine=f"sglang {__version__}",
        rank=rank,
        world_size=shards,
        extra=(*extra, ("draft", _draft(server))),
    )


def shard_of(config: HiCacheStorageConfig) -> tuple[int, int]:
    """Which part of the model's KV this process holds, and of how many. Ranks that hold the same (MLA) are one."""
    parts = [(config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)]
    if not config.is_mla_model:
        parts.append((config.tp_rank, config.tp_size))
    rank, shards = 0, 1
    for number, count in parts:
        rank, shards = rank * count + number, shards * count
    return rank, shards


def model_of(config: HiCacheStorageConfig, server: Any, version: str) -> str:
    """What stands for the model's weights in a layout: their content, or what is known of it."""
    if server is None:
        if not config.model_name:
            raise ConfigError(
                "SGLang does not say which model it serves: set model_id, which has to change with the weights"
            )
        logger.warning(
            "SGLang does not say where its weights are, so %r stands for them; see model_id", config.model_name
        )
        return f"name {config.model_name}"
    if str(server.load_format) == "dummy":
        return f"dummy, seed {server.random_seed}, sglang {version}, {server.model_path}"
    return _content(server.model_path, server.revision, server)


def _draft(server: Any) -> str:
    """A speculative decoder's own model: its layers' KV may lie in the same pages, or in pools of its own."""
    path = getattr(server, "speculative_draft_model_path", None)
    return _content(path, getattr(server, "speculative_draft_model_revision", None), server) if path else ""


def _content(model: str, revision: str | None, server: Any) -> str:
    name = f"name {model} {revision or ''}"
    place = _place_of(model, revision, server.download_dir)
    if place is None:
        logger.warning("the weights of %s are not files here, so its name stands for them; see model_id", model)
        return name
    try:
        identity = identity_of_model(place, str(server.load_format), with_code=bool(server.trust_remote_code))
        settings = place / "config.json"
        read = hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else ""
    except NothingToRead:
        return name
    except OSError as error:
        raise ConfigError(f"the weights of {model} cannot be identified: {error}; set model_id") from error
    logger.info("the identity of %s is %s", model, identity)
    return f"content {identity} {read}"


def _place_of(model: str, revision: str | None, cache: str | None) -> Path | None:
    """The file or directory, or the snapshot in the Hugging Face cache where `model` is a name. Asks no server."""
    place = Path(model).expanduser()
    if place.exists():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def _server_args() -> Any:
    """SGLang's, of this process; None where there are none (in a program that uses its parts)."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError):
        return None
