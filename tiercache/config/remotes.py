"""The remote tiers of a configuration: from remote_storage_plugins, remote_url and hf3fs_base_path."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tiercache.config.remote_options import ALIASES, FLAT, options_of
from tiercache.config.schema import ConfigFields, Key

NOT_AVAILABLE = "not available in this version"
PLUGIN_PREFIX = "remote_storage_plugin."
ENTRY_POINTS = "tiercache.tiers"
"""Entry point group of tier types in installed packages."""

OWN_NAMES = frozenset({"cpu", "device", "shared_memory", "disk", "gds", "weka"})
"""Names reserved for the other tiers, since statistics and flushes identify a tier by its name alone."""

ELSEWHERE = (
    "aerospike",
    "audit",
    "azure",
    "bigtable",
    "blackhole",
    "eic",
    "external",
    "hfbucket",
    "lm",
    "mock",
    "plugin",
    "sagemaker-hyperpod",
    "sagemaker_hyperpod",
)
"""Types that LMCache has and tiercache does not: they are accepted and reported as missing."""
PLUGINS_ELSEWHERE = {
    "gcs": "a bucket of Google Cloud Storage has an S3 interface: an s3 tier with endpoint https://storage.googleapis.com "
    "and an HMAC key",
}
"""Further such types, of plug-ins without a URL scheme, with the alternative to use."""
SCHEMES = tuple(scheme for scheme in ALIASES if scheme != "mooncake")


@dataclass(frozen=True, slots=True)
class Remote:
    """A remote tier. `place` and `options` may hold credentials."""

    name: str
    type: str
    """redis, mooncake, infinistore, s3, fs, hf3fs, or the type of a third party."""
    place: str = field(repr=False)
    """Directories or a URL."""
    key: str
    """The key that sets the place."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Typed values with defaults for types in `remote_options`; for other types, all but the common options are text."""
    available: bool = True

    @property
    def reads(self) -> bool:
        return bool(self.options.get("role") != "write")

    @property
    def writes(self) -> bool:
        return bool(self.options.get("role") != "read")


def remotes_of(config: ConfigFields) -> list[Remote]:
    """Return the remote tiers in the order of the configuration: plugins first, then the URL."""
    return read_remotes(
        {
            "remote_url": config.remote_url,
            "remote_storage_plugins": config.remote_storage_plugins,
            "hf3fs_base_path": config.hf3fs_base_path,
        },
        config.remote_storage_plugin_settings,
        config.remote_settings,
    )[0]


def read_remotes(
    values: Mapping[str, Any], settings: Mapping[str, str], flat: Mapping[str, str]
) -> tuple[list[Remote], list[str]]:
    """Read the three keys in `values`, with `settings` of instances (NAME.option) and LMCache's `flat` keys.

    Returns the tiers, and a sentence for each problem.
    """
    problems: list[str] = []
    remotes: list[Remote] = []
    url = values.get("remote_url") or ""
    scheme = url.partition("://")[0]
    paths = ", ".join(values.get("hf3fs_base_path") or ())
    lent = False
    for name in values.get("remote_storage_plugins") or ():
        options = _options(name, settings, flat, problems)
        type_name = _type(name)
        if type_name in ("hf3fs", "fs") and options.get("base_path"):
            place, key = ", ".join(options["base_path"]), f"{PLUGIN_PREFIX}{name}.base_path"
        elif type_name == "hf3fs":
            place, key = paths, "hf3fs_base_path"
        elif not options.get("url") and url and ALIASES.get(scheme) == type_name:
            # An instance without a URL uses remote_url, as in LMCache.
            place, key, lent = url, "remote_url", True
        else:
            place, key = options.get("url") or "", f"{PLUGIN_PREFIX}{name}.url"
        available = type_name in types_at_hand() or bool(options.get("module_path"))
        remotes.append(Remote(name, type_name, place, key, options, available))
    if paths and not any(remote.type == "hf3fs" for remote in remotes):
        remotes.append(Remote("hf3fs", "hf3fs", paths, "hf3fs_base_path"))
    if url and not lent:
        name = scheme if all(remote.name != scheme for remote in remotes) else "remote_url"
        type_name = ALIASES.get(scheme, scheme)
        # `remote_storage_plugin.<scheme>.*` applies to this tier, unless a plug-in has that name.
        options = _options(scheme, settings if name == scheme else {}, flat, problems)
        place = ", ".join(split_paths(url.partition("://")[2])) if type_name == "hf3fs" else url
        remotes.append(Remote(name, type_name, place, "remote_url", options, type_name in types_at_hand()))
    return remotes, problems


def plugin_type(plugin: str) -> str:
    """Return the type of a plug-in: `fs` for `fs.a`."""
    return plugin.partition(".")[0]


def split_paths(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def plugin_types() -> list[str]:
    """Return the accepted first parts of plug-in names."""
    return sorted({*ALIASES, *third_party_types()})


def types_at_hand() -> frozenset[str]:
    """Return the types of tiers that can be built here."""
    return frozenset(ALIASES.values()) | third_party_types()


@cache
def third_party_types() -> frozenset[str]:
    """Return the types of tiers in installed packages."""
    return frozenset(entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS))


def _type(name: str) -> str:
    first = plugin_type(name)
    return ALIASES.get(first, first)


def _options(name: str, settings: Mapping[str, str], flat: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """Return the defaults, updated by LMCache's settings for the type, then by the instance's own."""
    type_name = _type(name)
    known = options_of(type_name)
    own_class = bool(settings.get(f"{name}.module_path"))
    free = own_class or type_name not in FLAT
    values: dict[str, Any] = {option.name: option.default for option in known.values()}
    by_name = {alias: option for option in known.values() for alias in option.aliases} | known
    given = [(alias, alias, value) for alias, value in flat.items() if alias in FLAT.get(type_name, ())]
    own = {key.rpartition(".")[2]: value for key, value in settings.items() if key.rpartition(".")[0] == name}
    given += [(option, f"{PLUGIN_PREFIX}{name}.{option}", value) for option, value in own.items()]
    for option_name, key, raw in given:
        option = by_name.get(option_name)
        if option is not None:
            values.update(_parsed(option, key, raw, problems))
        elif free:
            values[option_name] = raw
        else:
            names = ", ".join(sorted(known))
            problems.append(f"{key}: there is no such setting of {type_name}; known are {names}")
    return values


def _parsed(option: Key, key: str, raw: str, problems: list[str]) -> dict[str, Any]:
    try:
        return {option.name: option.parse(raw)}
    except ValueError as error:
        problems.append(f"{key}: {error}, found {option.found(raw)}")
        return {}
