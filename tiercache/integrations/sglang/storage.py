"""The back end that SGLang's cache controller calls, from threads of its own.

All its calls are synchronous; the cache lives on a loop thread (`CacheThread`). Calls that move pages return when no thread
touches SGLang's memory any more, whatever came of them: a page that is copied to after that could be another request's.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.control.server import socket_path
from tiercache.core.keys import KEY_BYTES, ChunkKey, Tenant
from tiercache.errors import CacheClosed, ConfigError, LayoutError
from tiercache.integrations.sglang.asking import forget_all, present
from tiercache.integrations.sglang.figures import TransferFigures
from tiercache.integrations.sglang.hits import PoolPages, restorable
from tiercache.integrations.sglang.identity import make_layout
from tiercache.integrations.sglang.naming import PageNaming
from tiercache.integrations.sglang.pools import HostPool, make_pool
from tiercache.integrations.unread import warn_of_unread
from tiercache.integrations.vllm.lending import Lending
from tiercache.payloads import source_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tiercache.sglang")

T = TypeVar("T")

_KV = str(PoolName.KV)
"""SGLang's names of pools are texts as well, and equal to them."""
_SGLANGS_OWN = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the extra configuration that are not ours. SGLang takes out others before it hands it over."""
_MARGIN_S = 2.0
"""What a wait for the cache's thread may take beyond the cache's own deadline."""
_COPY_S = 10.0
"""Copies under way are waited for, however long; after each time like this it is said."""
_CLEAR_S = 60.0


@dataclass(frozen=True)
class _Stored:
    """A pool, and how its pages are called."""

    pool: HostPool
    namespace: bytes
    tenant: Tenant
    writes: bool
    """False where another rank writes the same pages."""

    def keys(self, hashes: Sequence[str]) -> list[ChunkKey]:
        """SGLang's hashes are chained SHA-256 over tokens, LoRA and cache salt, in hex."""
        namespace, tenant = self.namespace, self.tenant
        return [
            hashlib.blake2b(value.encode(), digest_size=KEY_BYTES, key=namespace).digest() + tenant for value in hashes
        ]


class TierCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types that mypy sees
    """Loaded by `module_path` and `class_name` of the extra configuration, whose other keys are those of a tiercache.yaml;
    `TIERCACHE_CONFIG_FILE` and the environment count as well.

    The cache is opened once SGLang has shown its pools, and what cannot work fails there: ConfigError or LayoutError. Later
    nothing raises but `clear`: a page that cannot be had or stored is a miss, with a line in the log.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._by_pieces = bool(extra.get("interface_v1", 0))
        """Whether pages of the KV come and go by their indices; else as tensors, which are ordered in another way."""
        overrides = {key: value for key, value in extra.items() if key not in _SGLANGS_OWN}
        is_first = storage_config.tp_rank == 0
        self._config = _for_process(Config.load(overrides=overrides, quiet=not is_first), storage_config)
        if is_first:
            warn_of_unread(self._config, logger, "SGLang")
        self._storage = storage_config
        if storage_config.dcp_size > 1:
            raise ConfigError(
                "decode context parallelism is not supported by this back end: a page is spread over ranks"
            )
        self._hosts: dict[str, Any] = {}
        """The pools as SGLang registered them, by name."""
        self._stored: dict[str, _Stored] = {}
        self._thread: CacheThread | None = None
        self._largest_bytes = 0
        self.figures = TransferFigures(storage_config.enable_storage_metrics)

    # What SGLang registers

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._hosts[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool that comes when the cache is open already, a draft model's, must have pages that fit into its slots."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._hosts:
            return
        self._hosts[name] = host_pool
        if self._thread is not None:
            try:
                pool = make_pool(name, host_pool)
                if pool.page_bytes > self._largest_bytes:
                    raise LayoutError(f"a page has {pool.page_bytes} bytes, slots have {self._largest_bytes}")
            except LayoutError as error:
                logger.warning("pool %s came late and is not stored: %s", name, error)
            else:
                self._add(pool, self._thread)

    def on_host_pools_registered(self) -> None:
        """Open the cache. Reads the model's weights where no digest of them is kept yet."""
        pools = [
            make_pool(name, host, by_pieces=self._by_pieces or name != _KV)
            for name, host in self._hosts.items()
            if not self._is_logical(name)
        ]
        if not pools:
            raise LayoutError("SGLang registered no host pool that has pages")
        anchor = self.mem_pool_host
        page_tokens = int(getattr(anchor, "logical_page_size", None) or anchor.page_size)
        layout = make_layout(self._storage, pools, page_tokens, self._config.model_id)
        self._largest_bytes = layout.chunk_bytes
        self._thread = thread = CacheThread(self._config, layout, name="tiercache-sglang", naming=PageNaming())
        for pool in pools:
            self._add(pool, thread)
        # A server that just exits would leave its last pages unwritten.
        atexit.register(self.close)
        logger.info("pages of %s; %s", ", ".join(pool.name for pool in pools), thread.cache.describe())

    def _add(self, pool: HostPool, thread: CacheThread) -> None:
        """Pools that tensor-parallel ranks have their own parts of are told apart by rank, all others by the layout."""
        cache, storage = thread.cache, self._storage
        namespace, tenant = cache.layout.named_by(self._config.tenant_salt)
        apart = pool.by_heads and storage.is_mla_model
        meaning = pool.describe() + (f" tp {storage.tp_rank} of {storage.tp_size}" if apart else "")
        own = hashlib.blake2b(meaning.encode(), digest_size=KEY_BYTES, key=namespace).digest()
        writes = storage.is_storage_writer or apart
        self._stored[pool.name] = _Stored(pool, own, tenant, writes)

    def _is_logical(self, name: str) -> bool:
        """An anchor that has indices and no memory: other pools hold what it stands for."""
        return name == _KV and getattr(self._hosts[name], "kv_buffer", self) is None

    # Asking

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of `keys` there are from the first on without a gap, by `lookup_timeout_ms` at the latest."""
        if self._is_logical(_KV):
            return len(keys)
        return self._or_else(0, "a look-up", lambda: self._prefix(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of `keys` all pools have what it takes for. Pools of block groups, which never shorten a hit, are
        not looked at."""

        def ask() -> PoolTransferResult:
            kv_pages = self.batch_exists(keys, extra_info)
            pools = [
                self._pages_of(transfer, keys[:kv_pages])
                for transfer in pool_transfers or ()
                if transfer.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
            ]
            hit = restorable(kv_pages, pools)
            kv = {_KV: kv_pages} if kv_pages else {}
            return PoolTransferResult(hit.pages, kv | hit.by_pool, hit.prefixes)

        return self._or_else(PoolTransferResult.empty(), "a look-up", ask)

    def _prefix(self, hashes: Sequence[str]) -> int:
        keys = self._stored[_KV].keys(hashes)
        return self._wait(self._open.cache.lookup_keys(keys), self._config.lookup_timeout_ms / 1000).chunks

    def _pages_of(self, transfer: PoolTransfer, hashes: Sequence[str]) -> PoolPages:
        name = str(transfer.name)
        stored, window = self._stored.get(name), None
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
        if stored is None:
            return PoolPages(name, [False] * len(hashes), window)
        keys, timeout_s = stored.keys(hashes), self._config.lookup_timeout_ms / 1000
        if window is None:
            pages = self._wait(self._open.cache.lookup_keys(keys), timeout_s).chunks
            return PoolPages(name, [True] * pages + [False] * (len(keys) - pages))
        return PoolPages(name, self._wait(present(self._open.cache, keys, timeout_s), timeout_s), window)

    # Pages by their indices in a pool

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of the KV; which arrived. Pages behind the first that did not may have been written to."""
        return self._move(_KV, keys, host_indices, self._load)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the KV; which are in the cache now. They are copied, and may change, when this returns."""
        return self._move(_KV, keys, host_indices, self._store)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for pages of several pools."""
        return {one.name: self._move(one.name, one.keys or [], one.host_indices, self._load) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for pages of several pools."""
        return {one.name: self._move(one.name, one.keys or [], one.host_indices, self._store) for one in transfers}

    def _move(
        self,
        pool_name: Any,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        move: Callable[[_Stored, list[ChunkKey], torch.Tensor], int],
    ) -> list[bool]:
        name = str(pool_name)
        if name in self._hosts and self._is_logical(name):
            return [True] * len(hashes)

        def run() -> int:
            stored = self._stored[name]
            found = 0 if indices is None else len(indices)
            if found != len(hashes) * stored.pool.page_tokens:
                raise LayoutError(
                    f"pool {name}: expected {stored.pool.page_tokens} indices for each of {len(hashes)} pages, found {found}"
                )
            return move(stored, stored.keys(hashes), indices) if hashes else 0

        done = self._or_else(0, f"pages of pool {name}", run)
        return [True] * done + [False] * (len(hashes) - done)

    def _load(self, stored: _Stored, keys: list[ChunkKey], indices: torch.Tensor) -> int:
        lending, limit_s = Lending(), float(self._config.blocking_timeout_secs)
        sinks = stored.pool.sinks(indices, lending)
        began_s = time.monotonic()
        pages = self._lend(self._open.cache.get_to(keys, sinks, deadline_s=limit_s), lending, limit_s)
        self.figures.loaded(pages, pages * stored.pool.page_bytes, time.monotonic() - began_s)
        return pages

    def _store(self, stored: _Stored, keys: list[ChunkKey], indices: torch.Tensor) -> int:
        if not stored.writes:
            return len(keys)
        lending, limit_s = Lending(), float(self._config.blocking_timeout_secs)
        length = stored.pool.page_bytes
        items = [(key, length, one) for key, one in zip(keys, stored.pool.sources(indices, lending), strict=True)]
        began_s = time.monotonic()
        pages = self._lend(self._open.cache.put_from(items, deadline_s=limit_s, prefix=True), lending, limit_s)
        self.figures.stored(pages, pages * length, time.monotonic() - began_s)
        return pages

    def _lend(self, moving: Coroutine[Any, Any, int], lending: Lending, limit_s: float) -> int:
        """Run `moving` while it has SGLang's pages, and take them back."""
        try:
            return self._wait(moving, limit_s)
        finally:
            while not lending.take_back(_COPY_S):
                logger.error("a copy of SGLang's pages has not ended for %.0f s", _COPY_S)

    # Pages as tensors (without `interface_v1`)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill tensors of a page each; None from the first on that did not arrive."""
        self._require_tensors(target_locations, "target_locations")
        stored = self._stored[_KV]
        limit_s = float(self._config.blocking_timeout_secs)

        def load() -> int:
            return self._wait(
                self._open.cache.get_into(stored.keys(keys), target_locations, deadline_s=limit_s), limit_s
            )

        arrived = self._or_else(0, "pages", load)
        return [*target_locations[:arrived], *[None] * (len(keys) - arrived)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a tensor for each key; whether all are in the cache now."""
        self._require_tensors(values, "values")
        stored = self._stored[_KV]
        limit_s = float(self._config.blocking_timeout_secs)

        def store() -> int:
            # Some pools give pages as views of their own memory.
            lending = Lending()
            payloads = [source_of(value) for value in values]
            items = [
                (key, length, lending.reading(source))
                for key, (length, source) in zip(stored.keys(keys), payloads, strict=True)
            ]
            return self._lend(self._open.cache.put_from(items, deadline_s=limit_s, prefix=True), lending, limit_s)

        return not stored.writes or self._or_else(0, "pages", store) == len(keys)

    def _require_tensors(self, tensors: Any, name: str) -> None:
        if self._by_pieces:
            raise LayoutError(
                "interface_v1 is set: pages are stored by their indices (batch_get_v1, batch_set_v1) only"
            )
        if tensors is None or any(tensor is None for tensor in tensors):
            raise TypeError(f"{name}: expected a tensor for each key; addresses are not taken")

    # Upkeep

    def clear(self) -> bool:
        """Remove the pages of this model and rank from every tier, also those of earlier runs. Raises TierUnavailable where
        some are left: what was computed with other weights must not be taken for cleared."""
        pages = self._wait(forget_all(self._open.cache, _CLEAR_S), _CLEAR_S)
        logger.info("cleared; there were %d pages", pages)
        return True

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call; None without `--enable-metrics`."""
        return self.figures.take()

    def close(self) -> None:
        """Write what is queued, for up to `close_timeout_s`, and end the cache. Idempotent."""
        atexit.unregister(self.close)
        if self._thread is None:
            return
        report = self._thread.close(self._config.close_timeout_s)
        left = ", ".join(f"{tier}: {chunks}" for tier, chunks in report.pending.items() if chunks)
        logger.info("closed; %s", f"pages that were not written: {left}" if left else "every page was written")

    @property
    def _open(self) -> CacheThread:
        if self._thread is None:
            raise CacheClosed("the cache is not open: SGLang has not said that all its host pools are registered")
        return self._thread

    def _wait(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Raises TimeoutError when the cache's thread does not answer."""
        future = self._open.submit(coroutine)
        try:
            return future.result(limit_s + _MARGIN_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def _or_else(self, otherwise: T, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            logger.warning("%s failed, which is a miss: %r", what, error)
            return otherwise


def _for_process(config: Config, storage: HiCacheStorageConfig) -> Config:
    """With a socket and shared memory of its own for each process of a server. Pages come from and go to host memory: no
    device is used, unless a tier needs one."""
    ranks = [(storage.dp_rank, storage.dp_rank + 1)]
    if storage.is_mla_model:  # of others the layout tells ranks apart
        ranks.append((storage.tp_rank, storage.tp_size))
    if config.control_socket is not None:
        config = replace(config, control_socket=str(socket_path(config.control_socket, *ranks)))
    if config.shm_name is not None:
        config = replace(config, shm_name=str(socket_path(config.shm_name, *ranks)))
    if config.device == "auto" and not config.gds_path and not config.weka_path:
        config = replace(config, device="none")
    return config
