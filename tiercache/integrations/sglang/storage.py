"""The storage back end that SGLang's cache controller calls from its own threads.

All calls are synchronous; the cache runs on a loop thread (`CacheThread`). Calls that move pages return only after the
last thread has stopped using SGLang's memory, even on failure, since SGLang may reuse a page for another request.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, ConfigError, LayoutError, TierUnavailable
from tiercache.integrations.lending import Lending
from tiercache.integrations.settings import for_process, warn_of_unread
from tiercache.integrations.sglang.identity import make_layout, ranks_of
from tiercache.integrations.sglang.lookup import PageNaming, PoolPages, forget_all, look_up
from tiercache.integrations.sglang.pools import HostPool, StoredPool, shares_pages

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tiercache.sglang")

T = TypeVar("T")

_KV = str(PoolName.KV)
"""SGLang's pool names are strings and compare equal to them."""
_SGLANGS_OWN = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the extra configuration that belong to SGLang, which removes others itself."""
_MARGIN_S = 2.0
"""Seconds for the cache's thread to answer, in addition to the cache's own deadline."""
_COPY_S = 10.0
"""Period in seconds of the log line while copies are in flight. The wait for them has no limit."""
_CLEAR_S = 60.0
_GENERATION_BYTES = 16
_KEPT_SPEEDS = 1024
"""Largest number of moves kept for the next `get_stats`; the oldest are dropped."""


class TierCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types that mypy sees
    """Loaded by `module_path` and `class_name` of the extra configuration.

    The other keys there are those of a tiercache.yaml; `TIERCACHE_CONFIG_FILE` and the environment apply as well. The
    cache opens when SGLang has registered its pools. ConfigError or LayoutError may be raised until then; later only
    `clear` raises: a page that cannot be loaded or stored is a miss, with a line in the log.
    """

    _generation: ClassVar[bytes] = b""
    """Part of the page names of this process from its first `clear` on, until it ends."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError("interface_v1: expected 1 in --hicache-storage-backend-extra-config; add it")
        overrides = {key: value for key, value in extra.items() if key not in _SGLANGS_OWN}
        is_first = storage_config.tp_rank == 0
        config = Config.load(overrides=overrides, quiet=not is_first)
        self._config = for_process(config, *ranks_of(storage_config))
        if config.device == "auto" and not config.gds_path and not config.weka_path:
            # Pages move through host memory, so no device is used unless a tier needs it.
            self._config = replace(self._config, device="none")
        if is_first:
            warn_of_unread(self._config, logger, "SGLang")
        self._storage = storage_config
        if storage_config.dcp_size > 1:
            raise ConfigError(
                "decode context parallelism is not supported by this back end: a page is spread over ranks"
            )
        self._hosts: dict[str, Any] = {}
        """The pools as SGLang registered them, by name."""
        self._stored: dict[str, StoredPool] = {}
        self._storing = threading.Lock()
        """Held by each store, so that `clear` can wait for stores with earlier names."""
        self._thread: CacheThread | None = None
        self._limit_s = float(self._config.blocking_timeout_secs)
        self._loads: deque[tuple[int, float]] = deque(maxlen=_KEPT_SPEEDS)
        """Pages and GiB/s of each load since the last `get_stats`."""
        self._stores: deque[tuple[int, float]] = deque(maxlen=_KEPT_SPEEDS)

    # Registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._hosts[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a pool. If the cache is already open, as for a draft model's pool, its pages must fit into the slots."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._hosts:
            return
        self._hosts[name] = host_pool
        if self._thread is not None:
            try:
                pool = HostPool(name, host_pool)
                slot_bytes = self._thread.cache.layout.chunk_bytes
                if pool.page_bytes > slot_bytes:
                    raise LayoutError(f"a page has {pool.page_bytes} bytes, slots have {slot_bytes}")
            except LayoutError as error:
                logger.warning("pool %s was registered after the cache opened, and is not stored: %s", name, error)
            else:
                self._add(pool)

    def on_host_pools_registered(self) -> None:
        """Open the cache. Reads the model's weights if no digest of them is cached."""
        pools = [HostPool(name, host) for name, host in self._hosts.items() if not self._is_logical(name)]
        if not pools:
            raise LayoutError("SGLang registered no host pool that has pages")
        anchor = self.mem_pool_host
        page_tokens = int(getattr(anchor, "logical_page_size", None) or anchor.page_size)
        layout = make_layout(self._storage, pools, page_tokens, self._config.model_id)
        self._thread = CacheThread(self._config, layout, name="tiercache-sglang", naming=PageNaming())
        for pool in pools:
            self._add(pool)
        # A server that exits without `close` would not write its last pages.
        atexit.register(self.close)
        logger.info("pages of %s; %s", ", ".join(pool.name for pool in pools), self._thread.cache.describe())

    def _add(self, pool: HostPool) -> None:
        layout, tenant = self._open.cache.layout.named_by(self._config.tenant_salt)
        self._stored[pool.name] = StoredPool(pool, self._storage, layout, tenant, self._generation)

    def _pool(self, name: str) -> StoredPool:
        """Return the pool. Raises LayoutError if it is not stored."""
        if name not in self._stored:
            raise LayoutError(f"pool {name} is not stored; stored are {', '.join(self._stored)}")
        return self._stored[name]

    def _is_logical(self, name: str) -> bool:
        """Return True for an anchor, which has indices and no memory: other pools hold its contents."""
        return bool(name == _KV and getattr(self._hosts.get(name), "kv_buffer", self) is None)

    # Lookup

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the length of the prefix of `keys` that is present, after at most `lookup_timeout_ms`."""
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find the prefixes of `keys` that all pools can restore, within `lookup_timeout_ms`. Ignores pools of block
        groups, which never shorten a hit.
        """
        limit_s = self._config.lookup_timeout_ms / 1000
        pools = []
        try:
            kv = None if self._is_logical(_KV) else self._pool(_KV).keys(keys)
            for one in pool_transfers or ():
                if one.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
                    is_whole = one.hit_policy == PoolHitPolicy.ALL_PAGES
                    window = len(keys) if is_whole else max(1, len(one.keys or ()))
                    stored = self._stored.get(str(one.name))
                    pools.append(PoolPages(str(one.name), stored.keys(keys) if stored else [], window))
            found = self._wait(look_up(self._open.cache, len(keys), kv, pools, limit_s), limit_s)
        except Exception as error:
            logger.warning("a lookup failed, which is a miss: %r", error)
            return PoolTransferResult.empty()
        by_pool = {_KV: found.kv_pages} | found.by_pool if found.kv_pages else found.by_pool
        return PoolTransferResult(max(found.prefixes, default=0), by_pool, found.prefixes)

    # Pages by their indices in a pool

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of the KV, and return which were loaded. Pages after the first failure may be overwritten."""
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the KV, and return which are in the cache. The copies are complete at return."""
        return self._store(_KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_get_v1` for pages of several pools."""
        return {one.name: self._load(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_set_v1` for pages of several pools."""
        return {one.name: self._store(str(one.name), one.keys or [], one.host_indices) for one in transfers}

    def get(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError("SGLang makes these calls without interface_v1 only")

    batch_get = set = batch_set = get

    # Moving pages

    def _load(self, name: str, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Load pages, and return which were loaded: a prefix."""

        def load(pool: HostPool, keys: list[ChunkKey], lending: Lending) -> Coroutine[Any, Any, int]:
            sinks = [lending.writing(sink) for sink in pool.sinks(indices, len(keys))]
            return self._open.cache.get_to(keys, sinks, deadline_s=self._limit_s)

        pages = self._move(name, hashes, self._loads, load)
        return [number < pages for number in range(len(hashes))]

    def _store(self, name: str, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Store pages, and return which are in the cache: a prefix."""

        def store(pool: HostPool, keys: list[ChunkKey], lending: Lending) -> Coroutine[Any, Any, int]:
            items = [
                (key, length, lending.reading(source))
                for key, (length, source) in zip(keys, pool.sources(indices, len(keys)), strict=True)
            ]
            return self._open.cache.put_from(items, deadline_s=self._limit_s, prefix=True)

        with self._storing:
            if (stored := self._stored.get(name)) is not None and not stored.writes:
                return [True] * len(hashes)
            pages = self._move(name, hashes, self._stores, store)
        if pages == len(set(hashes)):
            pages = len(hashes)
        return [number < pages for number in range(len(hashes))]

    def _move(
        self,
        name: str,
        hashes: Sequence[str],
        moves: deque[tuple[int, float]],
        move: Callable[[HostPool, list[ChunkKey], Lending], Coroutine[Any, Any, int]],
    ) -> int:
        """Run `move` while it uses SGLang's memory, revoke that use, and return the length of the moved prefix."""
        if not hashes or self._is_logical(name):
            return len(hashes)
        lending, began_s = Lending(), time.monotonic()
        try:
            stored = self._pool(name)
            pages = self._wait(move(stored.pool, stored.keys(hashes), lending), self._limit_s)
        except Exception as error:
            logger.warning("pages of pool %s failed, which is a miss: %r", name, error)
            return 0
        finally:
            while not lending.take_back(_COPY_S):
                logger.error("a copy of SGLang's pages has not ended for %.0f s", _COPY_S)
        if pages:
            took_s = max(time.monotonic() - began_s, 1e-9)
            moves.append((pages, pages * stored.pool.page_bytes / took_s / 2**30))
        return pages

    # Maintenance

    def clear(self) -> bool:
        """Remove the pages of this model and rank from every tier, including those of earlier runs.

        SGLang clears after weights were replaced, and does not report the new ones: KV computed from then on does not
        match the weight files in the layout. So this process uses private page names from here on until it ends, however
        often the storage is attached, and even if this raises. Raises TierUnavailable if some pages are left, which
        another process may find.
        """
        thread, until_s = self._open, time.monotonic() + _CLEAR_S
        TierCacheStorage._generation = os.urandom(_GENERATION_BYTES)
        for stored in list(self._stored.values()):
            self._add(stored.pool)
        if shares_pages(self._storage):
            logger.warning("cleared; ranks share pages (MLA), so nothing is stored or found until SGLang starts anew")
        # Otherwise a store with the earlier names could end after the removal.
        if not self._storing.acquire(timeout=_CLEAR_S):
            raise TierUnavailable(f"clear: pages were still being stored after {_CLEAR_S:.0f} s")
        self._storing.release()
        left_s = max(0.0, until_s - time.monotonic())
        pages = self._wait(forget_all(thread.cache, left_s), left_s)
        logger.info("cleared %d pages; pages stored from now on are found by this process only", pages)
        return True

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics since the last call, with speeds in GiB/s; None without `--enable-metrics`."""
        if not self._storage.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loads, stores = ([moves.popleft() for _ in range(len(moves))] for moves in (self._loads, self._stores))
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in stores],
        )

    def close(self) -> None:
        """Write the queued pages, for up to `close_timeout_s`, and close the cache. Idempotent."""
        atexit.unregister(self.close)
        if self._thread is None:
            return
        report = self._thread.close(self._config.close_timeout_s)
        logger.info("closed; %s", report.describe())

    @property
    def _open(self) -> CacheThread:
        if self._thread is None:
            raise CacheClosed("the cache is not open: SGLang has not registered all its host pools yet")
        return self._thread

    def _wait(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Return the coroutine's result. Raises TimeoutError if the cache's thread does not answer."""
        future = self._open.submit(coroutine)
        try:
            return future.result(limit_s + _MARGIN_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
