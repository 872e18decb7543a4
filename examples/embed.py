"""Embed the cache in an asyncio program: store, look up, load, and see it again after a "restart".

    python examples/embed.py
"""

from __future__ import annotations

import asyncio
import tempfile

import numpy as np

import tiercache
from tiercache.signals import ended_by_signals


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = tiercache.Config.load(
            overrides={"max_local_cpu_size": 0.25, "local_disk": directory, "max_local_disk_size": 1.0}
        )
        layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=8192)
        tokens = list(range(4 * layout.chunk_tokens))
        computed = [np.full(layout.chunk_bytes, number, np.uint8) for number in range(4)]

        async with tiercache.TierCache.open(config, layout) as cache:
            await cache.store(tokens, computed)
            print("stored:   ", await cache.lookup(tokens))
            print("flushed:  ", await cache.flush())

        async with tiercache.TierCache.open(config, layout) as cache:
            longer = [*tokens, 1, 2, 3]
            print("reopened: ", await cache.lookup(longer))
            buffers = [np.empty(layout.chunk_bytes, np.uint8) for _ in computed]
            loaded = await cache.load(longer, buffers)
            same = all(np.array_equal(*pair) for pair in zip(buffers, computed, strict=True))
            print(f"loaded:    {loaded} tokens, same bytes: {same}")
            async with cache.get(cache.keys(tokens)[0]) as lease:
                assert lease is not None
                print(f"zero-copy: {lease.view.nbytes} bytes, first is {lease.view[0]}")


if __name__ == "__main__":
    with ended_by_signals():
        asyncio.run(main())
