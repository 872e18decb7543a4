"""LMCache 0.5.6 without a GPU, one measurement at a time. Runs with a Python that has lmcache and torch, not tiercache.

    python peer_lmcache.py CHUNK_BYTES COUNT DIRECTORY

Commands come by line on stdin, an answer is one line of JSON on stdout: {what: GB/s} or {"error": ...}.
Commands: `put SETTING`, `get SETTING`.

A put ends when every file is synced, in four threads: LMCache itself never syncs. A get starts after the
files were dropped from the page cache.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SOURCE_BYTES = 256 << 20
_SHAPES = {2 << 20: (8, 2, 256, 2, 128), 32 << 20: (32, 2, 256, 8, 128)}
"""Chunk bytes -> layers, K and V, tokens, heads, head size, in bfloat16."""


def main(chunk_bytes: int, count: int, directory: Path) -> None:
    # LMCache logs to stdout: what it says there must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    peer = Disk(chunk_bytes, count, directory)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        what, *arguments = line.split()
        try:
            answer = {what: getattr(peer, what)(*arguments)}
        except Exception as error:
            answer = {"error": f"{what}: {error!r}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def engine(shape: tuple[int, ...], arena_gb: float, *, model: str = "bench", dtype: Any = None, **settings: Any) -> Any:
    import torch
    from lmcache.observability import PrometheusLogger
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase
    from prometheus_client import REGISTRY

    # Made for one engine a process: its second one would meet the metrics of the first.
    PrometheusLogger._instance = None
    for collector in list(REGISTRY._collector_to_names):
        REGISTRY.unregister(collector)
    config = LMCacheEngineConfig.from_defaults(chunk_size=256, max_local_cpu_size=arena_gb, **settings)
    config.validate()
    metadata = LMCacheMetadata(
        model_name=model, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=dtype or torch.bfloat16, kv_shape=shape, role="worker",
    )  # fmt: skip
    made = LMCacheEngine(
        config, metadata, ChunkedTokenDatabase(config, metadata), MockGPUConnector(shape), _nothing, _nothing
    )
    made.post_init(async_lookup_server=None)
    return made


def new_keys(made: Any, count: int) -> list[Any]:
    tokens = [random.getrandbits(17) for _ in range(count * 256)]
    return [key for _, _, key in made.token_database.process_tokens(tokens)]


class _Chunks:
    """Payloads in the caller's memory, as torch tensors."""

    def __init__(self, chunk_bytes: int, count: int) -> None:
        import torch

        self.chunk_bytes = chunk_bytes
        self.count = count
        self.kv_shape = _SHAPES[chunk_bytes]
        layers, halves, tokens, heads, size = self.kv_shape
        self.shape = torch.Size([halves, layers, tokens, heads * size])
        self.rows = max(2, _SOURCE_BYTES // chunk_bytes)
        self.sources = torch.empty((self.rows, *self.shape), dtype=torch.bfloat16)
        self.sources.view(torch.int16).random_(-1000, 1000)
        self.targets = torch.zeros_like(self.sources)
        self.arena_gb = count * chunk_bytes / 2**30 + 0.5

    def gbps(self, took_s: float) -> float:
        return self.count * self.chunk_bytes / took_s / 1e9

    def copied(self, storage: Any, number: int) -> Any:
        import torch

        memory = storage.allocate(self.shape, torch.bfloat16, busy_loop=False)
        memory.tensor.copy_(self.sources[number % self.rows])
        return memory


class Disk:
    """One engine or client a setting, each made when it is first asked for."""

    def __init__(self, chunk_bytes: int, count: int, directory: Path) -> None:
        self.chunks = _Chunks(chunk_bytes, count)
        self.directory = directory
        self.made: dict[str, Any] = {}

    def put(self, setting: str) -> float:
        return float(self._of(setting).put())

    def get(self, setting: str) -> float:
        return float(self._of(setting).get())

    def _of(self, setting: str) -> Any:
        if setting not in self.made:
            place = self.directory / setting
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            kinds: dict[str, Callable[[], Any]] = {
                "disk_default": lambda: _LocalDisk(self.chunks, place, {}),
                "disk_odirect": lambda: _LocalDisk(self.chunks, place, {"use_odirect": True}),
                "fs_odirect": lambda: _FileSystem(self.chunks, place),
                "native_odirect": lambda: _Native(self.chunks, place),
            }
            self.made[setting] = kinds[setting]()
        return self.made[setting]


class _Backend:
    """A back end of the engine behind `batched_put` and `batched_get_blocking`."""

    def __init__(self, chunks: _Chunks, place: Path, **settings: Any) -> None:
        self.chunks = chunks
        self.place = place
        self.engine = engine(chunks.kv_shape, chunks.arena_gb, local_cpu=False, **settings)
        self.storage = self.engine.storage_manager
        self.keys: list[Any] = []
        self.checked = False

    def put(self) -> float:
        self.empty()
        self.keys = new_keys(self.engine, self.chunks.count)
        began = time.perf_counter()
        memory = [self.chunks.copied(self.storage, number) for number in range(self.chunks.count)]
        self.storage.batched_put(self.keys, memory, location=self.name)
        while not self.visible():
            time.sleep(0.0005)
        _sync(self.place)
        return self.chunks.gbps(time.perf_counter() - began)

    def get(self) -> float:
        import torch

        _sync(self.place, drop=True)
        began = time.perf_counter()
        found = self.backend.batched_get_blocking(self.keys)
        took = time.perf_counter() - began
        assert None not in found, "a miss"
        if not self.checked:
            # As integers, because some of the random bits are NaN, which equals nothing.
            sources = self.chunks.sources.view(torch.int16)
            for number, memory in enumerate(found):
                assert torch.equal(memory.tensor.view(torch.int16), sources[number % len(sources)]), "wrong bytes"
            self.checked = True
        for memory in found:
            memory.ref_count_down()
        return self.chunks.gbps(took)

    name: str

    @property
    def backend(self) -> Any:
        return self.storage.storage_backends[self.name]

    def visible(self) -> bool:
        raise NotImplementedError

    def empty(self) -> None:
        for path in _files(self.place):
            path.unlink()


class _LocalDisk(_Backend):
    name = "LocalDiskBackend"

    def __init__(self, chunks: _Chunks, place: Path, extra: dict[str, Any]) -> None:
        super().__init__(
            chunks, place, local_disk=str(place), max_local_disk_size=2 * chunks.arena_gb, extra_config=extra
        )

    def visible(self) -> bool:
        return len(self.backend.dict) >= self.chunks.count

    def empty(self) -> None:
        for key in list(self.backend.dict):
            self.backend.remove(key)
        self.backend.current_cache_size = 0.0  # `remove` does not give it back, and the tier would be full soon
        super().empty()


class _FileSystem(_Backend):
    name = "RemoteBackend-fs"

    def __init__(self, chunks: _Chunks, place: Path) -> None:
        extra = {
            "remote_storage_plugin.fs.base_path": str(place),
            "fs_connector_use_odirect": True,
            "save_chunk_meta": False,
        }
        super().__init__(chunks, place, remote_storage_plugins=["fs"], extra_config=extra, blocking_timeout_secs=120)

    def visible(self) -> bool:
        return not self.backend.put_tasks


class _Native:
    """The C++ file system client of LMCache's multi-process mode, with four threads, from and to its own kind of memory."""

    def __init__(self, chunks: _Chunks, place: Path) -> None:
        from lmcache.lmcache_fs import LMCacheFSClient
        from lmcache.v1.memory_management import _allocate_cpu_memory

        self.chunks = chunks
        self.place = place
        self.client = LMCacheFSClient(str(place), 4, "", True, 0)
        self.poll = select.poll()
        self.poll.register(self.client.event_fd(), select.POLLIN)
        size = chunks.chunk_bytes
        self.memory = _allocate_cpu_memory(chunks.count * size)
        self.rows = [self.memory[number * size : (number + 1) * size] for number in range(chunks.count)]
        self.views = [memoryview((ctypes.c_uint8 * size).from_address(row.data_ptr())).cast("B") for row in self.rows]
        self.keys: list[str] = []

    def put(self) -> float:
        import torch

        for path in _files(self.place):
            path.unlink()
        self.keys = [f"m@1@0@{random.getrandbits(60):x}@bf16_{number}" for number in range(self.chunks.count)]
        began = time.perf_counter()
        for number, row in enumerate(self.rows):
            row.copy_(self.chunks.sources[number % self.chunks.rows].view(torch.uint8).flatten())
        self.client.submit_batch_set(self.keys, self.views)
        self._wait()
        _sync(self.place)
        return self.chunks.gbps(time.perf_counter() - began)

    def get(self) -> float:
        _sync(self.place, drop=True)
        began = time.perf_counter()
        self.client.submit_batch_get(self.keys, self.views)
        self._wait()
        return self.chunks.gbps(time.perf_counter() - began)

    def _wait(self) -> None:
        done: list[Any] = []
        while not done:
            self.poll.poll(1000)
            done += self.client.drain_completions()
        assert all(completion[1] for completion in done), done


def _files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def _sync(place: Path, *, drop: bool = False) -> None:
    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sync, _files(place)))


def _nothing(*arguments: Any) -> None:
    """The engine wants to be told how to broadcast; there is nobody to broadcast to."""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
