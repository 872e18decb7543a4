"""The layout that names the KV's bytes, from what SGLang says of itself: the storage's configuration, the server's arguments
and the pools.

What a pool's pages mean is in the names of its chunks (`HostPool.describe`). The rest is here: which weights and adapters,
by their content where they are files on this machine; what of the server's arguments may change what they compute
(`arguments.py`); the version; and which part of the KV this rank holds.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.errors import ConfigError
from tiercache.integrations.sglang.adapters import began_ns, identity_of_adapters
from tiercache.integrations.sglang.arguments import arguments_in_effect, digest_of
from tiercache.integrations.sglang.pools import HostPool
from tiercache.integrations.vllm.identity import NothingToRead, identity_of_model

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

logger = logging.getLogger("tiercache.sglang")

TESTED = ("0.5.23",)
"""Versions whose pools, cache controllers and back-end factory the tests drive (tests/sglang)."""


def make_layout(
    config: HiCacheStorageConfig, pools: Sequence[HostPool], page_tokens: int, model_id: str | None
) -> Layout:
    """A chunk is a page of a pool, and slots are made for the largest. Raises ConfigError where nothing says which model it
    is. `model_id` stands for the weights."""
    from sglang.version import __version__

    if __version__ not in TESTED:
        logger.warning("SGLang %s was not tested with this back end; tested were %s", __version__, ", ".join(TESTED))
    server = arguments_in_effect()
    rank, shards = shard_of(config)
    largest = max(pools, key=lambda pool: pool.page_bytes)
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
        extra=(("part", repr(_parts(config))), *_told(server, __version__)),
    )


def _told(server: Mapping[str, Any] | None, version: str) -> list[tuple[str, str]]:
    """What the server was told besides its model."""
    if server is None:
        return []
    cache = server.get("download_dir")
    adapters = identity_of_adapters(server.get("lora_paths"), lambda path: _place_of(path, None, cache), began_ns())
    try:
        arguments = digest_of(server)
    except OSError as error:
        raise ConfigError(f"what the server's arguments name cannot be read: {error}") from error
    return [("adapters", adapters), ("arguments", arguments), ("draft", _draft(server, version))]


def shard_of(config: HiCacheStorageConfig) -> tuple[int, int]:
    """Which part of the model's KV this process holds, and of how many. Ranks that hold the same (MLA) are one."""
    rank, shards = 0, 1
    for _, number, count in _parts(config):
        rank, shards = rank * count + number, shards * count
    return rank, shards


def _parts(config: HiCacheStorageConfig) -> list[tuple[str, int, int]]:
    """Kinds of ranks that the KV is divided among, number and count of each: two of four is another part of the heads than
    of the layers."""
    parts = [("pp", config.pp_rank, config.pp_size), ("attn_cp", config.attn_cp_rank, config.attn_cp_size)]
    return parts if config.is_mla_model else [*parts, ("tp", config.tp_rank, config.tp_size)]


def model_of(config: HiCacheStorageConfig, server: Mapping[str, Any] | None, version: str) -> str:
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
    return _weights(server["model_path"], server.get("revision"), str(server["load_format"]), server, version)


def _draft(server: Mapping[str, Any], version: str) -> str:
    """A speculative decoder's own model: its layers' KV may lie in the same pages, or in pools of its own."""
    if not (path := server.get("speculative_draft_model_path")):
        return ""
    load_format = server.get("speculative_draft_load_format") or server["load_format"]
    return _weights(path, server.get("speculative_draft_model_revision"), str(load_format), server, version)


def _weights(model: str, revision: str | None, load_format: str, server: Mapping[str, Any], version: str) -> str:
    if load_format == "dummy":
        return f"dummy, seed {server.get('random_seed')}, sglang {version}, {model}"
    name = f"name {model} {revision or ''}"
    place = _place_of(model, revision, server.get("download_dir"))
    if place is None:
        logger.warning("the weights of %s are not files here, so its name stands for them; see model_id", model)
        return name
    try:
        identity = identity_of_model(place, load_format, with_code=bool(server.get("trust_remote_code")))
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
