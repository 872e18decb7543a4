"""Make the layout that identifies the KV's bytes from SGLang's storage configuration, server arguments and pools.

The names of chunks describe a pool's pages (`HostPool.describe`). The layout covers the rest: weights and adapters, by
content if they are files on this machine; the server arguments that may change the result (`arguments.py`); the
version; and the part of the KV that this rank holds.

SGLang names the pages of an adapter loaded at start by the adapter's name and path, but the contents there may differ
at the next start. An adapter that is loaded or reloaded later gets a random name, so its pages are private to this
engine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.core.layout import Layout
from tiercache.errors import ConfigError
from tiercache.integrations.model_files import (
    GRAIN_NS,
    NothingToRead,
    adapter_files,
    identity_of_adapter,
    identity_of_model,
    place_of,
    stamp_of,
)
from tiercache.integrations.sglang.arguments import arguments_in_effect, digest_of
from tiercache.integrations.sglang.pools import HostPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

logger = logging.getLogger("tiercache.sglang")

TESTED = ("0.5.23",)
"""Versions whose pools, cache controllers and back-end factory are tested in tests/sglang."""


def ranks_of(storage: HiCacheStorageConfig) -> list[tuple[int, int]]:
    """Return the (rank, ranks) that tell the processes of a server apart where the layout does not."""
    ranks = [(storage.dp_rank, storage.dp_rank + 1)]
    if storage.is_mla_model:  # otherwise the layout separates ranks
        ranks.append((storage.tp_rank, storage.tp_size))
    return ranks


def make_layout(
    config: HiCacheStorageConfig, pools: Sequence[HostPool], page_tokens: int, model_id: str | None
) -> Layout:
    """Return the layout: a chunk is a page of a pool, and slots fit the largest page.

    `model_id` stands for the weights. Raises ConfigError if the model cannot be identified.
    """
    from sglang.version import __version__

    if __version__ not in TESTED:
        logger.warning("SGLang %s was not tested with this back end; tested were %s", __version__, ", ".join(TESTED))
    server = arguments_in_effect()
    # Kind, rank and count of each way to divide the KV: part two of four of the heads is not part two of the layers.
    parts = [("pp", config.pp_rank, config.pp_size), ("attn_cp", config.attn_cp_rank, config.attn_cp_size)]
    if not config.is_mla_model:
        parts.append(("tp", config.tp_rank, config.tp_size))
    rank, shards = 0, 1
    for _, number, count in parts:
        rank, shards = rank * count + number, shards * count
    largest = max(pools, key=lambda pool: pool.page_bytes)
    return Layout(
        model=f"id {model_id}" if model_id else model_of(config.model_name, server),
        chunk_tokens=page_tokens,
        bytes_per_token=-(-largest.page_bytes // page_tokens),
        kv_dtype=largest.dtype,
        block_tokens=page_tokens,
        byte_format="sglang host pages",
        engine=f"sglang {__version__}",
        rank=rank,
        world_size=shards,
        extra=(("part", repr(parts)), *(_settings_of(server) if server is not None else ())),
    )


def model_of(name: str | None, server: Mapping[str, Any] | None) -> str:
    """Return the identity of the model's weights: by contents if possible, otherwise by name. Raises ConfigError."""
    if server is not None:
        return _weights(server["model_path"], server.get("revision"), str(server["load_format"]), server)
    if not name:
        raise ConfigError(
            "SGLang does not say which model it serves: set model_id, which has to change with the weights"
        )
    logger.warning("SGLang does not say where its weights are, so %r stands for them; see model_id", name)
    return f"name {name}"


def _settings_of(server: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the identity of the server's arguments other than the model."""
    draft = ""  # its KV may be in the same pages as the model's or in other pools
    if path := server.get("speculative_draft_model_path"):
        load_format = server.get("speculative_draft_load_format") or server["load_format"]
        draft = _weights(path, server.get("speculative_draft_model_revision"), str(load_format), server)
    try:
        arguments = digest_of(server)
    except OSError as error:
        raise ConfigError(f"what the server's arguments name cannot be read: {error}") from error
    adapters = identity_of_adapters(server.get("lora_paths"), server.get("download_dir"), began_ns())
    return [("adapters", adapters), ("arguments", arguments), ("draft", draft)]


def _weights(model: str, revision: str | None, load_format: str, server: Mapping[str, Any]) -> str:
    if load_format == "dummy":
        return f"dummy, seed {server.get('random_seed')}, {model}"
    name = f"name {model} {revision or ''}"
    place = place_of(model, revision, server.get("download_dir"))
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


def identity_of_adapters(lora_paths: Sequence[Mapping[str, Any]] | None, cache: str | None, since_ns: int) -> str:
    """Return the names, paths and contents of the adapters in SGLang's argument `lora_paths`.

    The engine has loaded them after `since_ns`. If their contents then are unknown, the result is random, so that pages
    are shared neither with the next start nor with other ranks.
    """
    try:
        paths = [(str(one["lora_name"]), str(one["lora_path"])) for one in lora_paths or ()]
        known = sorted((name, path, _content(path, cache, since_ns)) for name, path in paths)
    except (OSError, KeyError, TypeError, ValueError) as error:
        logger.warning("nothing is shared with other processes, also not with the next start: %s", error)
        return f"unknown, of {os.urandom(16).hex()}"
    return repr(known) if known else ""


def _content(path: str, cache: str | None, since_ns: int) -> str:
    place = place_of(path, None, cache)
    if place is None:
        raise ValueError(f"the LoRA adapter {path} is not files here")
    for name, file in adapter_files(place).items():
        if max(stamp_of(file.stat())[1:3]) > since_ns - GRAIN_NS:
            raise ValueError(f"{name} of the LoRA adapter {path} was changed after the engine began")
    return identity_of_adapter(place)


def began_ns() -> int:
    """Return the start time of this process in ns, on the clock of file times."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(ago_s * 1e9)
