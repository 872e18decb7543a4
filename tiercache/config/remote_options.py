"""The table of settings of remote tiers, `remote_storage_plugin.NAME.<option>`, by type.

The aliases of a row are LMCache's `extra_config` keys for the same setting of all instances of a type.
"""

from __future__ import annotations

from itertools import chain

from tiercache.config.kinds import Choice, Number, Optional, Switch, Text, Whole, Words
from tiercache.config.schema import Key
from tiercache.core.compression import MODES

_TEXT = Optional(Text())

COMMON = (
    Key("role", Choice(("both", "read", "write")), "both", "use the tier for reads, writes, or both"),
    Key(
        "timeout_s",
        Number(above=True, unit="seconds"),
        5.0,
        "longest wait for the answer to one request; a get then goes on with the next tier",
        ("request_timeout",),
    ),
    Key("concurrency", Whole(1, 64), 4, "transfers at a time in each direction, and connections for them"),
    Key("module_path", _TEXT, None, "the Python module of a tier of your own"),
    Key("class_name", _TEXT, None, "its class, a tiercache.tiers.base.Tier made from RemoteSettings"),
)
"""Options of every type."""

_COMPRESSION = Key(
    "compression",
    Choice(MODES),
    "auto",
    "bit-exact compression of chunks: zstd is smallest, lz4 is faster; auto: zstd while it makes reads faster and writes no "
    "slower, as measured; none if numcodecs is missing",
)
_URL = Key("url", _TEXT, None, "address of the server; may contain credentials")
_PREFIX = Key("prefix", Text(), "tiercache", "beginning of the names of all values")

