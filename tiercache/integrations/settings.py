"""Settings of a cache in an engine: those that each process needs for itself, and those that only vLLM's connector reads."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

from tiercache.config import Config
from tiercache.control.server import socket_path

_OF_THE_CONNECTOR = (
    "chunk_size",
    "enable_async_loading",
    "kv_head_parts",
    "min_retrieve_tokens",
    "priority_limit",
    "save_decode_cache",
    "save_unfull_chunk",
)
"""Settings that an engine decides itself if it hands over whole blocks or pages."""


def for_process(config: Config, *ranks: tuple[int, int]) -> Config:
    """Return `config` with a control socket and shared memory of its own for the process with these (rank, ranks)."""
    names = {name: getattr(config, name) for name in ("control_socket", "shm_name")}
    own: dict[str, Any] = {name: str(socket_path(value, *ranks)) for name, value in names.items() if value is not None}
    return replace(config, **own)


def warn_of_unread(config: Config, logger: logging.Logger, whose: str) -> None:
    """Log one warning that names the settings without effect here. `whose` names the owner of the decision."""
    defaults = {field.name: field.default for field in fields(config)}
    unread = [name for name in _OF_THE_CONNECTOR if getattr(config, name) != defaults[name]]
    if unread:
        logger.warning("accepted but not honoured: %s (up to %s)", ", ".join(unread), whose)
