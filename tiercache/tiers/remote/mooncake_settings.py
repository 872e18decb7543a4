"""The settings of a Mooncake Store client, from the URL, the options and Mooncake's JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercache.config.remote_options import options_of
from tiercache.config.secrets import hidden_url, shown_scheme
from tiercache.tiers.remote.base import RemoteSettings

_SCHEMES = ("mooncakestore", "mooncake")
_UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "b": 1}
_SIZES = ("global_segment_size", "local_buffer_size")
_FROM_FILE = ("local_hostname", "metadata_server", "master_server_address", "protocol", "device_name", *_SIZES)


@dataclass(frozen=True)
class MooncakeAddress:
    """The arguments of `MooncakeDistributedStore.setup`."""

    master: str = field(repr=False)
    """host:port, or another form that Mooncake accepts (`etcd://...` for several masters). May hold credentials."""
    local_hostname: str
    metadata_server: str = field(repr=False)
    """The metadata server. May hold credentials."""
    protocol: str
    device_name: str
    global_segment_bytes: int
    local_buffer_bytes: int
    prefer_local: bool

    @property
    def shown_master(self) -> str:
        """The value of `master` without credentials."""
        return hidden_url(self.master)

    @property
    def master_endpoint(self) -> tuple[str, int] | None:
        """Host and port of the only master; None if there may be several."""
        host, _, port = self.master.rpartition(":")
        if "://" in self.master or "," in self.master or not host or not port.isdigit():
            return None
        return host.strip("[]"), int(port)


def read_address(settings: RemoteSettings) -> MooncakeAddress:
    """Read the settings. An option with a non-default value overrides the file; the file overrides defaults and the
    URL.

    Reads Mooncake's file, if there is one: call it in a thread. Raises ConfigError.
    """
    file = _file(settings)
    rows = options_of("mooncake")

    def value(name: str) -> Any:
        given = settings.options.get(name, rows[name].default)
        return file.get(name, given) if given == rows[name].default else given

    address = MooncakeAddress(
        master=str(value("master_server_address") or _from_url(settings)),
        local_hostname=str(value("local_hostname")),
        metadata_server=str(value("metadata_server")),
        protocol=str(value("protocol")).lower(),
        device_name=str(value("device_name") or settings.url.partition("?device=")[2]),
        global_segment_bytes=value("global_segment_size"),
        local_buffer_bytes=value("local_buffer_size"),
        prefer_local=bool(value("prefer_local_alloc")),
    )
    if not address.master:
        raise settings.error("url", "expected mooncakestore://host:port of mooncake_master, or master_server_address")
    if address.master_endpoint is None and "://" not in address.master and "," not in address.master:
        raise settings.error("master_server_address", f"expected host:port, found {address.shown_master!r}")
    return address


def _from_url(settings: RemoteSettings) -> str:
    if not settings.url:
        return ""
    scheme, separator, rest = settings.url.partition("://")
    if not separator or scheme not in _SCHEMES:
        found = f"the scheme {shown!r}" if (shown := shown_scheme(settings.url)) else "no scheme"
        raise settings.error("url", f"expected {_SCHEMES[0]}://host:port, found {found}")
    address, _, query = rest.partition("?")
    address = address.partition("/")[0]
    if query and not query.startswith("device="):
        raise settings.error("url", "no parameter but device is known; give it as an option")
    host, colon, port = address.rpartition(":")
    if "@" in rest:
        raise settings.error("url", "Mooncake's master takes no credentials")
    if not host or not colon or not port.isdigit():
        raise settings.error("url", "expected host:port of mooncake_master behind mooncakestore://")
    return address


def _file(settings: RemoteSettings) -> Mapping[str, Any]:
    """Return the values of `_FROM_FILE` in Mooncake's JSON file, with sizes in bytes."""
    given = settings.options.get("config_file")
    path = given or os.environ.get("MOONCAKE_CONFIG_PATH")
    if not path:
        return {}
    named = "" if given else " (named by MOONCAKE_CONFIG_PATH)"
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise settings.error("config_file", f"{path}{named} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise settings.error("config_file", f"{path}{named} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise settings.error("config_file", f"{path}{named}: expected an object, found {type(found).__name__}")
    values = {name: found[name] for name in _FROM_FILE if found.get(name) not in (None, "")}
    for name in _SIZES:
        if name in values:
            values[name] = _size(settings, f"{path}{named}: {name}", values[name])
    return values


def _size(settings: RemoteSettings, where: str, found: Any) -> int:
    """Parse a size, which Mooncake writes as a number or as `"16GB"`."""
    text = str(found).strip().lower()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        size = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise settings.error("config_file", f"{where}: expected a size as 16GB or in bytes, found {found!r}")
    return size
