"""The remote tiers of a configuration: from remote_url, remote_storage_plugins and hf3fs_base_path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.config.schema import Config

SCHEMES = (
    "redis",
    "rediss",
    "redis-sentinel",
    "redis-cluster",
    "valkey",
    "mooncakestore",
    "infinistore",
    "lm",
    "fs",
    "s3",
    "hf3fs",
    "azure",
    "eic",
    "resp",
    "sagemaker-hyperpod",
)
PLUGIN_TYPES = (*SCHEMES, "sagemaker_hyperpod", "bigtable", "aerospike")
PLUGIN_PREFIX = "remote_storage_plugin."


@dataclass(frozen=True, slots=True)
class Remote:
    """One remote tier. `place` may hold credentials."""

    name: str
    kind: str
    """hf3fs or remote."""
    place: str
    key: str
    """The key that names the place."""


def remotes_of(config: Config) -> list[Remote]:
    """Remote tiers in the order in which they are written: plugins first, then the URL."""
    remotes = []
    for plugin in config.remote_storage_plugins:
        place, key = _plugin_place(plugin, config.remote_storage_plugin_settings, config.hf3fs_base_path)
        remotes.append(Remote(plugin, _kind(plugin_type(plugin)), place, key))
    if config.hf3fs_base_path and not any(remote.kind == "hf3fs" for remote in remotes):
        remotes.append(Remote("hf3fs", "hf3fs", ", ".join(config.hf3fs_base_path), "hf3fs_base_path"))
    if config.remote_url:
        scheme, _, rest = config.remote_url.partition("://")
        place = ", ".join(split_paths(rest)) if scheme == "hf3fs" else config.remote_url
        remotes.append(Remote(scheme, _kind(scheme), place, "remote_url"))
    return remotes


def plugin_type(plugin: str) -> str:
    """`fs` of `fs.a`."""
    return plugin.partition(".")[0]


def split_paths(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _plugin_place(plugin: str, settings: Mapping[str, str], hf3fs_base_path: tuple[str, ...]) -> tuple[str, str]:
    name = f"{plugin}.base_path"
    if name in settings:
        return ", ".join(split_paths(settings[name])), PLUGIN_PREFIX + name
    if plugin_type(plugin) == "hf3fs":
        return ", ".join(hf3fs_base_path), "hf3fs_base_path"
    return "", "remote_storage_plugins"


def _kind(scheme: str) -> str:
    return "hf3fs" if scheme == "hf3fs" else "remote"
