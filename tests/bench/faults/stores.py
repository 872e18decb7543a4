"""The stores that are compared, each behind the Python interface that its engine calls."""

from __future__ import annotations

import asyncio
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

CHUNK_BYTES = 256 << 10
CHUNK_TOKENS = 256
_POISON = 0xEE
"""In memory before a read, so that bytes that a read leaves out are not taken for the right ones."""
_PATIENCE_S = 3.0
"""Without a sign of progress."""


@dataclass(frozen=True)
class Identity:
    """What the KV of a chunk depends on, apart from its tokens."""

    model: str = "model"
    weights: str = "1"
    """Other weights under the same name of the model."""
    dtype: str = "bfloat16"
    layout: int = 0
    """One of two orders of the same number of bytes."""
    salt: str = "one"


def content(number: int, identity: Identity) -> np.ndarray:
    """Return the only right bytes of a chunk."""
    seed = [number, *"|".join(map(str, astuple(identity))).encode()]
    return np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


class Store(ABC):
    """A store on a directory, opened by one process, with the chunks of one prompt."""

    index_in_memory: ClassVar[bool] = False
    """Only the process that wrote a chunk finds it, so it has to be the one that reads."""
    imports: ClassVar[Sequence[str]] = ()
    """Modules that take seconds to import."""

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        self.directory = directory
        self.identity = identity
        self.count = count
        self.tokens = [number % 30_000 for number in range(count * CHUNK_TOKENS)]

    @abstractmethod
    def write(self, chunks: Sequence[np.ndarray]) -> None:
        """Store all chunks, and return when no write is left to wait for."""

    @abstractmethod
    def read(self) -> list[Any]:
        """Return for each chunk its bytes, None for a miss, or the exception that was raised. Memory is cold before."""

    def close(self) -> None:  # noqa: B027
        """Let go of the directory. Most have nothing to do."""


class TierCacheDisk(Store):
    """The disk tier below a `TierCache`."""

    imports = ("tiercache.cache",)

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        from tiercache import Config, Layout, TierCache

        super().__init__(directory, identity, count)
        overrides = {
            "local_disk": str(directory),
            "max_local_disk_size": 1.0,
            "max_local_cpu_size": (count + 32) * CHUNK_BYTES / 2**30,
        }
        layout = Layout(
            identity.model,
            chunk_tokens=CHUNK_TOKENS,
            bytes_per_token=CHUNK_BYTES // CHUNK_TOKENS,
            kv_dtype=identity.dtype,
            revision=identity.weights,
            byte_format=f"order {identity.layout}",
        )
        self._runner = asyncio.Runner()
        self._cache = TierCache(Config.load(overrides=overrides, environ={}), layout)
        self._runner.run(self._cache.start())
        self._keys = self._cache.keys(self.tokens, salt=identity.salt)

    def write(self, chunks: Sequence[np.ndarray]) -> None:
        async def put() -> None:
            await self._cache.put_many(self._keys, chunks, prefix=True)
            await self._cache.flush(30)

        self._runner.run(put())

    def read(self) -> list[Any]:
        async def get(key: bytes) -> Any:
            async with self._cache.get(key) as lease:
                return lease and bytes(lease.view)

        async def get_all() -> list[Any]:
            self._cache.clear_hot()
            return await asyncio.gather(*map(get, self._keys), return_exceptions=True)

        return self._runner.run(get_all())

    def close(self) -> None:
        self._runner.run(self._cache.close())


