"""Check keys that require or exclude one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tiercache.config.remotes import (
    ELSEWHERE,
    OWN_NAMES,
    PLUGIN_PREFIX,
    PLUGINS_ELSEWHERE,
    SCHEMES,
    plugin_type,
    plugin_types,
    read_remotes,
    split_paths,
)
from tiercache.config.secrets import hidden, hidden_url

_SOCKET_PATH_BYTES = 96
"""Linux allows 107 bytes; the rest is for the rank that is appended."""


def combination_problems(
    values: Mapping[str, Any], plugins: Mapping[str, str], flat: Mapping[str, str], foreign: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each problem of `values` (absent: default), remote tiers' settings and `foreign` LMCache keys."""
    yield from _memory(values, foreign)
    yield from _shared_memory(values)
    yield from _control(values)
    yield from _gds(values)
    yield from _remote_url(values)
    yield from _plugins(values, plugins)
    yield from read_remotes(values, plugins, flat)[1]
    yield from _hf3fs(values, plugins)


def _memory(values: Mapping[str, Any], foreign: Mapping[str, Any]) -> Iterator[str]:
    if values.get("local_cpu_use_hugepages"):
        if values.get("shm_name"):
            yield "local_cpu_use_hugepages and shm_name exclude each other: reserved pages are not shared memory"
        if str(foreign.get("enable_p2p", "")).lower() in ("true", "1"):
            yield "local_cpu_use_hugepages and enable_p2p exclude each other"
    if values.get("preload") == "recent" and values.get("local_cpu") is False:
        yield "preload: recent needs local_cpu: true, which keeps chunks hot"
    mode = values.get("numa_mode")
    if mode is not None and mode not in ("auto", "manual") and not mode.isdecimal():
        yield f"numa_mode: expected auto or the number of a NUMA node, found {hidden('numa_mode', mode)!r}"
    name = values.get("shm_name")
    if name is not None and (name == "/" or "/" in name.removeprefix("/")):
        yield f"shm_name: expected a name without / inside, found {hidden('shm_name', name)!r}"


def _shared_memory(values: Mapping[str, Any]) -> Iterator[str]:
    """Require an explicit size, since any default would take memory from other programs on the host."""
    if values.get("shared_memory_path") and not values.get("max_shared_memory_size"):
        yield "shared_memory_path needs max_shared_memory_size: GB of memory, for all engines together"
    if values.get("max_shared_memory_size") and not values.get("shared_memory_path"):
        yield "max_shared_memory_size needs shared_memory_path, such as /dev/shm/kv"


def _control(values: Mapping[str, Any]) -> Iterator[str]:
    path = values.get("control_socket")
    if path is not None and (not path.startswith("/") or len(path.encode()) > _SOCKET_PATH_BYTES or "\0" in path):
        expected = f"an absolute path of at most {_SOCKET_PATH_BYTES} bytes (a Unix socket's name is short)"
        yield f"control_socket: expected {expected}, found {hidden('control_socket', path)!r}"


def _gds(values: Mapping[str, Any]) -> Iterator[str]:
    for key in ("gds_path", "weka_path"):
        if values.get(key) and values.get("gds_buffer_size") is None:
            yield f"{key} needs gds_buffer_size (or cufile_buffer_size): MiB of device memory"
    if values.get("gds_backend") == "hipfile" and (values.get("gds_path") or values.get("weka_path")):
        yield "gds_backend: hipfile is not supported; cufile is, or use_gds: false"


def _remote_url(values: Mapping[str, Any]) -> Iterator[str]:
    url = values.get("remote_url")
    if url is None:
        return
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in (*SCHEMES, *ELSEWHERE):
        expected = ", ".join(f"{known}://" for known in SCHEMES)
        yield f"remote_url: expected one of {expected}, found {hidden('remote_url', url)!r}"
    elif not rest and scheme in SCHEMES:  # LMCache's blackhole:// has nothing after the scheme
        yield f"remote_url: expected a host or a path after the scheme, found {url!r}"


def _plugins(values: Mapping[str, Any], plugins: Mapping[str, str]) -> Iterator[str]:
    listed = values.get("remote_storage_plugins", ())
    for plugin in listed:
        kind = plugin_type(plugin)
        if "://" in plugin or "@" in plugin:
            yield (
                f"remote_storage_plugins: expected a type or type.instance such as redis.a, whose URL is "
                f"{PLUGIN_PREFIX}redis.a.url, found {hidden_url(plugin)!r}"
            )
            continue
        own_class = [name for name in ("module_path", "class_name") if plugins.get(f"{plugin}.{name}")]
        if len(own_class) == 1:
            yield f"{PLUGIN_PREFIX}{plugin}: module_path and class_name belong together, found only one"
        elif kind not in (*(known := plugin_types()), *ELSEWHERE, *PLUGINS_ELSEWHERE) and not own_class:
            problem = f"there is no type {kind!r} ({plugin}); known are {', '.join(known)}"
            yield f"remote_storage_plugins: {problem}"
        if kind == "hf3fs" and f"{plugin}.base_path" not in plugins and not values.get("hf3fs_base_path"):
            yield f"remote_storage_plugins: {plugin} needs {PLUGIN_PREFIX}{plugin}.base_path or hf3fs_base_path"
    if len(set(listed)) < len(listed):
        yield "remote_storage_plugins: every instance needs its own name"
    for plugin in sorted(OWN_NAMES.intersection(listed)):
        yield (
            f"remote_storage_plugins: {plugin!r} is the name of a tier of ours; give the instance another, such as "
            f"{plugin}.a"
        )
    scheme = (values.get("remote_url") or "").partition("://")[0]
    for name in plugins:
        plugin = name.rpartition(".")[0]
        if plugin not in listed and plugin != scheme:
            yield f"{PLUGIN_PREFIX}{name}: remote_storage_plugins does not list {plugin!r}"


VIRTUAL_DIRECTORY = "3fs-virt"


def _hf3fs(values: Mapping[str, Any], plugins: Mapping[str, str]) -> Iterator[str]:
    mount = values.get("hf3fs_mount_point")
    url = values.get("remote_url") or ""
    paths = [("hf3fs_base_path", path) for path in values.get("hf3fs_base_path", ())]
    if url.startswith("hf3fs://"):
        paths += [("remote_url", path) for path in split_paths(url.removeprefix("hf3fs://"))]
    for name, text in plugins.items():
        if plugin_type(name) == "hf3fs" and name.endswith(".base_path"):
            found = split_paths(text)
            if not found:
                yield f"{PLUGIN_PREFIX}{name}: expected at least one path, found {text!r}"
            paths += [(PLUGIN_PREFIX + name, path) for path in found]
    node = values.get("hf3fs_numa_id", -1)
    if node > (last := _last_numa_node()):
        yield f"hf3fs_numa_id: expected a NUMA node of this machine in -1 .. {last}, found {node}"
    for key, path in paths:
        place, shown = PurePosixPath(path), hidden_url(f"hf3fs://{path}").removeprefix("hf3fs://")
        if VIRTUAL_DIRECTORY in place.parts:
            yield f"{key}: expected a directory for files, found {shown!r}: 3FS registers memory there"
        elif ".." in place.parts or not path.startswith("/"):
            yield f"{key}: expected absolute paths without .., found {shown!r}"
        elif mount is not None and not place.is_relative_to(mount):
            yield f"{key}: {shown!r} does not lie under hf3fs_mount_point {mount!r}"


def _last_numa_node() -> int:
    nodes = [path.name.removeprefix("node") for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    return max((int(node) for node in nodes if node.isdigit()), default=0)
