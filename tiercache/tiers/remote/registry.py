"""The types of remote tiers and their factories: built in, named by module and class, or an entry point."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from tiercache.config.remotes import ENTRY_POINTS, third_party_types
from tiercache.errors import ConfigError, TierCacheError
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.base import RemoteSettings

Factory = Callable[[RemoteSettings], Tier]
"""A factory of tiers, for example a Tier class whose `__init__` takes RemoteSettings."""

BUILT_IN = {
    "redis": "tiercache.tiers.remote.redis:RedisTier",
    "mooncake": "tiercache.tiers.remote.mooncake:MooncakeTier",
    "infinistore": "tiercache.tiers.remote.infinistore:InfiniStoreTier",
    "s3": "tiercache.tiers.remote.s3:S3Tier",
    "fs": "tiercache.tiers.remote.fs:FsTier",
}


def make_remote(settings: RemoteSettings, *, module_path: str = "", class_name: str = "") -> Tier:
    """Return the tier, not open yet. Raises ConfigError if there is no such type or it cannot be imported.

    `module_path` and `class_name` name a third-party factory; they override all types.
    """
    if module_path:
        where, place = settings.key("class_name"), f"{module_path}:{class_name}"
    elif settings.type in BUILT_IN:
        where, place = f"the {settings.type} tier", BUILT_IN[settings.type]
    else:
        found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=settings.type)
        if not found:
            raise ConfigError(
                f"{settings.name}: there is no remote tier of type {settings.type!r}; known are "
                f"{', '.join(sorted([*BUILT_IN, *third_party_types()]))}"
            )
        entry = next(iter(found))
        where, place = f"the entry point {settings.type}", entry.value
    factory = _load(where, place)
    try:
        tier = factory(settings)
    except TierCacheError:
        raise
    except Exception as error:
        raise ConfigError(f"{settings.name}: {place} failed: {type(error).__name__}: {error}") from error
    if not isinstance(tier, Tier):
        raise ConfigError(
            f"{where}: expected a tiercache.tiers.base.Tier from {place}, found {type(tier).__name__}; LMCache's connectors "
            "are not tiers"
        )
    return tier


def _load(where: str, place: str) -> Factory:
    module_name, _, attribute = place.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        extra = next((name for name, built_in in BUILT_IN.items() if built_in == place), None)
        if extra:
            raise ConfigError(
                f"{where} needs a library that cannot be imported ({error}): pip install 'tiercache[{extra}]'"
            ) from error
        raise ConfigError(f"{where}: {place} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{where}: {place} is nothing that makes a tier")
    return found  # type: ignore[no-any-return]
