"""Settings that only vLLM's connector reads, and the warning of the other integrations about them."""

from __future__ import annotations

import logging
from dataclasses import fields

from tiercache.config import Config

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


def warn_of_unread(config: Config, logger: logging.Logger, whose: str) -> None:
    """Log one warning that names the settings without effect here. `whose` names the owner of the decision."""
    defaults = {field.name: field.default for field in fields(config)}
    unread = [name for name in _OF_THE_CONNECTOR if getattr(config, name) != defaults[name]]
    if unread:
        logger.warning("accepted but not honoured: %s (up to %s)", ", ".join(unread), whose)
