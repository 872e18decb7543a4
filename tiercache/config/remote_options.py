"""The table of settings of remote tiers, `remote_storage_plugin.NAME.<option>`, by type.

A row also lists the `extra_config` keys that give the same setting for all instances of a type in LMCache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercache.config.kinds import Choice, Kind, Number, Optional, Switch, Text, Whole, Words
from tiercache.core.compression import MODES


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of an instance."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    flat: tuple[str, ...] = ()
    """LMCache's keys for the setting of all instances."""
    secret: bool = False


_TEXT = Optional(Text())

COMMON = (
    Option("role", Choice(("both", "read", "write")), "both", "whether chunks are read from it, written to it, or both"),
    Option(
        "timeout_s",
        Number(above=True, unit="seconds"),
        5.0,
        "longest wait for the answer to one request; a get then goes on with the next tier",
        ("request_timeout",),
    ),
    Option("concurrency", Whole(1, 64), 4, "transfers at a time in each direction, and connections for them"),
    Option("module_path", _TEXT, None, "the Python module of a tier of your own"),
    Option("class_name", _TEXT, None, "its class, a tiercache.tiers.base.Tier made from RemoteSettings"),
)
"""Options of every type."""

_COMPRESSION = Option(
    "compression",
    Choice(MODES),
    "auto",
    "bit-exact compression of chunks on their way there: zstd leaves fewest bytes, lz4 is quicker; auto: what is read "
    "soonest and written as quickly, as the server and the codecs are measured, and none where numcodecs is missing",
)
_URL = Option("url", _TEXT, None, "where the server is; may hold credentials", secret=True)
_PREFIX = Option("prefix", Text(), "tiercache", "what the names of all values begin with")

