"""Compare two configurations: which keys differ, and which of them a running cache can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiercache.config.explanation import as_text, shown_setting
from tiercache.config.loading import Config
from tiercache.config.remote_options import ALIASES, OPTIONS
from tiercache.config.remotes import PLUGIN_PREFIX, remotes_of
from tiercache.config.schema import KEYS, ConfigFields
from tiercache.config.secrets import without_credentials

LIVE = frozenset(
    f"{tenant}{name}"
    for tenant in ("", "tenant_")
    for name in (
        "max_local_cpu_size",
        "max_shared_memory_size",
        "max_local_disk_size",
        "max_gds_size",
        "max_hf3fs_size",
    )
) | {"remote_url", "write_queue_bytes", "on_queue_full", "queue_wait_s"}
"""Keys that a running cache can change: of a limit the size, unless 0 switches it on or off, of a URL the credentials."""
LIVE_OPTIONS: Mapping[str, frozenset[str]] = {
    "redis": frozenset({"url", "username", "password", "sentinel_password"}),
    "s3": frozenset({"access_key_id", "secret_access_key", "session_token"}),
    "fs": frozenset({"max_size", "tenant_max_size"}),
}
"""The same for settings of remote tiers, by type."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key with two values, shown without secrets."""

    key: str
    before: Any
    after: Any
    live: bool
    """False if the change needs a restart."""

    def __str__(self) -> str:
        return f"{self.key}: {as_text(self.before)} -> {as_text(self.after)}"


def changes(old: ConfigFields, new: ConfigFields) -> list[Change]:
    """Return the keys and the settings of remote tiers whose values differ."""
    befores, afters, live = _values(old), _values(new), LIVE | _live_settings(old)
    return [
        Change(name, _shown(name, before), _shown(name, after), name in live and _may_follow(name, before, after))
        for name in [*KEYS, *sorted((befores.keys() | afters.keys()) - KEYS.keys())]
        if (before := befores.get(name)) != (after := afters.get(name))
    ]


def merged(running: Config, found: Config) -> Config:
    """Return the configuration `running`, with what its file says that has been `found` now.

    A running cache may have keys that an engine has completed, such as the path of its socket: of those that cannot change
    while it runs, only differences between both readings of the file count.
    """
    before = running.loaded
    values = {
        name: getattr(found, name) for name in KEYS if name in LIVE or getattr(found, name) != getattr(before, name)
    }
    remotes = ("remote_storage_plugin_settings", "remote_settings", "origins", "warnings")
    return replace(running, **values, **{name: getattr(found, name) for name in remotes}, loaded=found)


def _values(config: ConfigFields) -> dict[str, Any]:
    plugins = {PLUGIN_PREFIX + name: value for name, value in config.remote_storage_plugin_settings.items()}
    return {name: getattr(config, name) for name in KEYS} | plugins | dict(config.remote_settings)


def _shown(name: str, value: Any) -> Any:
    return KEYS[name].shown(value) if name in KEYS else shown_setting(name, value)


def _live_settings(config: ConfigFields) -> set[str]:
    """Return the names of settings of the remote tiers that a running cache can change."""
    found = set()
    for remote in remotes_of(config):
        live = LIVE_OPTIONS.get(remote.type, ())
        for option in OPTIONS.get(remote.type, ()):
            if option.name in live and not remote.options.get("module_path"):
                found |= {f"{PLUGIN_PREFIX}{remote.name}.{name}" for name in (option.name, *option.aliases)}
                found.update(option.aliases)
    return found


def _may_follow(name: str, before: Any, after: Any) -> bool:
    """Return True if a live key can get this value."""
    if name.endswith("url"):
        type_name = ALIASES.get(str(before).partition("://")[0])
        rotates = "url" in LIVE_OPTIONS.get(type_name or "", ()) and bool(after)
        return rotates and without_credentials(before) == without_credentials(after)
    if "max_" in name:
        return float(before or 0) > 0 and float(after or 0) > 0
    return True
