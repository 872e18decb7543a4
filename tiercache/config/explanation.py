"""Explain a configuration: its values, the source of each, and the resulting tiers. Secrets are hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercache.config.loading import Config
from tiercache.config.plan import PlannedTier, plan_of
from tiercache.config.remote_options import BY_NAME
from tiercache.config.remotes import PLUGIN_PREFIX
from tiercache.config.schema import KEYS
from tiercache.config.secrets import hidden
from tiercache.config.sources import Origin


@dataclass(frozen=True, slots=True)
class ExplainedValue:
    """A key with its value and the source of the value."""

    key: str
    value: Any
    """The value, with secrets hidden."""
    origin: Origin | None
    """None means that the value is the default."""
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        origin = self.origin
        if origin is None:
            return {"value": value, "source": "default"}
        found: dict[str, Any] = {"value": value, "source": origin.source, "name": origin.name}
        if origin.line is not None:
            found["line"] = origin.line
        if origin.alias:
            found["alias"] = origin.alias
        return found


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effective configuration, for people (`tiercache config explain`) and for programs (`to_dict`)."""

    values: tuple[ExplainedValue, ...]
    tiers: tuple[PlannedTier, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "values": {value.key: value.to_dict() for value in self.values},
            "tiers": [tier.to_dict() for tier in self.tiers],
            "warnings": list(self.warnings),
        }


def explain(config: Config) -> Explanation:
    """Explain `config`. Reads neither disk nor network."""
    values = [
        ExplainedValue(name, key.shown(getattr(config, name)), config.origins.get(name), key.meaning)
        for name, key in KEYS.items()
    ]
    remotes = {PLUGIN_PREFIX + name: value for name, value in config.remote_storage_plugin_settings.items()}
    for name, value in sorted((remotes | dict(config.remote_settings)).items()):
        meaning = "a setting of that remote tier" if name in remotes else "a setting of all remote tiers of a type"
        values.append(ExplainedValue(name, shown_setting(name, value), config.origins.get(name), meaning))
    return Explanation(tuple(values), plan_of(config), config.warnings)


def shown_setting(name: str, value: Any) -> Any:
    """Return the value of a remote tier's setting with secrets hidden."""
    option = BY_NAME.get(name.rpartition(".")[2])
    return hidden(name, value) if option is None else option.shown(value)


def as_text(value: Any) -> str:
    """Return a shown value as text."""
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
