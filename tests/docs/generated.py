"""The pages of docs/ that are made from the tables of keys: configuration.md, and the tables of migrating.md.

Run `python -m tests.docs.generated` after a change of the tables; it writes both.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.readme.blocks import REPOSITORY
from tiercache.config.changes import LIVE, LIVE_OPTIONS
from tiercache.config.explanation import as_text
from tiercache.config.foreign import FOREIGN, FOREIGN_PREFIXES
from tiercache.config.remote_options import ALIASES, COMMON, OPTIONS
from tiercache.config.remotes import ELSEWHERE, PLUGINS_ELSEWHERE
from tiercache.config.schema import KEYS, Key

_INTRODUCTION = """\
# Configuration

This page is generated from the table in `tiercache/config/schema.py`; change it there, then run
`python -m tests.docs.generated`.

tiercache reads LMCache's files and variables unchanged. There are four sources; a later one wins:

1. the YAML file: the one given, else the one that `TIERCACHE_CONFIG_FILE` names, else `LMCACHE_CONFIG_FILE`;
2. `LMCACHE_<KEY>` in the environment, and `LMCACHE_EXTRA_CONFIG`, a JSON object of keys;
3. `TIERCACHE_<KEY>` and `TIERCACHE_EXTRA_CONFIG`;
4. overrides: `Config.load(overrides=...)`, vLLM's `kv_connector_extra_config`, the keys beside
   `"type": "TierCacheTier"` in vLLM's `secondary_tiers` (`config_file` names the YAML file there), or SGLang's
   `--hicache-storage-backend-extra-config`. A key may begin with `tiercache.` or `lmcache.`.

Keys marked *extra* belong inside `extra_config:` for LMCache; tiercache takes every key there and at the top level.
`extra_config` of several sources is merged key by key. A GB is 1024**3 bytes, as it is in LMCache. Keys marked *ours*
are not LMCache's. Those marked *live* [change in a running cache](control.md#change-a-running-cache), too. An unknown
key, a wrong type or a value out of range stops the start, and all problems are reported together.