OPTIONS: dict[str, tuple[Key, ...]] = {
    "redis": (
        Key(
            "url",
            _TEXT,
            None,
            "redis://, rediss:// (TLS), valkey://, valkeys://, unix://path; redis-sentinel://host,host/service, "
            "redis-cluster://host,host; user:password@ and /database as usual",
            ("redis_url",),
        ),
        _PREFIX,
        Key("mode", Choice(("standalone", "cluster")), "standalone", "kind of the servers at redis:// and valkey://",
            ("valkey_mode",)),
        Key("username", _TEXT, None, "ACL user; it needs GET, GETRANGE, SET, EXISTS, UNLINK",
            ("username", "valkey_username", "resp_username")),
        Key("password", _TEXT, None, "its password", ("password", "valkey_password", "resp_password"), secret=True),
        Key("database", Optional(Whole(0)), None, "number of the database", ("valkey_database",)),
        _COMPRESSION,
        Key("ttl_s", Optional(Number(above=True, unit="seconds")), None,
            "time after which a written chunk expires; unset: never", ("valkey_ttl_sec",)),
        Key("connect_timeout_s", Number(above=True, unit="seconds"), 5.0, "longest wait for a connection",
            ("connection_timeout",)),
        Key("tls", Optional(Switch()), None, "true: use TLS also with a redis:// URL", ("tls_enable",)),
        Key("tls_ca_file", _TEXT, None, "certificates to trust, PEM; unset: the system's"),
        Key("tls_cert_file", _TEXT, None, "certificate of this client, PEM"),
        Key("tls_key_file", _TEXT, None, "its key, PEM"),
        Key("tls_verify", Switch(), True, "check the server's certificate and name"),
        Key("sentinel_service", _TEXT, None, "name of the service that Sentinel watches; unset: REDIS_SERVICE_NAME in the "
            "environment, as for LMCache, else mymaster (LMCache: redismaster)"),
        Key("sentinel_password", _TEXT, None, "password of the Sentinels", secret=True),
    ),
    "mooncake": (
        _URL,
        _PREFIX,
        Key("local_hostname", Text(), "localhost", "name of this host for other Mooncake clients",
            ("local_hostname", "mooncake_local_hostname")),
        Key("metadata_server", Text(), "P2PHANDSHAKE", "Mooncake's metadata service",
            ("metadata_server", "mooncake_metadata_server"), secret=True),
        Key("master_server_address", _TEXT, None, "host:port of mooncake_master; unset: from the URL",
            ("master_server_address", "mooncake_master_server_address")),
        Key("protocol", Choice(("tcp", "rdma")), "tcp", "transport", ("protocol", "mooncake_protocol")),
        Key("device_name", Text(), "", "RDMA devices", ("device_name", "mooncake_device_name")),
        Key("global_segment_size", Whole(0, unit="bytes"), 0,
            "memory that this process gives to the store; 0: only others hold chunks",
            ("global_segment_size", "mooncake_global_segment_size")),
        Key("prefer_local_alloc", Switch(), False, "write to the memory of this process while it has room",
            ("mooncake_prefer_local_alloc",)),
        Key("local_buffer_size", Whole(0, unit="bytes"), 64 << 20, "memory of the client itself",
            ("local_buffer_size", "mooncake_local_buffer_size")),
        Key("config_file", _TEXT, None, "Mooncake's JSON file; unset: the one that MOONCAKE_CONFIG_PATH names"),
    ),
    "infinistore": (
        _URL,
        _PREFIX,
        Key("device_name", Text(), "mlx5_0", "RDMA device"),
        Key("link_type", Choice(("LINK_ETHERNET", "LINK_IB")), "LINK_ETHERNET", "link type", ("infinistore_link_type",)),
        Key("connection_type", Choice(("RDMA", "TCP")), "RDMA", "transport"),
    ),
    "s3": (
        Key("url", _TEXT, None, "s3://bucket/prefix, or s3://bucket.endpoint as LMCache writes it"),
        Key("endpoint", _TEXT, None, "URL of a store that is not Amazon's"),
        Key("region", _TEXT, None, "region of the bucket; unset: from the environment", ("s3_region",)),
        Key("access_key_id", _TEXT, None, "access key; unset: from the environment, profile or instance",
            ("aws_access_key_id",), secret=True),
        Key("secret_access_key", _TEXT, None, "secret key of access_key_id", ("aws_secret_access_key",), secret=True),
        Key("session_token", _TEXT, None, "session token of temporary credentials", secret=True),
        Key("skip_signature", Switch(), False, "access the bucket without credentials"),
        Key("allow_http", Switch(), False, "allow plain HTTP", ("disable_tls",)),
        Key("tls_ca_file", _TEXT, None, "certificates to trust besides the system's, PEM"),
        Key("virtual_hosted", Optional(Switch()), None, "put the bucket into the host name; unset: only at Amazon"),
        Key("express", Switch(), False, "the bucket belongs to S3 Express One Zone", ("s3_enable_s3express",)),
        Key("part_bytes", Whole(1 << 20, 1 << 30, "bytes"), 4 << 20,
            "size of parts; chunks of at least two parts are read in parallel"),
        Key("prefix", Text(), "tiercache", "beginning of the names of all objects", ("s3_file_prefix",)),
        _COMPRESSION,
    ),
    "fs": (
        Key("base_path", Words(paths=True), (), "directories on the mount", ("fs_base_path",)),
        Key("url", _TEXT, None, "fs://host:port/path as LMCache writes it; only the path counts"),
        Key("max_size", Number(unit="GB"), 0.0, "cap of all directories; 0: nine tenths of the free space at the start"),
        Key("tenant_max_size", Number(unit="GB"), 0.0, "quota of this tier for each tenant; 0: no quota"),
        Key("use_odirect", Optional(Switch()), None, "bypass the page cache; unset: if the mount can",
            ("fs_connector_use_odirect",)),
        Key("threads", Whole(1, 256, "threads"), 8, "reading and writing threads"),
        Key("durability", Choice(("fdatasync", "none")), "fdatasync", "how a chunk is made durable"),
        _COMPRESSION,
    ),
    "hf3fs": (Key("base_path", Words(paths=True), (), "directories under the mount"),),
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
    type_name: frozenset(name for option in (*COMMON, *options) for name in option.aliases)
    for type_name, options in OPTIONS.items()
}
"""LMCache's keys for all instances of a type."""
ALL_FLAT = frozenset().union(*FLAT.values())
BY_NAME = {name: option for option in chain(COMMON, *OPTIONS.values()) for name in (option.name, *option.aliases)}
"""The options of all types. Those with one name in several types are of one kind."""


def options_of(type_name: str) -> dict[str, Key]:
    """Return the options of a type by name."""
    return {option.name: option for option in (*COMMON, *OPTIONS.get(type_name, ()))}
