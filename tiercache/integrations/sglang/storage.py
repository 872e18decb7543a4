"""The storage back end that SGLang's cache controller calls from its own threads.

All calls are synchronous; the cache runs on a loop thread (`CacheThread`). Calls that move pages return only after the
last thread has stopped using SGLang's memory, even on failure, since SGLang may reuse a page for another request.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
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
from tiercache.core.keys import ChunkKey
from tiercache.errors import CacheClosed, ConfigError, LayoutError, TierUnavailable
from tiercache.integrations.sglang import generation
from tiercache.integrations.sglang.figures import TransferFigures
from tiercache.integrations.sglang.identity import for_process, make_layout
from tiercache.integrations.sglang.lookup import PageNaming, PoolPages, forget_all, prefix, present, restorable
from tiercache.integrations.sglang.pools import HostPool, StoredPool, make_pool, pages_among, shares_pages, stored_pool
from tiercache.integrations.unread import warn_of_unread
from tiercache.integrations.vllm.blocks import Lending
from tiercache.payloads import source_of

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


class TierCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types that mypy sees
    """Loaded by `module_path` and `class_name` of the extra configuration.

    Its other keys are those of a tiercache.yaml; `TIERCACHE_CONFIG_FILE` and the environment apply as well. The cache
    opens once SGLang has registered its pools, and raises ConfigError or LayoutError then. Later only `clear` raises: a
    page that cannot be loaded or stored is a miss, with a line in the log.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._by_pieces = bool(extra.get("interface_v1", 0))
        """True if pages of the KV are passed by indices; otherwise as tensors, whose order differs."""
        overrides = {key: value for key, value in extra.items() if key not in _SGLANGS_OWN}
        is_first = storage_config.tp_rank == 0
        self._config = for_process(Config.load(overrides=overrides, quiet=not is_first), storage_config)
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
        self._under_way = generation.UnderWay()
        self._thread: CacheThread | None = None
        self._largest_bytes = 0
        self.figures = TransferFigures(storage_config.enable_storage_metrics)

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
                pool = make_pool(name, host_pool)
                if pool.page_bytes > self._largest_bytes:
                    raise LayoutError(f"a page has {pool.page_bytes} bytes, slots have {self._largest_bytes}")
            except LayoutError as error:
                logger.warning("pool %s came late and is not stored: %s", name, error)
            else:
                self._add(pool, self._thread)

    def on_host_pools_registered(self) -> None:
        """Open the cache. Reads the model's weights if no digest of them is cached."""
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
        # A server that exits without `close` would not write its last pages.
        atexit.register(self.close)
        logger.info("pages of %s; %s", ", ".join(pool.name for pool in pools), thread.cache.describe())

    def _add(self, pool: HostPool, thread: CacheThread) -> None:
        self._stored[pool.name] = self._named(pool, thread, generation.current())

    def _named(self, pool: HostPool, thread: CacheThread, own: bytes) -> StoredPool:
        layout, tenant = thread.cache.layout.named_by(self._config.tenant_salt)
        return stored_pool(pool, self._storage, layout, tenant, own)

    def _pool(self, name: str) -> StoredPool:
        """Return the pool. Raises CacheClosed before the cache is open, LayoutError if the pool is not stored."""
        _ = self._open
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
        if self._is_logical(_KV):
            return len(keys)
        return self._or_else(0, "a look-up", lambda: self._prefix(_KV, keys, self._lookup_s))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find the prefixes of `keys` that all pools can restore, within `lookup_timeout_ms`. Ignores pools of block
        groups, which never shorten a hit."""
        until_s = time.monotonic() + self._lookup_s

        def ask() -> PoolTransferResult:
            kv_pages = self.batch_exists(keys, extra_info)
            pools = [
                self._pages_of(transfer, keys[:kv_pages], until_s)
                for transfer in pool_transfers or ()
                if transfer.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
            ]
            hit = restorable(kv_pages, pools)
            kv = {_KV: kv_pages} if kv_pages else {}
            return PoolTransferResult(hit.pages, kv | hit.by_pool, hit.prefixes)

        return self._or_else(PoolTransferResult.empty(), "a look-up", ask)

    def _prefix(self, name: str, hashes: Sequence[str], limit_s: float) -> int:
        return self._wait(prefix(self._open.cache, self._pool(name).keys(hashes), limit_s), limit_s)

    def _pages_of(self, transfer: PoolTransfer, hashes: Sequence[str], until_s: float) -> PoolPages:
        name, limit_s = str(transfer.name), max(0.0, until_s - time.monotonic())
        window = None
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
        if name not in self._stored:
            return PoolPages(name, [False] * len(hashes), window)
        if window is None:
            pages = self._prefix(name, hashes, limit_s)
            return PoolPages(name, [True] * pages + [False] * (len(hashes) - pages))
        keys = self._pool(name).keys(hashes)
        return PoolPages(name, self._wait(present(self._open.cache, keys, limit_s), limit_s), window)

    @property
    def _lookup_s(self) -> float:
        return self._config.lookup_timeout_ms / 1000

    # Pages by their indices in a pool

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of the KV, and return which were loaded. Pages after the first failure may be overwritten."""
        return self._move(_KV, keys, host_indices, self._load)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the KV, and return which are in the cache. The copies are complete at return."""
        return self._move(_KV, keys, host_indices, self._store)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_get_v1` for pages of several pools."""
        return {one.name: self._move(one.name, one.keys or [], one.host_indices, self._load) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Do the same as `batch_set_v1` for pages of several pools."""
        return {one.name: self._move(one.name, one.keys or [], one.host_indices, self._store) for one in transfers}

    def _move(
        self,
        pool_name: Any,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        move: Callable[[StoredPool, list[ChunkKey], torch.Tensor], int],
    ) -> list[bool]:
        name = str(pool_name)
        if name in self._hosts and self._is_logical(name):
            return [True] * len(hashes)

        def run() -> int:
            stored = self._pool(name)
            found = 0 if indices is None else len(indices)
            if found != len(hashes) * stored.pool.page_tokens:
                raise LayoutError(
                    f"pool {name}: expected {stored.pool.page_tokens} indices for each of {len(hashes)} pages, found {found}"
                )
            return move(stored, stored.keys(hashes), indices) if hashes else 0

        with self._under_way.call():
            done = self._or_else(0, f"pages of pool {name}", run)
        return [True] * done + [False] * (len(hashes) - done)

    def _load(self, stored: StoredPool, keys: list[ChunkKey], indices: torch.Tensor) -> int:
        lending, limit_s = Lending(), float(self._config.blocking_timeout_secs)
        sinks = stored.pool.sinks(indices, lending)
        began_s = time.monotonic()
        pages = self._lend(self._open.cache.get_to(keys, sinks, deadline_s=limit_s), lending, limit_s)
        self.figures.loaded(pages, pages * stored.pool.page_bytes, time.monotonic() - began_s)
        return pages

    def _store(self, stored: StoredPool, keys: list[ChunkKey], indices: torch.Tensor) -> int:
        if not stored.writes:
            return len(keys)
        lending, limit_s = Lending(), float(self._config.blocking_timeout_secs)
        length = stored.pool.page_bytes
        items = [(key, length, one) for key, one in zip(keys, stored.pool.sources(indices, lending), strict=True)]
        began_s = time.monotonic()
        pages = self._lend(self._open.cache.put_from(items, deadline_s=limit_s, prefix=True), lending, limit_s)
        self.figures.stored(pages, pages * length, time.monotonic() - began_s)
        return pages_among(keys, pages)

    def _lend(self, moving: Coroutine[Any, Any, int], lending: Lending, limit_s: float) -> int:
        """Run `moving` while it uses SGLang's pages, and revoke their use afterwards."""
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
        """Fill one tensor per page; from the first missing page on, the result is None."""
        self._require_tensors(target_locations, "target_locations")
        limit_s = float(self._config.blocking_timeout_secs)

        def load() -> int:
            wanted = self._pool(_KV).keys(keys)
            return self._wait(self._open.cache.get_into(wanted, target_locations, deadline_s=limit_s), limit_s)

        arrived = self._or_else(0, "pages", load)
        return [*target_locations[:arrived], *[None] * (len(keys) - arrived)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a tensor for each key. Return True if all are in the cache."""
        self._require_tensors(values, "values")
        limit_s = float(self._config.blocking_timeout_secs)

        def store() -> int:
            stored = self._pool(_KV)
            if not stored.writes:
                return len(keys)
            # Some pools return pages as views of their own memory.
            lending, names = Lending(), stored.keys(keys)
            payloads = [source_of(value) for value in values]
            items = [
                (key, length, lending.reading(source)) for key, (length, source) in zip(names, payloads, strict=True)
            ]
            put = self._open.cache.put_from(items, deadline_s=limit_s, prefix=True)
            return pages_among(names, self._lend(put, lending, limit_s))

        with self._under_way.call():
            return self._or_else(0, "pages", store) == len(keys)

    def _require_tensors(self, tensors: Any, name: str) -> None:
        if self._by_pieces:
            raise LayoutError(
                "interface_v1 is set: pages are stored by their indices (batch_get_v1, batch_set_v1) only"
            )
        if tensors is None or any(tensor is None for tensor in tensors):
            raise TypeError(f"{name}: expected a tensor for each key; addresses are not taken")

    # Maintenance

    def clear(self) -> bool:
        """Remove the pages of this model and rank from every tier, including those of earlier runs.

        SGLang does not report if weights were replaced, so this process uses private page names from here on until it
        ends, even if this raises. Raises TierUnavailable if some pages are left, which another process may find.
        """
        thread, until_s = self._open, time.monotonic() + _CLEAR_S
        own = generation.begin()
        self._stored = {name: self._named(one.pool, thread, own) for name, one in self._stored.items()}
        if shares_pages(self._storage):
            logger.warning("cleared; ranks share pages (MLA), so nothing is stored or found until SGLang starts anew")
        # Stores with the earlier names could end after the removal.
        if not self._under_way.wait(_CLEAR_S):
            raise TierUnavailable(f"clear: pages were still being stored after {_CLEAR_S:.0f} s")
        left_s = max(0.0, until_s - time.monotonic())
        pages = self._wait(forget_all(thread.cache, left_s), left_s)
        logger.info("cleared; there were %d pages. What is stored from now on is this process's own", pages)
        return True

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics since the last call; None without `--enable-metrics`."""
        return self.figures.take()

    def close(self) -> None:
        """Write the queued pages, for up to `close_timeout_s`, and close the cache. Idempotent."""
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
        """Return the coroutine's result. Raises TimeoutError if the cache's thread does not answer."""
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
