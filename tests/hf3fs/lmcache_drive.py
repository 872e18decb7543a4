"""LMCache's own 3FS connector, driven in a process of its own: `lmcache_drive.py MOUNT plugin|url`.

It is the wheel's code, unchanged, over whatever `hf3fs_fuse` and `hf3fs_py_usrbio` the environment offers. The last line of
output is JSON.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.connector.hf3fs_adapter import HF3fsConnectorAdapter
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

CHUNKS = 12
LAYERS, TOKENS, HEADS, HEAD_SIZE = 4, 256, 2, 64


def make_connector(mount: str, mode: str, loop: asyncio.AbstractEventLoop) -> tuple[Any, LocalCPUBackend]:
    base_path = f"{mount}/lmcache"
    extra: dict[str, Any] = {
        "hf3fs_mount_point": mount,
        "hf3fs_iov_size": 100 << 20,
        "hf3fs_ior_entries": 128,
        "hf3fs_io_thread_num": 2,
        "remote_storage_plugin.hf3fs.primary.base_path": base_path,
    }
    config = LMCacheEngineConfig.from_defaults(chunk_size=TOKENS, max_local_cpu_size=0.2, extra_config=extra)
    metadata = LMCacheMetadata(
        model_name="test", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=(LAYERS, 2, TOKENS, HEADS, HEAD_SIZE), role="worker",
    )  # fmt: skip
    cpu = LocalCPUBackend(config, metadata, "cpu")
    url, plugin = ("plugin://hf3fs.primary", "hf3fs.primary") if mode == "plugin" else (f"hf3fs://{base_path}", None)
    adapter = HF3fsConnectorAdapter()
    assert adapter.can_parse(url)
    return adapter.create_connector(ConnectorContext(url, loop, cpu, config, metadata, plugin)), cpu


async def drive(mount: str, mode: str) -> dict[str, Any]:
    connector, cpu = make_connector(mount, mode, asyncio.get_running_loop())
    shape = torch.Size([2, LAYERS, TOKENS, HEADS * HEAD_SIZE])
    keys = [CacheEngineKey("test", 1, 0, number, torch.bfloat16) for number in range(CHUNKS)]
    stored = []
    for _ in keys:
        memory = cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        memory.tensor.view(torch.int16).random_(-1000, 1000)
        stored.append(memory)
    missing = await connector.get(keys[0])
    await asyncio.gather(*(connector.put(key, memory) for key, memory in zip(keys, stored, strict=True)))
    present = [await connector.exists(key) for key in keys]
    read = await asyncio.gather(*(connector.get(key) for key in keys))
    equal = [
        got is not None and bytes(got.byte_array) == bytes(memory.byte_array)
        for got, memory in zip(read, stored, strict=True)
    ]
    for memory in [*stored, *filter(None, read)]:
        memory.ref_count_down()
    removed = connector.remove_sync(keys[0]), connector.exists_sync(keys[0])
    files = sorted(os.stat(path).st_size for path in Path(mount, "lmcache").iterdir())
    await connector.close()
    return {
        "missing": missing is None,
        "present": all(present),
        "equal": all(equal),
        "removed": removed,
        "files": len(files),
        "payload_bytes": shape.numel() * 2,
        "smallest_bytes": files[0],
    }


answer = asyncio.run(drive(*sys.argv[1:3]))
print(json.dumps(answer), flush=True)