`tiercache config explain FILE` shows the tiers of a file, the values that are set, and their sources; `--all` adds defaults.
"""

_HEADINGS = {
    "": "The cache as a whole",
    "cpu": "CPU tier",
    "shared_memory": "Shared memory tier",
    "disk": "Disk tier",
    "gds": "GDS tier",
    "weka": "Weka tier",
    "hf3fs": "3FS tier",
    "remote": "Remote tiers",
}


def reference() -> str:
    """Return the page in Markdown."""
    return "\n".join(_reference_lines())


def _reference_lines() -> Iterator[str]:
    yield _INTRODUCTION
    for tier, heading in _HEADINGS.items():
        yield f"## {heading}\n"
        yield "| key | value | default | meaning |"
        yield "|---|---|---|---|"
        yield from (_row(key) for key in KEYS.values() if key.tier == tier)
        yield ""
    yield from _remotes()
    yield "## Accepted and not honoured\n"
    yield "These keys of LMCache have no effect: tiercache lacks their features. One warning names those that are set.\n"
    yield ", ".join(f"`{name}`" for name in sorted(FOREIGN))
    yield "\n`LMCACHE_USE_EXPERIMENTAL` is accepted and ignored.\n"


def _remotes() -> Iterator[str]:
    yield "### Settings of a remote tier\n"
    yield "Write `remote_storage_plugin.NAME.<setting>` for the tier NAME of `remote_storage_plugins`. LMCache's keys in"
    yield "`extra_config` apply to all tiers of a type; a setting of an instance wins. Add types of your own by"
    yield "`module_path` and `class_name`, or by an entry point of the group `tiercache.tiers`.\n"
    for type_name, options in (("", COMMON), *OPTIONS.items()):
        names = ", ".join(f"`{alias}`" for alias, kind in ALIASES.items() if kind == type_name)
        yield f"#### {names or 'Every type'}\n"
        yield "| setting | value | default | meaning | LMCache |"
        yield "|---|---|---|---|---|"
        yield from map(_option_row, options)
        yield ""


def _option_row(option: Key) -> str:
    flat = ", ".join(f"`{name}`" for name in option.aliases)
    meaning = option.meaning.replace("|", "\\|")
    live = any(option in OPTIONS[name] and option.name in found for name, found in LIVE_OPTIONS.items())
    name = f"`{option.name}`{' *live*' if live else ''}"
    return f"| {name} | {option.kind.expected} | {as_text(option.default)} | {meaning} | {flat} |"


def _row(key: Key) -> str:
    marks = [word for word, present in (("extra", key.extra), ("ours", key.ours), ("live", key.name in LIVE)) if present]
    name = f"`{key.name}`" + "".join(f" *{mark}*" for mark in marks)
    meaning = key.meaning
    if key.aliases:
        meaning += "; also " + ", ".join(f"`{alias}`" for alias in key.aliases)
    return f"| {name} | {key.kind.expected} | {as_text(key.default)} | {meaning} |"


BEGIN, END = "<!-- made by python -m tests.docs.generated: {} -->\n", "<!-- end -->\n"

DIFFERS = {
    "cache_policy": "only ends of prefixes are evicted, so a chunk never stays without those before it",
    "max_local_disk_size": "allocated bytes count, of all processes that share the directory, also after a restart",
    "use_odirect": "LMCache's default is false",
    "local_cpu_use_hugepages": "refused together with `shm_name` and `enable_p2p`, as LMCache does",
    "gds_path_sharding": "ranks that hold the same KV share a directory",
    "local_disk_path_sharding": "ranks that hold the same KV share a directory; `by_chunk` is ours",
    "gds_backend": "`hipfile` is refused",
    "remote_serde": "only `naive`: other serdes of LMCache lose bits. `compression` of a remote tier is bit-exact",
    "numa_mode": "`manual` has no effect and is named in a warning; the number of a node is ours",
    "save_unfull_chunk": "false in LMCache. With windows or `kv_head_parts` hits are whole chunks",
    "lookup_timeout_ms": "a late lookup returns what it has found by then; no tier delays the others",
    "weka_path": "LMCache 0.5.6 detects WekaFS under `gds_path`; both are accepted",
    "reserve_local_cpu_size": "applied once, when the configuration is read, with a warning",
}
"""Differences from LMCache that an operator should know, by key."""

ABSENT: dict[str, tuple[tuple[str, ...], str]] = {
    "peers and the controller": (
        ("enable_p2p", "p2p_", "mp_", "transfer_channel", "enable_controller", "lmcache_", "controller_",
         "disabled_controllers", "heartbeat_url", "full_sync_", "kv_msg_", "worker_socket_", "distributed_url"),
        "a tier that all engines reach (Redis, 3FS, Weka, `fs`), or `shared_memory_path` on one host; vLLM's KV events tell "
        "routers which blocks an engine has",
    ),
    "disaggregated prefill": (
        ("enable_pd", "enable_xpyd", "pd_", "nixl_peer_", "nixl_proxy_", "nixl_role", "nixl_receiver_port"),
        "`kv_role` and any tier that both sides reach (examples/disaggregated_prefill.py)",
    ),
    "NIXL": (
        ("enable_nixl_storage", "nixl_"),
        "`gds_path`, `local_disk`, `hf3fs` or `s3`, depending on NIXL's back end",
    ),
    "blending and layer-wise transfer": (
        ("enable_blending", "blend_", "enable_sparse", "use_layerwise", "enable_hidden_state_cache", "hidden_state",
         "max_hidden_"),
        "none: only an equal prefix is a hit",
    ),
    "stores that tiercache does not have": (
        ("azure_", "bigtable_", "eic_", "maru_", "sagemaker_hyperpod_", "dax.", "rust_raw_block.", "shared_memory_name",
         "max_lease_size_mb", "storage_root_dir", "phx_"),
        "another store, or a tier of your own (examples/sqlite_tier.py)",
    ),
    "plugins of LMCache": (
        ("storage_plugin", "external_backend", "runtime_plugin_locations", "plugin_locations", "ext_log_connector_", "ec",
         "audit_", "instrumented_", "lmcache.mp.", "mp."),
        "an entry point `tiercache.tiers`, or `module_path` and `class_name` of a remote tier",
    ),
    "lookups elsewhere": (
        ("external_lookup_client", "hit_miss_ratio", "lookup_server_worker_ids", "enable_scheduler_bypass_lookup",
         "lookup_backoff_time", "pre_caching_hash_algorithm"),
        "none needed: keys are BLAKE2b or vLLM's own hashes, the same in every process",
    ),
    "LMCache's own API and scripts": (
        ("internal_api_server_", "script_allowed_imports", "run_script_api_enabled", "remote_config_url", "app_id"),
        "`control_socket` and `tiercache serve-control`; code in requests is never run",
    ),
    "figures": (
        ("enable_chunk_statistics", "chunk_statistics_", "enable_kv_events", "enable_cache_usage_details_in_response"),
        "`/metrics`, `tiercache top`, and vLLM's `--kv-events-config`",
    ),
    "memory that grows": (
        ("enable_lazy_memory_allocator", "lazy_memory_", "first_rank_max_local_cpu_size", "local_cpu.pinned_align_bytes",
         "gpu_to_numa_mapping", "local_device", "max_offload_tokens", "retrieve_buffer_size"),
        "none: the arena is taken at the start and does not grow",
    ),
    "settings of clients": (
        ("valkey_", "resp_", "s3_", "fs_connector_", "mooncake_", "transfer_timeout", "use_exists_sync", "remote_backend_",
         "save_chunk_meta", "pipelined_backend"),
        "`concurrency` and `timeout_s` of the remote tier; files and values always have a header",
    ),
    "places and waits": (
        ("store_location", "retrieve_locations", "pin_timeout_sec", "pin_check_interval_sec", "max_alloc_attempts",
         "allocation_attempt_delay_secs"),
        "`role` of a remote tier is read, write or both; pins end by their `ttl_s`; `blocking_timeout_secs` limits waits "
        "for memory",
    ),
    "the rest": (
        ("py_enable_gc", "use_gpu_connector_v3", "discard_partial_chunks", "save_only_first_rank", "force_store_wait",
         "remote_enable_mla_worker_id_as0"),
        "none needed: KV that ranks have in common is stored once; `on_queue_full` rules full queues",
    ),
}  # fmt: skip
"""LMCache's features, the beginnings of their keys, and the replacement here."""


