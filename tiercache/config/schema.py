"""The table of configuration keys.

A field of `ConfigFields` is a row: its type, default, range, aliases and tier. Validation, `explain` and
docs/configuration.md all use these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tiercache.config.kinds import Choice, Kind, Number, Optional, Switch, Text, Whole, Words
from tiercache.config.secrets import hidden
from tiercache.core.compression import MODES

if TYPE_CHECKING:
    from tiercache.config.sources import Origin

GB = 1024**3
""""GB" in a size means 1024**3 bytes, as in LMCache."""
_SERDES = Choice(("naive",), "others lose bits of the KV; compression of a remote tier loses none")


def in_bytes(size_gb: float) -> int:
    return int(size_gb * GB)


@dataclass(frozen=True, slots=True)
class Key:
    """A row of the table, or of the settings of a remote tier in `remote_options`."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    aliases: tuple[str, ...] = ()
    tier: str = ""
    """Kind of the tier that the key belongs to, or remote; empty for the cache as a whole."""
    secret: bool = False
    extra: bool = False
    """True if LMCache accepts the key only inside `extra_config`; tiercache also accepts it at the top level."""
    ours: bool = False
    """True if LMCache has no such key."""

    def parse(self, raw: Any) -> Any:
        return self.default if raw is None else self.kind.parse(raw)

    def shown(self, value: Any) -> Any:
        """Return `value` with secrets hidden."""
        return hidden(self.name, value, secret=self.secret)

    def found(self, value: Any) -> str:
        """Return `value` for an error message: quoted, shortened, with secrets hidden."""
        try:
            text = repr(self.shown(value))
        except ValueError:
            # Python does not print an integer of thousands of digits.
            text = type(value).__name__
        return text if len(text) <= 100 else f"{text[:97]}..."


def _key(kind: Kind, default: Any, meaning: str, **rest: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "meaning": meaning, **rest})


