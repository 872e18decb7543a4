"""Load and check a configuration: resolve names, apply precedence, collect every problem."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiercache.config.checks import combination_problems
from tiercache.config.foreign import FOREIGN, FOREIGN_PREFIXES, IGNORED, PROCESS_PREFIXES, PROCESS_VARIABLES
from tiercache.config.kinds import Choice, Number, Switch, Whole, is_text
from tiercache.config.machine import available_memory_bytes
from tiercache.config.remote_options import ALL_FLAT, BY_NAME, FLAT
from tiercache.config.remotes import (
    NOT_AVAILABLE,
    PLUGIN_PREFIX,
    PLUGINS_ELSEWHERE,
    Remote,
    read_remotes,
)
from tiercache.config.schema import ALIASES, GB, KEYS, ConfigFields, Key
from tiercache.config.sources import (
    KUBERNETES,
    PREFIXES,
    Origin,
    Setting,
    config_file,
    environment_settings,
    file_settings,
    override_settings,
)
from tiercache.errors import ConfigError

logger = logging.getLogger("tiercache.config")


@dataclass(frozen=True, repr=False)
class Config(ConfigFields):
    """A checked configuration. Use `Config.load`; values passed to the constructor are checked as well.

    Raises ConfigError that names every problem it found.
    """

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> Config:
        """Read the YAML file, then the environment, then `overrides`; later sources win.

        Without `path`, reads the file that TIERCACHE_CONFIG_FILE or LMCACHE_CONFIG_FILE names, if any. In the
        environment (`os.environ` by default) TIERCACHE_* wins over LMCACHE_*. Keys of `overrides` may be prefixed with
        `tiercache.` or `lmcache.`. Logs each of `warnings` unless `quiet`. Raises ConfigError that names every problem.
        """
        variables = os.environ if environ is None else environ
        problems: list[str] = []
        layers = []
        file = config_file(path, variables)
        if file is not None:
            layers.append(_read(problems, partial(file_settings, file)))
        for prefix in PREFIXES:
            layers.append(_read(problems, partial(environment_settings, variables, prefix)))
        layers.append(_read(problems, partial(override_settings, overrides or {})))
        resolved = _Resolution(problems)
        for layer in layers:
            resolved.add_layer(layer)
        again = partial(cls.load, environ=environ, overrides=overrides, quiet=quiet)
        config = cls(**resolved.fields())
        if file is not None:
            config = replace(config, loaded=replace(config, load_again=partial(again, file.absolute())))
        for warning in () if quiet else config.warnings:
            logger.warning("%s", warning)
        return config

    def reloaded(self) -> Config:
        """Read the file again, and the environment and overrides of `load`. Raises ConfigError."""
        if self.loaded is None:
            raise ConfigError("reload: the configuration of this cache came from no file")
        config: Config = self.loaded.load_again().loaded
        return config

    def changed(self, changes: Mapping[str, Any]) -> Config:
        """Return this configuration with other values, by key as in the file. Raises ConfigError that names all problems."""
        values = {name: value for name, key in KEYS.items() if (value := getattr(self, name)) != key.default}
        values |= {PLUGIN_PREFIX + name: value for name, value in self.remote_storage_plugin_settings.items()}
        values |= self.remote_settings
        problems: list[str] = []
        given = _read(problems, partial(override_settings, changes))
        resolved = _Resolution(problems)
        resolved.add_layer(
            [Setting(name, value, self.origins.get(name, Origin("override", name))) for name, value in values.items()]
        )
        resolved.add_layer(given)
        return type(self)(**resolved.fields(), loaded=self.loaded)

    def __post_init__(self) -> None:
        """Check fields that were given directly, and convert each to its type."""
        problems, values = [], {}
        for name, key in KEYS.items():
            given = getattr(self, name)
            try:
                values[name] = key.parse(given)
            except ValueError as error:
                problems.append(f"{name}: {error}, found {key.found(given)}")
            else:
                object.__setattr__(self, name, values[name])
        if not problems:
            plugins, flat = self.remote_storage_plugin_settings, self.remote_settings
            problems = list(combination_problems(values, plugins, flat, {}))
        if problems:
            raise _error_of(problems)


def _read(problems: list[str], source: Callable[[], list[Setting]]) -> list[Setting]:
    try:
        return source()
    except ConfigError as error:
        problems.append(str(error))
        return []


class _Resolution:
    """Layers of settings; the last layer wins."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.plugins: dict[str, str] = {}
        self.flat: dict[str, str] = {}
        self.foreign: dict[str, Any] = {}

    def add_layer(self, settings: Iterable[Setting]) -> None:
        seen: dict[str, tuple[Any, Origin, str]] = {}
        for setting in settings:
            key = KEYS.get(ALIASES.get(setting.name, setting.name))
            if key is None:
                self._other(setting)
                continue
            if _is_unset(key, setting):
                continue
            try:
                value = key.parse(_meant(key, setting))
            except ValueError as error:
                found = key.found(setting.value)
                self.problems.append(f"{setting.name}: {error}, found {found} ({setting.origin})")
                continue
            if key.name in seen and seen[key.name][0] != value:
                first, first_origin, first_name = seen[key.name]
                self.problems.append(
                    f"{first_name} and {setting.name} are the same key with different values: {key.found(first)}"
                    f" ({first_origin}) and {key.found(value)} ({setting.origin}); keep {key.name}"
                )
                continue
            seen[key.name] = value, setting.origin, setting.name
            self.values[key.name] = value
            alias = setting.name if setting.name != key.name else ""
            self.origins[key.name] = replace(setting.origin, alias=alias)

    def fields(self) -> dict[str, Any]:
        """Return the checked fields of a `Config` that are not defaults. Raises ConfigError that names every problem."""
        self.problems += combination_problems(self.values, self.plugins, self.flat, self.foreign)
        if self.problems:
            raise _error_of(self.problems)
        warnings = self._warnings()
        return self.values | {
            "remote_storage_plugin_settings": self.plugins,
            "remote_settings": self.flat,
            "origins": self.origins,
            "warnings": tuple(warnings),
        }

    def _other(self, setting: Setting) -> None:
        name, value, origin = setting.name, setting.value, setting.origin
        if name in IGNORED or (value is None and name.startswith(PLUGIN_PREFIX)):
            return
        of_instance = name.startswith(PLUGIN_PREFIX) and "." in name.removeprefix(PLUGIN_PREFIX)
        if of_instance or name in ALL_FLAT:
            option = BY_NAME.get(name.rpartition(".")[2])
            if option is not None and _is_unset(option, setting):
                return
            if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
                value = ", ".join(value)
            if isinstance(value, (str, int, float)):
                settings = self.plugins if of_instance else self.flat
                spelling = setting.spelling if option is None or is_text(option.kind) else None
                bare = name.removeprefix(PLUGIN_PREFIX)
                settings.pop(bare, None)  # of several names for one option the one given last wins
                settings[bare] = spelling or str(value)
                self.origins[name] = origin
            elif value is not None:  # `password:` without a value means not given
                self.problems.append(f"{name}: expected text, found {type(value).__name__} ({origin})")
            return
        if name in FOREIGN or name.startswith(FOREIGN_PREFIXES):
            self.foreign[name] = value
            return
        if origin.source == "environment" and _is_process_variable(origin.name):
            return
        self.problems.append(f"{name}: there is no such key{_nearest(name)} ({origin})")

    def _warnings(self) -> list[str]:
        warnings = self._without_effect()
        if self.values.get("local_disk") and not self.values.get("max_local_disk_size"):
            warnings.append("the disk tier is off: local_disk is set, but max_local_disk_size is 0 (GB)")
        if str(self.values.get("remote_url") or "").startswith("hf3fs://"):
            warnings.append(
                "remote_url: hf3fs:// is the old form; use remote_storage_plugins: [hf3fs] with hf3fs_base_path"
            )
        if self.values.get("numa_mode") == "manual":
            self.values["numa_mode"] = None
            warnings.append("numa_mode: manual is not honoured, memory is not placed: use auto or the number of a node")
        return warnings + self._leave_memory_free()

    def _without_effect(self) -> list[str]:
        """Return a warning that names every accepted key without effect, with the reasons."""
        remotes, _ = read_remotes(self.values, self.plugins, self.flat)
        absent: dict[str, list[str]] = {}
        for remote in remotes:
            if not remote.available:
                instead = PLUGINS_ELSEWHERE.get(remote.type)
                options = [PLUGIN_PREFIX + name for name in self.plugins if name.rpartition(".")[0] == remote.name]
                reason = f"remote tiers {NOT_AVAILABLE}" + (f": {instead}" if instead else "")
                absent.setdefault(reason, []).extend((remote.name, *options))
        configured = {remote.name for remote in remotes}
        unused = [PLUGIN_PREFIX + name for name in self.plugins if name.rpartition(".")[0] not in configured]
        unused += self.flat.keys() - {name for remote in remotes for name in FLAT.get(remote.type, ())}
        reasons = {
            "LMCache features that tiercache does not have": self.foreign,
            **absent,
            "of remote tiers that are not configured": unused,
            "of tiers that are off or not configured": self._of_no_tier(remotes),
        }
        parts = [f"{', '.join(sorted(names))} ({reason})" for reason, names in reasons.items() if names]
        return [f"accepted but not honoured: {'; '.join(parts)}"] if parts else []

    def _of_no_tier(self, remotes: list[Remote]) -> list[str]:
        """Return the caps, quotas, compression and admission settings whose tier is not configured."""
        values = self.values
        disk = values.get("local_disk") and values.get("max_local_disk_size")
        gds = values.get("gds_path") or values.get("weka_path")
        hf3fs = any(remote.type == "hf3fs" for remote in remotes)
        has_tier = {
            "max_local_disk_size": values.get("local_disk"),
            "max_gds_size": gds,
            "max_hf3fs_size": hf3fs,
            "tenant_max_local_cpu_size": values.get("local_cpu", True),
            "tenant_max_shared_memory_size": values.get("shared_memory_path"),
            "tenant_max_local_disk_size": disk,
            "disk_compression": disk,
            "flash_admission": disk or values.get("gds_path"),
            "flash_bytes_per_day": disk or values.get("gds_path"),
            "tenant_max_gds_size": gds,
            "tenant_max_hf3fs_size": hf3fs,
        }
        return [name for name, there in has_tier.items() if not there and values.get(name) not in (None, KEYS[name].default)]

    def _leave_memory_free(self) -> list[str]:
        """Lower the size of the arena to the available memory, so that the configuration states the real size."""
        reserve = self.values.get("reserve_local_cpu_size", 0.0)
        wanted = self.values.get("max_local_cpu_size", KEYS["max_local_cpu_size"].default)
        available = available_memory_bytes() if reserve else None
        if available is None:
            return []
        room = available / GB - reserve
        if room <= 0:
            raise ConfigError(
                f"reserve_local_cpu_size: expected less than the {available / GB:.1f} GB available, found {reserve:g}"
            )
        if room >= wanted:
            return []
        self.values["max_local_cpu_size"] = room
        lowered = f"max_local_cpu_size lowered from {wanted:g} to {room:.2f} GB"
        return [f"{lowered}: {available / GB:.1f} GB are available, reserve_local_cpu_size is {reserve:g}"]


def _error_of(problems: list[str]) -> ConfigError:
    """Return an error with one line per problem."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(
        f"{len(problems)} problems in the configuration:\n" + "\n".join(f"- {line}" for line in problems)
    )


def _meant(key: Key, setting: Setting) -> Any:
    """Return the value, or the spelling of a number that stands for a text."""
    spelling = setting.spelling if is_text(key.kind) and not isinstance(setting.value, bool) else None
    return spelling or setting.value


def _is_unset(key: Key, setting: Setting) -> bool:
    """Return True for an empty variable of a number, switch or choice. It resets other keys, such as paths."""
    never_empty = isinstance(key.kind, (Choice, Number, Switch, Whole))
    return never_empty and setting.value == "" and setting.origin.source == "environment"


def _is_process_variable(variable: str) -> bool:
    bare = variable.partition("_")[2].lower()
    return bare in PROCESS_VARIABLES or bare.startswith(PROCESS_PREFIXES) or KUBERNETES.fullmatch(variable) is not None


def _nearest(name: str) -> str:
    candidates = [*KEYS, *ALIASES, *FOREIGN, *ALL_FLAT, "extra_config"]
    close = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.5)
    return f"; the nearest is {close[0]}" if close else ""