def feature_of(key: str) -> str | None:
    """Return the feature of an absent key: the feature with the longest matching beginning."""
    known = [(len(start), name) for name, (starts, _) in ABSENT.items() for start in starts if key.startswith(start)]
    return max(known)[1] if known else None


def tables() -> dict[str, str]:
    """Return the tables between the page's marks, by name."""
    return {"keys": "\n".join(_keys()), "absent": "\n".join(_absent()), "urls": "\n".join(_urls())}


def _keys() -> Iterator[str]:
    yield "| LMCache's key | default here | what it means here | what differs |"
    yield "|---|---|---|---|"
    for key in KEYS.values():
        if not key.ours:
            yield f"| {_names(key)} | {as_text(key.default)} | {key.meaning} | {DIFFERS.get(key.name, '')} |"
    for type_name, options in (("every remote tier", COMMON), *OPTIONS.items()):
        for option in options:
            if option.aliases:
                names = ", ".join(f"`{name}`" for name in option.aliases)
                default = as_text(option.default)
                yield f"| {names} | {default} | {option.meaning} | {type_name}: `{option.name}` of one instance |"
    yield ""


def _absent() -> Iterator[str]:
    yield "| LMCache's feature | its keys | here |"
    yield "|---|---|---|"
    starts = {prefix: f"`{prefix}`..." for prefix in FOREIGN_PREFIXES}
    shown = {key: f"`{key}`" for key in FOREIGN if not key.startswith(FOREIGN_PREFIXES)} | starts
    for feature, (_, instead) in ABSENT.items():
        keys = ", ".join(shown[key] for key in sorted(shown) if feature_of(key) == feature)
        yield f"| {feature} | {keys} | {instead} |"
    yield ""


def _urls() -> Iterator[str]:
    yield "| `remote_url` | tier | |"
    yield "|---|---|---|"
    for scheme, type_name in ALIASES.items():
        if scheme != "mooncake":
            yield f"| `{scheme}://` | `{type_name}` | as LMCache writes it |"
    for scheme in ELSEWHERE:
        yield f"| `{scheme}://` | none | accepted; a warning says that the tier is missing |"
    for plugin, instead in PLUGINS_ELSEWHERE.items():
        yield f"| plug-in `{plugin}` | none | accepted with a warning; {instead} |"
    yield ""


def _names(key: Key) -> str:
    return ", ".join(f"`{name}`" for name in (key.name, *key.aliases))


def with_tables(page: str) -> str:
    """Return the page with new tables. Raises ValueError if it lacks the marks of one."""
    for name, table in tables().items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"expected {BEGIN.format(name).strip()} and, behind it, {END.strip()}")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    (REPOSITORY / "docs" / "configuration.md").write_text(reference())
    migrating = REPOSITORY / "docs" / "migrating.md"
    migrating.write_text(with_tables(migrating.read_text()))