@dataclass(frozen=True, repr=False)
class ConfigFields:
    """The fields of a `Config`."""

    chunk_size: int = _key(Whole(1, 65536, "tokens"), 256, "tokens per chunk")
    save_unfull_chunk: bool | None = _key(
        Optional(Switch()),
        None,
        "store the partial chunk at the end of a prompt; unset: vLLM's connector does",
    )
    enable_async_loading: bool = _key(
        Switch(), False, "load hot chunks beside engine steps, as other chunks always are"
    )
    save_decode_cache: bool = _key(Switch(), False, "store the KV of generated tokens too")
    priority_limit: int | None = _key(
        Optional(Whole()), None, "requests of a lower priority (a larger number) are not stored"
    )
    min_retrieve_tokens: int = _key(Whole(0, unit="tokens"), 0, "hits shorter than this are not loaded")
    blocking_timeout_secs: int = _key(Whole(1, unit="seconds"), 10, "longest wait for a load or for room")
    lookup_timeout_ms: int = _key(Whole(1, unit="milliseconds"), 3000, "longest wait for a lookup")
    prefill_tokens_per_s: float = _key(
        Number(unit="tokens/s"),
        0.0,
        "initial speed of the engine, until it is measured: chunks that load more slowly are computed; 0: unknown",
        ours=True,
    )  # fmt: skip
    kv_head_parts: int = _key(
        Whole(0, 1024, "parts"),
        0,
        "store KV in this number of parts by heads: engines with any number of tensor-parallel ranks that divides it find "
        "the KV; 0: only engines with as many ranks do",
        ours=True,
    )  # fmt: skip
    close_timeout_s: float = _key(Number(unit="seconds"), 10.0, "longest wait for queued writes at the end", ours=True)
    tenant_salt: str = _key(
        Text("a secret text"), "", "part of every chunk key: tenants share nothing", secret=True, ours=True
    )

    model_id: str | None = _key(
        Text("a name for the model", may_be_empty=False),
        None,
        "in vLLM: identifies the model instead of the digest of its files, which are then not read. Unset: the digest, made "
        "once and kept beside the files or in ~/.cache/tiercache. Engines with one model_id share KV: change it with the "
        "weights",
        ours=True,
    )

    control_socket: str | None = _key(
        Optional(Text("a path for a Unix socket")),
        None,
        "socket for commands of this user's programs (prefetch, pin, forget, sessions); .ENGINE and .RANK are "
        "appended if there are several; unset: no socket",
        ours=True,
    )

    file_access: str = _key(
        Choice(("owner", "group")),
        "owner",
        "users that may read the files of tiers (disk, GDS, Weka, 3FS, fs). owner: files 0600, directories 0700; "
        "group: 0660 and 2770, so that users of one group share a directory. A configured directory that exists keeps its "
        "mode. Files and directories of this user below it get the mode when a cache opens it: directories at once, chunks "
        "in the background",
        ours=True,
    )

    device: str = _key(
        Choice(("auto", "none", "cpu")),
        "auto",
        "auto: the GPU in use, or the first one if a tier needs one; none: no GPU; cpu: treat host memory as a GPU's, "
        "for tests and debugging",
        ours=True,
    )

    local_cpu: bool = _key(Switch(), True, "keep chunks hot in RAM; false: the arena is for staging only", tier="cpu")
    max_local_cpu_size: float = _key(Number(above=True, unit="GB"), 5.0, "RAM for chunks, per worker", tier="cpu")
    tenant_max_local_cpu_size: float = _key(
        Number(unit="GB"),
        0.0,
        "quota of RAM for each tenant (a cache_salt; requests without one are a tenant too), per worker: a tenant at its "
        "quota evicts its own chunks only; 0: no quota. The other tenant_max_ keys are the same for their tiers",
        tier="cpu",
        ours=True,
    )
    reserve_local_cpu_size: float = _key(
        Number(unit="GB"), 0.0, "RAM of the machine to leave free: lowers max_local_cpu_size if necessary", tier="cpu"
    )
    local_cpu_use_hugepages: bool = _key(
        Switch(), False, "use reserved pages of 2 MiB; not together with shm_name or enable_p2p", tier="cpu"
    )
    shm_name: str | None = _key(
        Optional(Text("a name for POSIX shared memory")),
        None,
        "put the arena into shared memory of this name, /dev/shm/tiercache.NAME; .ENGINE and .RANK are appended if "
        "there are several",
        tier="cpu",
        extra=True,
    )
    numa_mode: str | None = _key(
        Optional(Text("auto, or the number of a NUMA node")), None, "NUMA node of the arena", tier="cpu"
    )
    cache_policy: str = _key(
        Choice(("LRU", "FIFO", "LFU", "MRU", "COST", "S3FIFO", "SLRU")),
        "LRU",
        "order in which ends of prefixes are evicted from RAM; SLRU, S3FIFO and COST mean LRU; the tiers below use LRU; see "
        "docs/policies.md",
        tier="cpu",
    )

    prefetch_share: float = _key(
        Number(high=1.0), 0.5, "largest part of the hot cache for prefetched and pinned chunks", tier="cpu", ours=True
    )
    prefetch_bytes_per_s: float = _key(
        Number(unit="bytes/s"), 0.0, "bandwidth of prefetching; 0: all that demand reads leave", tier="cpu", ours=True
    )
    preload: str = _key(
        Choice(("none", "recent")),
        "none",
        "recent: after a restart, promote what was hot at the last close, the hottest first, by prefetching and into free "
        "memory only. A tier on files keeps the list",
        tier="cpu",
        ours=True,
    )

    shared_memory_path: str | None = _key(
        Optional(Text("a path")),
        None,
        "directory on tmpfs, such as /dev/shm/kv, in which all engines of this host share chunks and read them without a "
        "copy. Needs max_shared_memory_size",
        tier="shared_memory",
        ours=True,
    )
    tenant_max_shared_memory_size: float = _key(
        Number(unit="GB"), 0.0, "quota of this tier for each tenant; 0: no quota", tier="shared_memory", ours=True
    )
    max_shared_memory_size: float = _key(
        Number(unit="GB"),
        0.0,
        "cap of this directory, for all engines together; it is RAM besides the max_local_cpu_size of each engine",
        tier="shared_memory",
        ours=True,
    )

    local_disk: tuple[str, ...] = _key(
        Words(paths=True), (), "directories of the disk tier, made when missing; file:// allowed", tier="disk"
    )
    max_local_disk_size: float = _key(Number(unit="GB"), 0.0, "cap of the disk tier; 0 switches it off", tier="disk")
    tenant_max_local_disk_size: float = _key(
        Number(unit="GB"), 0.0, "quota of the disk tier for each tenant; 0: no quota", tier="disk", ours=True
    )
    local_disk_path_sharding: str = _key(
        Choice(("by_gpu", "by_chunk")),
        "by_gpu",
        "by_gpu: one directory for each worker, or for workers with the same KV; by_chunk: every worker uses all",
        tier="disk",
    )
    use_odirect: bool | None = _key(
        Optional(Switch()),
        None,
        "bypass the page cache; unset: if the file system can",
        tier="disk",
        extra=True,
    )
    disk_io_threads: int = _key(
        Whole(1, 256, "threads"),
        4,
        "reading threads, a quarter for prefetches; writing threads: twice that, or one with 1",
        tier="disk",
        extra=True,
    )
    disk_durability: str = _key(
        Choice(("fdatasync", "none")), "fdatasync", "how a chunk is made durable", tier="disk", ours=True
    )
    disk_compression: str = _key(
        Choice(MODES),
        "none",
        "bit-exact compression of chunks on disk: zstd is smallest (0.68 of bfloat16), lz4 is faster; auto: zstd while it "
        "makes reads faster and writes no slower, as measured",
        tier="disk",
        ours=True,
    )
    flash_admission: str = _key(
        Choice(("all", "second_touch", "live_session")),
        "all",
        "chunks that disk and GDS tiers write: all, those that two requests needed, or those of sessions with several turns",
        tier="disk",
        ours=True,
    )
    flash_bytes_per_day: float = _key(
        Number(unit="bytes"), 0.0, "limit of writes a day for each disk or GDS tier and process; 0: no limit",
        tier="disk", ours=True,
    )  # fmt: skip
    write_queue_bytes: int = _key(
        Whole(0, unit="bytes"),
        0,
        "limit of what each tier has still to write; 0: half the arena",
        tier="disk",
        ours=True,
    )
    on_queue_full: str = _key(
        Choice(("wait", "skip", "replace")),
        "wait",
        "with a full write queue: wait for queue_wait_s, skip the new chunk, or replace the oldest",
        tier="disk",
        ours=True,
    )
    queue_wait_s: float = _key(
        Number(unit="seconds"),
        1.0,
        "time from the start of a put after which it no longer waits for full write queues",
        tier="disk",
        ours=True,
    )

    gds_path: tuple[str, ...] = _key(Words(paths=True), (), "directories of the GDS tier", tier="gds")
    gds_path_sharding: str = _key(
        Choice(("by_gpu",)), "by_gpu", "one directory for each worker, or for workers with the same KV", tier="gds"
    )
    gds_buffer_size: int | None = _key(
        Optional(Whole(1, unit="MiB")),
        None,
        "device memory registered for transfers; needed with gds_path and weka_path",
        aliases=("cufile_buffer_size",),
        tier="gds",
    )
    use_gds: bool = _key(
        Switch(),
        True,
        "false: use POSIX reads and writes through pinned host memory",
        aliases=("use_cufile",),
        tier="gds",
    )
    max_gds_size: float = _key(
        Number(unit="GB"),
        0.0,
        "cap of the GDS or Weka tier; 0: nine tenths of the free space at the start",
        tier="gds",
        ours=True,
    )
    tenant_max_gds_size: float = _key(
        Number(unit="GB"), 0.0, "quota of the GDS or Weka tier for each tenant; 0: no quota", tier="gds", ours=True
    )
    gds_backend: str = _key(Choice(("cufile", "hipfile")), "cufile", "the library that moves the bytes", tier="gds")
    use_direct_io: bool = _key(
        Switch(), False, "true: warn if O_DIRECT does not work; it is used where it does", tier="gds", extra=True
    )
    weka_path: tuple[str, ...] = _key(Words(paths=True), (), "directories of the Weka tier", tier="weka")

    hf3fs_base_path: tuple[str, ...] = _key(
        Words(paths=True), (), "directories of the 3FS tier, under hf3fs_mount_point", tier="hf3fs", extra=True
    )
    hf3fs_mount_point: str | None = _key(
        Optional(Text("a path")), None, "where 3FS is mounted", tier="hf3fs", extra=True
    )
    max_hf3fs_size: float = _key(
        Number(unit="GB"),
        0.0,
        "cap of a 3FS tier; 0: nine tenths of the free space at the start",
        tier="hf3fs",
        ours=True,
    )
    tenant_max_hf3fs_size: float = _key(
        Number(unit="GB"), 0.0, "quota of a 3FS tier for each tenant; 0: no quota", tier="hf3fs", ours=True
    )
    hf3fs_iov_size: int = _key(
        Whole(104857600, 2147483648, "bytes"),
        209715200,
        "shared memory for transfers; no effect with shm_name, with which chunks move from and to the arena",
        aliases=("hfs3fs_iov_size",),
        tier="hf3fs",
        extra=True,
    )
    hf3fs_ior_entries: int = _key(
        Whole(128, 1024), 256, "requests in one ring", aliases=("hfs3fs_ior_entries",), tier="hf3fs", extra=True
    )
    hf3fs_io_depth: int = _key(
        Whole(-128, 128),
        0,
        "requests sent together; 0: each at once; above 1 means 0",
        aliases=("hfs3fs_io_depth",),
        tier="hf3fs",
        extra=True,
    )
    hf3fs_numa_id: int = _key(
        Whole(-1),
        -1,
        "NUMA node of the transfer memory; -1: any",
        aliases=("hfs3fs_numa_id",),
        tier="hf3fs",
        extra=True,
    )
    hf3fs_io_thread_num: int = _key(Whole(2, 16, "threads"), 4, "threads that read and write", tier="hf3fs", extra=True)

    remote_url: str | None = _key(
        Optional(Text("a URL")),
        None,
        "URL of a remote tier, such as redis://host:6379 or hf3fs:///a,/b",
        tier="remote",
    )
    remote_serde: str = _key(_SERDES, "naive", "serialisation of chunks; naive: none", tier="remote")
    remote_storage_plugins: tuple[str, ...] = _key(
        Words(),
        (),
        "remote tiers as type[.instance], such as redis or hf3fs.a, in the order in which they are asked",
        tier="remote",
    )

    remote_storage_plugin_settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    """NAME.option of the remote plugins, as written; `tiercache.config.remote_options` lists the options."""
    remote_settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    """LMCache's settings for all remote tiers of a type, as written, such as redis_url and s3_region."""
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    """The sources of values that are not defaults, by key."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """A sentence for each setting that was accepted and has no effect."""
    load_again: Callable[..., Any] | None = field(default=None, compare=False)
    """Of `loaded`: reads the file and the other sources again."""
    loaded: Any = field(default=None, compare=False)
    """The configuration as a file was last read, before anything was changed in it; None if there is no file."""

    def __repr__(self) -> str:
        changed = {
            name: key.shown(value) for name, key in KEYS.items() if (value := getattr(self, name)) != key.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    @property
    def arena_bytes(self) -> int:
        return int(self.max_local_cpu_size * GB)

    @property
    def shared_memory_bytes(self) -> int:
        """Cap of the shared memory tier in bytes; 0 if there is none."""
        return int(self.max_shared_memory_size * GB) if self.shared_memory_path else 0

    @property
    def disk_bytes(self) -> int:
        """Cap of the disk tier in bytes; 0 if there is none."""
        return int(self.max_local_disk_size * GB) if self.local_disk else 0


KEYS: dict[str, Key] = {
    row.name: Key(row.name, default=row.default, **row.metadata) for row in fields(ConfigFields) if row.metadata
}

ALIASES: dict[str, str] = {alias: key.name for key in KEYS.values() for alias in key.aliases}
