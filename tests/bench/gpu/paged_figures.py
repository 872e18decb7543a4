"""Paged copies: right for every layout, and as fast as one large copy of the same bytes from and to pinned memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.report import Report
from tiercache.bench.workload import config_of, new_keys
from tiercache.cache import TierCache
from tiercache.core.layout import Layout
from tiercache.device.paged import PagedChunk, PagedKv

BLOCK_TOKENS = 16
_SLOTS = 4
_LAYOUTS: dict[str, Callable[[int, int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    # Shape in memory, and the order of its dimensions as (layers, blocks, heads, tokens, content).
    "LBNHC": lambda layers, blocks, heads, head: ((layers, blocks, BLOCK_TOKENS, heads, 2 * head), (0, 1, 3, 2, 4)),
    "LBHNC": lambda layers, blocks, heads, head: ((layers, blocks, heads, BLOCK_TOKENS, 2 * head), (0, 1, 2, 3, 4)),
    "LHBNC": lambda layers, blocks, heads, head: ((layers, heads, blocks, BLOCK_TOKENS, 2 * head), (0, 2, 1, 3, 4)),
    "BLHNC": lambda layers, blocks, heads, head: ((blocks, layers, heads, BLOCK_TOKENS, 2 * head), (1, 0, 2, 3, 4)),
    "BLNHC": lambda layers, blocks, heads, head: ((blocks, layers, BLOCK_TOKENS, heads, 2 * head), (1, 0, 3, 2, 4)),
    "BHLNC": lambda layers, blocks, heads, head: ((blocks, heads, layers, BLOCK_TOKENS, 2 * head), (2, 0, 1, 3, 4)),
    "MLA": lambda layers, blocks, heads, head: ((layers, blocks, 1, BLOCK_TOKENS, 576), (0, 1, 2, 3, 4)),
}


def measure_paged(report: Report, accelerator: Accelerator) -> None:
    """`paged.LAYOUT.offload_gbps`, `.load_gbps`: chunks of 256 tokens of 32 layers (Llama-3.1-8B's shape; MLA: 576 wide),
    from scattered blocks through four slots of device memory to pinned memory and back, on one stream; from an idle device
    until the last byte is there, enqueueing included. Beside them `ceiling`: one copy of the same bytes.
    `cache`: the same through `put_many` and `get_into`.
    """
    import torch

    with report.step("paged: gathered and scattered bytes are right"):
        for name in _LAYOUTS:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
                for count in (3, 63):
                    _check(report, accelerator, name, dtype, count)
    for name in ("LBNHC", "BLNHC", "MLA"):
        with report.step(f"paged copies: {name}"):
            _measure(report, accelerator, name)
    with report.step("paged copies through the cache"):
        asyncio.run(_measure_cache(report, accelerator))


def make_layers(accelerator: Accelerator, name: str, layers: int, blocks: int, heads: int, head: int, dtype: Any) -> Any:
    """Return random KV as the engine sees it: (layers, blocks, heads, tokens, content)."""
    shape, order = _LAYOUTS[name](layers, blocks, heads, head)
    return accelerator.random(shape, dtype, seed=1).permute(order)


def _check(report: Report, accelerator: Accelerator, name: str, dtype: Any, count: int) -> None:
    import torch

    layers = make_layers(accelerator, name, 3, 3 * count, 4, 64, dtype)
    kv = PagedKv(accelerator.driver, list(layers))
    old, new = np.random.default_rng(count).permutation(3 * count)[: 2 * count].reshape(2, count).tolist()
    stream = accelerator.driver.make_stream()
    expected = layers.view(torch.uint8)[:, old].clone()
    chunk = accelerator.driver.empty(count * kv.block_bytes)
    accelerator.synchronize()
    kv.gather(old, chunk, stream)
    kv.scatter(chunk, count, 0, new, stream)
    accelerator.synchronize()
    right = torch.equal(layers.view(torch.uint8)[:, new], expected)
    report.check("paged: gathered and scattered bytes are right", right, f"failed: {name} {dtype} {count}")


@dataclass
class _Run:
    """Chunks of one KV cache, each in scattered blocks, and pinned memory for all of them."""

    accelerator: Accelerator
    kv: PagedKv
    blocks: list[list[int]]

    def __post_init__(self) -> None:
        import torch

        driver = self.accelerator.driver
        self.chunk_bytes = len(self.blocks[0]) * self.kv.block_bytes
        self.total_bytes = self.chunk_bytes * len(self.blocks)
        self.host = self.accelerator.pinned(self.total_bytes)
        self.packed = self.accelerator.random((self.total_bytes,), torch.uint8, seed=3)
        self.slots = [driver.empty(self.chunk_bytes) for _ in range(_SLOTS)]
        self.stream = driver.make_stream()

    def offload(self) -> None:
        for number, blocks in enumerate(self.blocks):
            slot = self.slots[number % _SLOTS]
            self.kv.gather(blocks, slot, self.stream)
            self.accelerator.driver.copy(self._host(number), slot, self.stream)

    def load(self) -> None:
        for number, blocks in enumerate(self.blocks):
            slot = self.slots[number % _SLOTS]
            self.accelerator.driver.copy(slot, self._host(number), self.stream)
            self.kv.scatter(slot, len(blocks), 0, blocks, self.stream)

    def ceiling_d2h(self) -> None:
        self.accelerator.driver.copy(self.host, self.packed, self.stream)

    def ceiling_h2d(self) -> None:
        self.accelerator.driver.copy(self.packed, self.host, self.stream)

    def _host(self, number: int) -> Any:
        return self.host[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]


def _make_run(report: Report, accelerator: Accelerator, name: str) -> _Run:
    """A KV cache of random values whose chunks' blocks are in a random order."""
    import torch

    amount = report.amount
    per_chunk, chunks, layers = amount.of(16, 16, 4), amount.of(32, 8, 4), amount.of(32, 32, 2)
    heads, head = (2, 16) if amount.cpu else (8, 128)
    tensors = make_layers(accelerator, name, layers, chunks * per_chunk, heads, head, torch.bfloat16)
    order = np.random.default_rng(5).permutation(chunks * per_chunk).reshape(chunks, per_chunk)
    kv = PagedKv(accelerator.driver, list(tensors))
    kv.warm_up()
    return _Run(accelerator, kv, order.tolist())


def _measure(report: Report, accelerator: Accelerator, name: str) -> None:
    run, ours = _make_run(report, accelerator, name), f"paged.{name}"
    measurements: list[tuple[str, Callable[[], None]]] = [
        (f"{ours}.offload_gbps", run.offload),
        (f"{ours}.ceiling_d2h_gbps", run.ceiling_d2h),
        (f"{ours}.load_gbps", run.load),
        (f"{ours}.ceiling_h2d_gbps", run.ceiling_h2d),
    ]
    report.figures.compare(f"{ours}.offload_gbps", f"{ours}.ceiling_d2h_gbps")
    report.figures.compare(f"{ours}.load_gbps", f"{ours}.ceiling_h2d_gbps")
    for _, measure in measurements:
        measure()
    for pair in range(report.amount.pairs):
        for figure, measure in measurements if pair % 2 == 0 else measurements[::-1]:
            report.figures.add(figure, run.total_bytes / accelerator.seconds(measure) / 1e9)


async def _measure_cache(report: Report, accelerator: Accelerator) -> None:
    run = _make_run(report, accelerator, "LBNHC")
    tokens = len(run.blocks[0]) * BLOCK_TOKENS
    layout = Layout("bench", chunk_tokens=tokens, bytes_per_token=run.chunk_bytes // tokens)
    chunks = [PagedChunk(run.kv, each) for each in run.blocks]
    config = config_of(3 * run.total_bytes + (64 << 20))
    report.figures.compare("cache.offload_gbps", "cache.ceiling_d2h_gbps")
    report.figures.compare("cache.load_gbps", "cache.ceiling_h2d_gbps")
    async with TierCache.open(config, layout, device=accelerator.driver) as cache:
        stored: list[bytes] = []

        async def offload() -> None:
            stored[:] = new_keys(len(chunks))
            assert await cache.put_many(stored, chunks) == len(chunks)

        async def load() -> None:
            assert await cache.get_into(stored, chunks) == len(chunks)

        async def plain(copy: Callable[[], None]) -> None:
            copy()

        measurements = [
            ("cache.offload_gbps", offload),
            ("cache.ceiling_d2h_gbps", lambda: plain(run.ceiling_d2h)),
            ("cache.load_gbps", load),
            ("cache.ceiling_h2d_gbps", lambda: plain(run.ceiling_h2d)),
        ]
        await offload()
        before = [tensor.clone() for tensor in run.kv.tensors]
        for tensor in run.kv.tensors:
            tensor.zero_()
        await load()
        accelerator.synchronize()
        same = all((tensor == old).all() for tensor, old in zip(run.kv.tensors, before, strict=True))
        report.check("paged: through the cache and back", bool(same))
        allocations = _device_allocations(accelerator)
        for pair in range(report.amount.pairs):
            # `load` needs what `offload` stored last.
            for figure, measure in measurements if pair % 2 == 0 else [*measurements[1::-1], *measurements[:1:-1]]:
                accelerator.synchronize()
                began = time.perf_counter()
                await measure()
                accelerator.synchronize()
                took = time.perf_counter() - began
                report.figures.add(figure, run.total_bytes / took / 1e9)
        more = _device_allocations(accelerator) - allocations
        report.check("paged: no device memory is allocated in steady state", more == 0, f"{more} allocations")


def _device_allocations(accelerator: Accelerator) -> int:
    import torch

    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if accelerator.is_gpu else 0
