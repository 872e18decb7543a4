"""Collect settings from a YAML file, the environment, and overrides.

Each setting has its origin; its meaning is not checked here.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError

PREFIXES = ("LMCACHE_", "TIERCACHE_")
"""Prefixes of environment variables; the later one wins."""

_FILE_VARIABLES = ("TIERCACHE_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
CONTROL_TOKEN_VARIABLE = "TIERCACHE_CONTROL_TOKEN"
_NO_SETTINGS = (*_FILE_VARIABLES, CONTROL_TOKEN_VARIABLE)
"""TIERCACHE_* variables that other parts read: engines and `serve-control` often share an environment."""
_MOST_FILE_BYTES = 4 << 20
KUBERNETES = re.compile(r".*_SERVICE_(HOST|PORT(_.*)?)|.*_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""Variables that Kubernetes sets for a service called tiercache or lmcache."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value."""

    source: str
    """file, environment or override."""
    name: str
    """The path of the file, the name of the variable, or the key of the override."""
    line: int | None = None
    alias: str = ""
    """The alias that was used, if any."""

    def __str__(self) -> str:
        where = {"file": self.name, "environment": f"environment variable {self.name}"}.get(
            self.source, f"override {self.name}"
        )
        where += f", line {self.line}" if self.line else ""
        return where + (f", as {self.alias}" if self.alias else "")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value under the name that was used for it."""

    name: str
    value: Any
    origin: Origin
    spelling: str | None = None
    """The text of a number or truth value in a YAML file, since `0123` and `1.10` may be meant as texts."""


def config_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: `path`, else the file that the environment names."""
    if path is not None:
        return Path(path)
    return next((Path(environ[name]) for name in _FILE_VARIABLES if environ.get(name)), None)


def file_settings(path: Path) -> list[Setting]:
    """Return the settings of a YAML file. Raises ConfigError that names the file, and the line if known."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(raw) > _MOST_FILE_BYTES:
        raise ConfigError(f"{path}: expected at most {_MOST_FILE_BYTES} bytes; this is no configuration")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}") from None
    return list(_yaml_settings(path, text))


def _yaml_settings(path: Path, text: str) -> Iterator[Setting]:
    # Imported here because a configuration without a file needs no YAML.
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}, line {root.start_mark.line + 1}: expected a mapping of keys to values")
        loader.flatten_mapping(root)
        for key_node, value_node in root.value:
            if key_node.value == "extra_config" and isinstance(value_node, yaml.MappingNode):
                loader.flatten_mapping(value_node)
                for extra_key, extra_value in value_node.value:
                    yield _yaml_setting(path, loader, extra_key, extra_value)
            else:
                yield from _unfolded(_yaml_setting(path, loader, key_node, value_node))
    except yaml.MarkedYAMLError as error:
        # The whole message is not shown: it quotes the line or an alias, which may be a password.
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        reason = re.sub(r"'(?!<|\\t')[^']{2,}'", "'...'", error.problem or error.context or "")
        raise ConfigError(f"{path}{where}: not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: its values are nested too deep") from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "") or type(error).__name__
        raise ConfigError(f"{path}: not valid YAML: {reason}") from None


def _yaml_setting(path: Path, loader: Any, key_node: Any, value_node: Any) -> Setting:
    line = key_node.start_mark.line + 1
    # Use the text of the key, not its YAML value, which is not a string for `on` and `2020-01-01`.
    name = str(key_node.value)
    try:
        value = loader.construct_object(value_node, deep=True)
        spelling = value_node.value if isinstance(value, (int, float)) else None
        return Setting(name, value, Origin("file", str(path), line), spelling)
    except (ValueError, KeyError, AttributeError):
        # YAML has types of its own, and a value may look like a date without being valid, have thousands of digits, or be
        # none of the type that its tag names.
        raise ConfigError(f"{path}, line {line}: the value of {name} cannot be read") from None


def environment_settings(environ: Mapping[str, str], prefix: str) -> list[Setting]:
    """Return the variables with `prefix` as keys in lower case. Raises ConfigError for a bad EXTRA_CONFIG."""
    settings: list[Setting] = []
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in _NO_SETTINGS:
            name = variable.removeprefix(prefix).lower()
            value = _without_quotes(environ[variable])
            settings += _unfolded(Setting(name, value, Origin("environment", variable)))
    return settings


def override_settings(overrides: Mapping[str, Any]) -> list[Setting]:
    """Return the overrides as settings. Drops a prefix `tiercache.` or `lmcache.`, and keys whose value is None."""
    settings: list[Setting] = []
    for name, value in overrides.items():
        if value is not None:
            bare = re.sub(r"^(tiercache|lmcache)\.", "", str(name))
            settings += _unfolded(Setting(bare, value, Origin("override", str(name))))
    return settings


def _unfolded(setting: Setting) -> list[Setting]:
    """Return the keys of `extra_config` as single settings, and any other setting unchanged."""
    if setting.name != "extra_config":
        return [setting]
    value = setting.value
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "its values are nested too deep")
            raise ConfigError(f"extra_config: expected a JSON object, but: {reason} ({setting.origin})") from None
    if value is None or value == "":
        return []
    if not isinstance(value, Mapping):
        # The value itself is not shown: it may be a misplaced password.
        found = type(value).__name__
        raise ConfigError(f"extra_config: expected a mapping of keys to values, found {found} ({setting.origin})")
    return [Setting(str(name), item, setting.origin) for name, item in value.items()]


def _without_quotes(value: str) -> str:
    """Read a quoted value as LMCache does, with its escapes: env files of containers keep both."""
    value = value.strip()
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value[1:-1]
    return found if isinstance(found, str) else value