OPTIONS: dict[str, tuple[Option, ...]] = {
    "redis": (
        Option(
            "url",
            _TEXT,
            None,
            "redis://, rediss:// (TLS), valkey://, valkeys://, unix://path; redis-sentinel://host,host/service, "
            "redis-cluster://host,host; user:password@ and /database as usual",
            ("redis_url",),
            secret=True,
        ),
        _PREFIX,
        Option("mode", Choice(("standalone", "cluster")), "standalone", "of servers named by redis:// and valkey://",
               ("valkey_mode",)),
        Option("username", _TEXT, None, "ACL user; it needs GET, GETRANGE, SET, EXISTS, UNLINK",
               ("username", "valkey_username")),
        Option("password", _TEXT, None, "its password", ("password", "valkey_password"), secret=True),
        Option("database", Optional(Whole(0)), None, "number of the database", ("valkey_database",)),
        _COMPRESSION,
        Option("ttl_s", Optional(Number(above=True, unit="seconds")), None,
               "chunks expire so long after they were written; unset: never", ("valkey_ttl_sec",)),
        Option("connect_timeout_s", Number(above=True, unit="seconds"), 5.0, "longest wait for a connection",
               ("connection_timeout",)),
        Option("tls", Optional(Switch()), None, "TLS without saying it in the URL", ("tls_enable",)),
        Option("tls_ca_file", _TEXT, None, "certificates to trust, PEM; unset: the system's"),
        Option("tls_cert_file", _TEXT, None, "certificate of this client, PEM"),
        Option("tls_key_file", _TEXT, None, "its key, PEM"),
        Option("tls_verify", Switch(), True, "check the server's certificate and name"),
        Option("sentinel_service", Text(), "mymaster", "name of the service that Sentinel watches"),
        Option("sentinel_password", _TEXT, None, "of the Sentinels themselves", secret=True),
    ),
    "mooncake": (
        _URL,
        _PREFIX,
        Option("local_hostname", Text(), "localhost", "name of this host for other Mooncake clients",
               ("local_hostname", "mooncake_local_hostname")),
        Option("metadata_server", Text(), "P2PHANDSHAKE", "Mooncake's metadata service",
               ("metadata_server", "mooncake_metadata_server"), secret=True),
        Option("master_server_address", _TEXT, None, "host:port of mooncake_master; unset: from the URL",
               ("master_server_address", "mooncake_master_server_address")),
        Option("protocol", Choice(("tcp", "rdma")), "tcp", "how bytes travel", ("protocol", "mooncake_protocol")),
        Option("device_name", Text(), "", "RDMA devices", ("device_name", "mooncake_device_name")),
        Option("global_segment_size", Whole(0, unit="bytes"), 0,
               "memory that this process gives to the store; 0: others hold the chunks",
               ("global_segment_size", "mooncake_global_segment_size")),
        Option("prefer_local_alloc", Switch(), False, "write to the memory of this process while it has room",
               ("mooncake_prefer_local_alloc",)),
        Option("local_buffer_size", Whole(0, unit="bytes"), 64 << 20, "memory of the client's own",
               ("local_buffer_size", "mooncake_local_buffer_size")),
        Option("config_file", _TEXT, None, "Mooncake's JSON file; unset: the one that MOONCAKE_CONFIG_PATH names"),
    ),
    "infinistore": (
        _URL,
        _PREFIX,
        Option("device_name", Text(), "mlx5_0", "RDMA device"),
        Option("link_type", Choice(("LINK_ETHERNET", "LINK_IB")), "LINK_ETHERNET", "its link", ("infinistore_link_type",)),
        Option("connection_type", Choice(("RDMA", "TCP")), "RDMA", "how bytes travel"),
    ),
    "s3": (
        Option("url", _TEXT, None, "s3://bucket/prefix, or s3://bucket.endpoint as LMCache writes it", secret=True),
        Option("endpoint", _TEXT, None, "URL of a store that is not Amazon's"),
        Option("region", _TEXT, None, "unset: as the environment says", ("s3_region",)),
        Option("access_key_id", _TEXT, None, "unset: as the environment, profile or instance says", ("aws_access_key_id",),
               secret=True),
        Option("secret_access_key", _TEXT, None, "belongs to access_key_id", ("aws_secret_access_key",), secret=True),
        Option("session_token", _TEXT, None, "of temporary credentials", secret=True),
        Option("skip_signature", Switch(), False, "anonymous access"),
        Option("allow_http", Switch(), False, "plain HTTP", ("disable_tls",)),
        Option("tls_ca_file", _TEXT, None, "certificates to trust besides the system's, PEM"),
        Option("virtual_hosted", Optional(Switch()), None, "bucket in the host name; unset: only at Amazon"),
        Option("express", Switch(), False, "the bucket is of S3 Express One Zone", ("s3_enable_s3express",)),
        Option("part_bytes", Whole(1 << 20, 1 << 30, "bytes"), 4 << 20,
               "chunks of twice that and more are read in parallel parts"),
        Option("prefix", Text(), "tiercache", "what the names of all objects begin with", ("s3_file_prefix",)),
        _COMPRESSION,
    ),
    "fs": (
        Option("base_path", Words(paths=True), (), "directories on the mount", ("fs_base_path",)),
        Option("url", _TEXT, None, "fs://host:port/path as LMCache writes it; only the path counts"),
        Option("max_size", Number(unit="GB"), 0.0, "cap of all directories; 0: nine tenths of what is free at the start"),
        Option("tenant_max_size", Number(unit="GB"), 0.0, "the most that a tenant may hold of it; 0: no quota"),
        Option("use_odirect", Optional(Switch()), None, "past the page cache; unset: where the mount can",
               ("fs_connector_use_odirect",)),
        Option("threads", Whole(1, 256, "threads"), 8, "threads that read and write"),
        Option("durability", Choice(("fdatasync", "none")), "fdatasync", "when a chunk counts as written"),
        _COMPRESSION,
    ),
    "hf3fs": (Option("base_path", Words(paths=True), (), "directories under the mount"),),
}  # fmt: skip
"""Further options by type. Other types come from third parties and accept any text."""

ALIASES = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "resp": "redis",
    "redis-sentinel": "redis",
    "redis-cluster": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "mooncake": "mooncake",
    "mooncakestore": "mooncake",
    "infinistore": "infinistore",
    "s3": "s3",
    "fs": "fs",
    "hf3fs": "hf3fs",
}
"""Map from types of plug-ins and schemes of URLs to types of tiers."""

FLAT: dict[str, frozenset[str]] = {
    type_name: frozenset(name for option in (*COMMON, *options) for name in option.flat)
    for type_name, options in OPTIONS.items()
}
"""LMCache's keys for all instances of a type."""


def options_of(type_name: str) -> dict[str, Option]:
    """Return the options of a type by name."""
    return {option.name: option for option in (*COMMON, *OPTIONS.get(type_name, ()))}