class VllmFs(Store):
    """vLLM's `fs` tier, asked as its tiering manager asks it, with one chunk a job. Names are vLLM's own block hashes."""

    imports = ("vllm.v1.kv_offload.tiering.spec", "vllm.v1.kv_offload.tiering.fs.manager")

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_offload import config as parts
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        super().__init__(directory, identity, count)
        config = parts.OffloadingConfig(
            groups=(parts.OffloadingGroupConfig(CHUNK_TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": count * CHUNK_BYTES},
            engine_id="engine",
            model=parts.OffloadingModelConfig(identity.model, identity.dtype),
            cache=parts.OffloadingCacheConfig(CHUNK_TOKENS, 1),
            parallel=parts.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
            kv_cache_layout=("LBHNC", "LBNHC")[identity.layout],
        )
        memory = memoryview(mmap.mmap(-1, count * CHUNK_BYTES))  # O_DIRECT takes whole pages
        self._rows = np.frombuffer(memory, np.uint8).reshape(count, CHUNK_BYTES)
        tier, spec = {"type": "fs", "root_dir": str(directory)}, TieringOffloadingSpec(config)
        rows = memory.cast("b", (count, CHUNK_BYTES))
        self._tier = SecondaryTierFactory.create_secondary_tier(tier, rows, spec)
        self._request = ReqContext("request")
        kv_cache_utils.init_none_hash(sha256)
        self._keys: list[Any] = []
        block, extra = None, (("cache_salt", identity.salt),)
        for start in range(0, len(self.tokens), CHUNK_TOKENS):
            tokens = self.tokens[start : start + CHUNK_TOKENS]
            block = kv_cache_utils.hash_block_tokens(sha256, block, tokens, None if block else extra)
            self._keys.append(make_offload_key(block, 0))

    def write(self, chunks: Sequence[np.ndarray]) -> None:
        self._rows[:] = chunks
        self._ended(self._tier.submit_store, range(self.count))

    def read(self) -> list[Any]:
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        self._rows[:] = _POISON
        while LookupResult.RETRY in (answers := [self._tier.lookup(key, self._request) for key in self._keys]):
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.01)
        found = [number for number, answer in enumerate(answers) if answer is LookupResult.HIT]
        loaded = self._ended(self._tier.submit_load, found)
        return [self._rows[number].tobytes() if loaded.get(number) else None for number in range(self.count)]

    def _ended(self, submit: Callable[[Any], None], numbers: Sequence[int]) -> dict[int, bool]:
        """Run a job for each chunk; return which succeeded."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        load = submit == self._tier.submit_load
        for number in numbers:
            submit(TransferJob(number, [self._keys[number]], np.array([number]), load, self._request))
        self._tier.drain_jobs()
        return {result.job_id: result.success for result in self._tier.get_finished_jobs()}

    def close(self) -> None:
        self._tier.shutdown()


class _LMCache(Store):
    """A back end of LMCache's engine, below `batched_put` and `batched_get_blocking`."""

    imports = ("lmcache.v1.cache_engine",)
    backend: ClassVar[str]

    def __init__(self, directory: Path, identity: Identity, count: int, **settings: Any) -> None:
        import torch

        from tests.bench.peer_lmcache import engine

        super().__init__(directory, identity, count)
        heads = (4, 2)[identity.layout]
        shape = (2, 2, CHUNK_TOKENS, heads, 128 // heads)
        self._dtype = getattr(torch, identity.dtype)
        arena_gb = (count + 200) * CHUNK_BYTES / 2**30
        made = engine(shape, arena_gb, model=identity.model, dtype=self._dtype, local_cpu=False, **settings)
        self._storage = made.storage_manager
        self._backend = self._storage.storage_backends[self.backend]
        self._shape = torch.Size([2, 2, CHUNK_TOKENS, 128])
        # LMCache in an engine's process does not read vLLM's `cache_salt`. It separates requests by tags.
        tags = {"lmcache.tag.salt": identity.salt}
        named = made.token_database.process_tokens(self.tokens, request_configs=tags)
        self._keys = [key for _, _, key in named]

    def write(self, chunks: Sequence[np.ndarray]) -> None:
        self._storage.batched_put(self._keys, self._memory(chunks), location=self.backend)
        written = getattr(self._backend, "disk_worker", self._backend)
        left, since_s = -1, time.monotonic()
        # A write that fails stays among these for ever.
        while written.put_tasks and time.monotonic() < since_s + _PATIENCE_S:
            if len(written.put_tasks) != left:
                left, since_s = len(written.put_tasks), time.monotonic()
            time.sleep(0.001)

    def read(self) -> list[Any]:
        poison = np.full(CHUNK_BYTES, _POISON, np.uint8)
        for memory in self._memory([poison] * (self.count + 8)):
            memory.ref_count_down()
        found = self._backend.batched_get_blocking(self._keys)
        payloads = [memory and bytes(memory.byte_array) for memory in found]
        for memory in filter(None, found):
            memory.ref_count_down()
        return payloads

    def _memory(self, chunks: Sequence[np.ndarray]) -> list[Any]:
        made = [self._storage.allocate(self._shape, self._dtype, busy_loop=False) for _ in chunks]
        for memory, chunk in zip(made, chunks, strict=True):
            np.frombuffer(memory.byte_array, np.uint8)[:] = chunk
        return made


class LMCacheDisk(_LMCache):
    """`local_disk`."""

    backend = "LocalDiskBackend"
    index_in_memory = True
    direct: ClassVar[bool] = False

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        extra = {"use_odirect": self.direct}
        disk = {"local_disk": str(directory), "max_local_disk_size": 1.0}
        super().__init__(directory, identity, count, extra_config=extra, **disk)


class LMCacheDiskDirect(LMCacheDisk):
    """`local_disk` with `use_odirect`."""

    direct = True


class LMCacheFs(_LMCache):
    """The remote storage plug-in `fs`."""

    backend = "RemoteBackend-fs"
    direct: ClassVar[bool] = False

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        extra: dict[str, Any] = {"remote_storage_plugin.fs.base_path": str(directory)}
        if self.direct:
            extra |= {"fs_connector_use_odirect": True, "save_chunk_meta": False}
        super().__init__(directory, identity, count, remote_storage_plugins=["fs"], extra_config=extra)


class LMCacheFsDirect(LMCacheFs):
    """`fs` with O_DIRECT, which is only used without the length and shape before the chunk."""

    direct = True


class LMCacheNative(Store):
    """The C++ client of LMCache's multi-process mode, behind its adapter `fs_native`."""

    imports = ("lmcache.v1.distributed.l2_adapters", "lmcache.v1.multiprocess.token_hasher")

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        super().__init__(directory, identity, count)
        config = get_l2_adapter_config_class("fs_native").from_dict({"base_path": str(directory)})
        self._adapter = create_l2_adapter(config)
        hashes = TokenHasher(CHUNK_TOKENS).compute_chunk_hashes(self.tokens)
        rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
        self._keys = [ObjectKey(each, identity.model, rank, 0, identity.salt) for each in hashes]
        allocator = HostMemoryAllocator((count + 8) * CHUNK_BYTES)
        shape = torch.Size([2, 2, CHUNK_TOKENS, 128])
        self._memory = [allocator.allocate(shape, getattr(torch, identity.dtype)) for _ in range(count)]
        self._rows = [np.frombuffer(memory.byte_array, np.uint8) for memory in self._memory]

    def write(self, chunks: Sequence[np.ndarray]) -> None:
        for row, chunk in zip(self._rows, chunks, strict=True):
            row[:] = chunk
        pairs = zip(self._keys, self._memory, strict=True)
        left = {self._adapter.submit_store_task([key], [memory]) for key, memory in pairs}
        while left:
            left.difference_update(self._adapter.pop_completed_store_tasks())
            time.sleep(0.001)

    def read(self) -> list[Any]:
        for row in self._rows:
            row[:] = _POISON
        looked = self._adapter.submit_lookup_and_lock_task(self._keys, {})
        found = _answer(self._adapter.query_lookup_and_lock_result, looked)
        return [self._load(number) if found.test(number) else None for number in range(self.count)]

    def _load(self, number: int) -> Any:
        task = self._adapter.submit_load_task([self._keys[number]], [self._memory[number]])
        return self._rows[number].tobytes() if _answer(self._adapter.query_load_result, task).test(0) else None

    def close(self) -> None:
        self._adapter.close()


def _answer(ask: Callable[[Any], Any], task: Any) -> Any:
    """Ask until there is an answer. The parent process limits the time of this process."""
    while (answer := ask(task)) is None:
        time.sleep(0.001)
    return answer


class PlainFiles(Store):
    """Files that are named by the number of their chunk and never verified: what the harness must find wrong."""

    def write(self, chunks: Sequence[np.ndarray]) -> None:
        for number, chunk in enumerate(chunks):
            self._path(number).write_bytes(chunk.tobytes())

    def read(self) -> list[Any]:
        return [self._read(number) for number in range(self.count)]

    def _read(self, number: int) -> Any:
        try:
            return self._path(number).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return error

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:03}.kv"


STORES: dict[str, type[Store]] = {
    "tiercache": TierCacheDisk,
    "vllm-fs": VllmFs,
    "lmcache-disk": LMCacheDisk,
    "lmcache-disk-direct": LMCacheDiskDirect,
    "lmcache-fs": LMCacheFs,
    "lmcache-fs-direct": LMCacheFsDirect,
    "lmcache-native": LMCacheNative,
    "plain-files": PlainFiles,
}
