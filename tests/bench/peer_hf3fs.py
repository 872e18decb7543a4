"""LMCache 0.5.6's 3FS connector, one measurement at a time. Runs with a Python that has lmcache and torch, not tiercache's.

    python peer_hf3fs.py MOUNT CHUNK_BYTES COUNT

with the emulator's modules on PYTHONPATH. Commands come by line on stdin, an answer is one line of JSON on stdout:
`write` and `read` answer {what: GB/s}. All chunks are asked for at once; the connector's threads take one each at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

_SHAPES = {2 << 20: (8, 2, 256, 2, 128), 8 << 20: (32, 2, 256, 2, 128), 32 << 20: (32, 2, 256, 8, 128)}
"""Chunk bytes -> layers, K and V, tokens, heads, head size, in bfloat16."""
_IN_FLIGHT = 16


class Connector:
    def __init__(self, mount: str, chunk_bytes: int, count: int, loop: asyncio.AbstractEventLoop) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import ConnectorContext
        from lmcache.v1.storage_backend.connector.hf3fs_adapter import HF3fsConnectorAdapter
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self._chunk_bytes, self._count = chunk_bytes, count
        layers, _, tokens, heads, head_size = _SHAPES[chunk_bytes]
        self._shape = torch.Size([2, layers, tokens, heads * head_size])
        self._dtype = torch.bfloat16
        base_path = f"{mount}/lmcache"
        extra: dict[str, Any] = {
            "hf3fs_mount_point": mount,
            "remote_storage_plugin.hf3fs.primary.base_path": base_path,
        }
        gigabytes = (2 * _IN_FLIGHT + 4) * chunk_bytes / 2**30 + 0.1
        config = LMCacheEngineConfig.from_defaults(chunk_size=tokens, max_local_cpu_size=gigabytes, extra_config=extra)
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(layers, 2, tokens, heads, head_size), role="worker",
        )  # fmt: skip
        self._cpu = LocalCPUBackend(config, metadata, "cpu")
        context = ConnectorContext("plugin://hf3fs.primary", loop, self._cpu, config, metadata, "hf3fs.primary")
        self._connector = HF3fsConnectorAdapter().create_connector(context)
        self._sources = [self._allocate() for _ in range(_IN_FLIGHT)]
        self._keys: list[Any] = []
        self._made = 0

    def _allocate(self) -> Any:
        from lmcache.v1.memory_management import MemoryFormat

        memory = self._cpu.allocate(self._shape, self._dtype, MemoryFormat.KV_2LTD)
        memory.tensor.view(dtype=memory.tensor.dtype).normal_()
        return memory

    async def write(self) -> dict[str, float]:
        from lmcache.utils import CacheEngineKey

        for key in self._keys:
            self._connector.remove_sync(key)
        self._keys = [CacheEngineKey("bench", 1, 0, self._made + n, self._dtype) for n in range(self._count)]
        self._made += self._count
        left = iter(self._keys)

        async def lane(source: Any) -> None:
            for key in left:
                await self._connector.put(key, source)

        return {"write": await self._timed([lane(source) for source in self._sources])}

    async def read(self) -> dict[str, float]:
        left = iter(self._keys)

        async def lane() -> None:
            for key in left:
                memory = await self._connector.get(key)
                assert memory is not None
                memory.ref_count_down()

        return {"read": await self._timed([lane() for _ in range(_IN_FLIGHT)])}

    async def _timed(self, lanes: list[Any]) -> float:
        began = time.perf_counter()
        await asyncio.gather(*lanes)
        return self._count * self._chunk_bytes / (time.perf_counter() - began) / 1e9


def main(mount: str, chunk_bytes: int, count: int) -> None:
    # LMCache logs to stdout: what it says there must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    connector = Connector(mount, chunk_bytes, count, loop)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = loop.run_until_complete(getattr(connector, line.strip())())
        except Exception as error:
            answer = {"error": f"{line.strip()}: {error!r}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
