"""Paged copies: right for every layout, and as fast as one large copy of the same bytes from and to pinned memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercache.bench.gpu.accelerator import Accelerator, span_of
from tiercache.bench.gpu.report import Report
from tiercache.bench.workload import config_of, new_keys
from tiercache.cache import TierCache
from tiercache.core.layout import Layout
from tiercache.device.driver import Event
from tiercache.device.paged import PagedKv
from tiercache.device.payloads import PagedChunk
from tiercache.testing.paged import gather_reference, scatter_reference

BLOCK_TOKENS = 16
_SLOTS = 4
_SHAPES: dict[str, tuple[str, Callable[[int, int, int], tuple[int, ...]]]] = {
    "NHD": ("NHD", lambda blocks, heads, head: (2, blocks, BLOCK_TOKENS, heads, head)),
    "NHD blocks first": ("NHD", lambda blocks, heads, head: (blocks, 2, BLOCK_TOKENS, heads, head)),
    "HND": ("HND", lambda blocks, heads, head: (2, blocks, heads, BLOCK_TOKENS, head)),
    "HND blocks first": ("HND", lambda blocks, heads, head: (blocks, 2, heads, BLOCK_TOKENS, head)),
    "MLA": ("MLA", lambda blocks, heads, head: (blocks, BLOCK_TOKENS, heads * head + 64)),
}


def measure_paged(report: Report, accelerator: Accelerator) -> None:
    """`paged.LAYOUT.offload_gbps`, `.load_gbps`: chunks of 256 tokens of 32 layers (Llama-3.1-8B's shape; MLA: 576 wide),
    from scattered blocks through four slots of device memory to pinned memory and back, gathers and copies side by side;
    from an idle device until the last byte is there, enqueueing included. Beside them `ceiling`: one copy of the same bytes.
    `paged.NHD.copies`: the same without kernels. `cache`: the same through `put_many` and `get_into`.
    """
    import torch

    for name in _SHAPES:
        with report.step(f"paged copies are right: {name}"):
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
                for tokens, blocks in ((64, 4), (37, 3), (report.amount.of(1000, 1000, 100), 63)):
                    _check(report, accelerator, name, dtype, tokens, blocks)
    for name, kernel in (("NHD", True), ("HND", True), ("MLA", True), ("NHD", False)):
        with report.step(f"paged copies: {name}{'' if kernel else ', without kernels'}"):
            _measure(report, accelerator, name, kernel)
    with report.step("paged copies through the cache"):
        asyncio.run(_measure_cache(report, accelerator))


def _check(report: Report, accelerator: Accelerator, name: str, dtype: Any, tokens: int, count: int) -> None:
    import torch

    layout, shape = _SHAPES[name]
    driver = accelerator.driver
    layers = [accelerator.random(shape(3 * count, 4, 64), dtype, seed=layer) for layer in range(3)]
    kv = PagedKv(driver, layers, layout)
    blocks = np.random.default_rng(count).permutation(3 * count)[:count].tolist()
    stream = driver.make_stream()
    for kernel in (True, False):
        chunk = accelerator.random((tokens * kv.bytes_per_token,), torch.uint8, seed=7)
        accelerator.synchronize()
        kv.gather(blocks, 0, tokens, span_of(chunk), stream, kernel=kernel)
        accelerator.synchronize()
        expected = gather_reference(kv, blocks, 0, tokens)
        report.check(f"{name}: gather", torch.equal(chunk, _bytes(expected)))

        before = [layer.clone() for layer in layers]
        fresh = accelerator.random(tuple(expected.shape), dtype, seed=8)
        scatter_reference(kv, fresh, 0, blocks, 0, tokens)
        wanted = [_bytes(layer).clone() for layer in layers]
        for layer, old in zip(layers, before, strict=True):
            layer.copy_(old)
        accelerator.synchronize()
        kv.scatter(span_of(fresh), tokens, 0, blocks, 0, tokens, stream, kernel=kernel)
        accelerator.synchronize()
        same = all(torch.equal(_bytes(layer), right) for layer, right in zip(layers, wanted, strict=True))
        report.check(f"{name}: scatter", same)
    kv.close()


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class _Run:
    """Chunks of one KV cache, each in scattered blocks, and pinned memory for all of them."""

    accelerator: Accelerator
    kv: PagedKv
    blocks: list[list[int]]
    chunk_tokens: int

    def __post_init__(self) -> None:
        import torch

        driver = self.accelerator.driver
        self.chunk_bytes = self.chunk_tokens * self.kv.bytes_per_token
        self.total_bytes = self.chunk_bytes * len(self.blocks)
        self.host = self.accelerator.pinned(self.total_bytes)
        self.packed = self.accelerator.random((self.total_bytes,), torch.uint8, seed=3)
        self.slots = [self.accelerator.empty((self.chunk_bytes,), torch.uint8) for _ in range(_SLOTS)]
        self.gathering, self.copying = driver.make_stream(), driver.make_stream()

    def offload(self, kernel: bool) -> None:
        driver, events = self.accelerator.driver, _Events(self.accelerator)
        free: list[Event] = []
        for number, blocks in enumerate(self.blocks):
            slot = span_of(self.slots[number % _SLOTS])
            if number >= _SLOTS:
                driver.wait(self.gathering, free[number - _SLOTS])
            self.kv.gather(blocks, 0, self.chunk_tokens, slot, self.gathering, kernel=kernel)
            driver.wait(self.copying, events.record(self.gathering))
            driver.copy(self._host(number), slot.address, self.chunk_bytes, self.copying)
            free.append(events.record(self.copying))
        events.finish()

    def load(self, kernel: bool) -> None:
        driver, events = self.accelerator.driver, _Events(self.accelerator)
        free: list[Event] = []
        for number, blocks in enumerate(self.blocks):
            slot = span_of(self.slots[number % _SLOTS])
            if number >= _SLOTS:
                driver.wait(self.copying, free[number - _SLOTS])
            driver.copy(slot.address, self._host(number), self.chunk_bytes, self.copying)
            driver.wait(self.gathering, events.record(self.copying))
            self.kv.scatter(slot, self.chunk_tokens, 0, blocks, 0, self.chunk_tokens, self.gathering, kernel=kernel)
            free.append(events.record(self.gathering))
        events.finish()

    def ceiling_d2h(self) -> None:
        self._plain(self.host.ctypes.data, self.packed.data_ptr())

    def ceiling_h2d(self) -> None:
        self._plain(self.packed.data_ptr(), self.host.ctypes.data)

    def is_right(self, number: int) -> bool:
        import torch

        expected = _bytes(gather_reference(self.kv, self.blocks[number], 0, self.chunk_tokens)).cpu()
        start = number * self.chunk_bytes
        return bool(torch.equal(torch.from_numpy(self.host[start : start + self.chunk_bytes]), expected))

    def _host(self, number: int) -> int:
        return int(self.host.ctypes.data) + number * self.chunk_bytes

    def _plain(self, destination: int, source: int) -> None:
        events = _Events(self.accelerator)
        self.accelerator.driver.copy(destination, source, self.total_bytes, self.copying)
        events.record(self.copying)
        events.finish()


class _Events:
    """Given back when the last of them has happened."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._driver = accelerator.driver
        self._all: list[Event] = []

    def record(self, stream: Any) -> Event:
        self._all.append(self._driver.record(stream))
        return self._all[-1]

    def finish(self) -> None:
        self._driver.synchronize(self._all[-1])
        for event in self._all:
            self._driver.release(event)


def make_kv(report: Report, accelerator: Accelerator, name: str) -> tuple[PagedKv, list[list[int]], int]:
    """A KV cache of random values, its chunks' blocks in a random order, and the tokens of a chunk."""
    import torch

    amount = report.amount
    layout, shape = _SHAPES[name]
    chunk_tokens = amount.of(256, 256, 64)
    per_chunk = chunk_tokens // BLOCK_TOKENS
    chunks = amount.of(32, 8, 4)
    heads, head = (8, 128) if layout != "MLA" else (4, 128)
    if amount.twin:
        heads, head = 2, 16
    layers = amount.of(32, 32, 2)
    tensors = [
        accelerator.random(shape(chunks * per_chunk, heads, head), torch.bfloat16, seed=n) for n in range(layers)
    ]
    order = np.random.default_rng(5).permutation(chunks * per_chunk).reshape(chunks, per_chunk)
    return PagedKv(accelerator.driver, tensors, layout), order.tolist(), chunk_tokens


def _measure(report: Report, accelerator: Accelerator, name: str, kernel: bool) -> None:
    kv, blocks, chunk_tokens = make_kv(report, accelerator, name)
    run = _Run(accelerator, kv, blocks, chunk_tokens)
    ours = f"paged.{name}" if kernel else f"paged.{name}.copies"
    measurements: list[tuple[str, Callable[[], None]]] = [
        (f"{ours}.offload_gbps", lambda: run.offload(kernel)),
        (f"{ours}.ceiling_d2h_gbps", run.ceiling_d2h),
        (f"{ours}.load_gbps", lambda: run.load(kernel)),
        (f"{ours}.ceiling_h2d_gbps", run.ceiling_h2d),
    ]
    report.figures.compare(f"{ours}.offload_gbps", f"{ours}.ceiling_d2h_gbps")
    report.figures.compare(f"{ours}.load_gbps", f"{ours}.ceiling_h2d_gbps")
    for _, measure in measurements:
        measure()
    run.offload(kernel)
    accelerator.synchronize()
    report.check(f"{name}: offloaded", all(run.is_right(number) for number in range(len(blocks))))
    for tensor in kv.tensors:
        tensor.zero_()
    accelerator.synchronize()
    run.load(kernel)
    report.check(f"{name}: loaded", all(run.is_right(number) for number in range(len(blocks))))
    for pair in range(report.amount.pairs):
        for figure, measure in measurements if pair % 2 == 0 else measurements[::-1]:
            report.figures.add(figure, run.total_bytes / accelerator.seconds(measure) / 1e9)
    kv.close()


async def _measure_cache(report: Report, accelerator: Accelerator) -> None:
    kv, blocks, chunk_tokens = make_kv(report, accelerator, "NHD")
    run = _Run(accelerator, kv, blocks, chunk_tokens)
    layout = Layout("bench", chunk_tokens=chunk_tokens, bytes_per_token=kv.bytes_per_token)
    chunks = [PagedChunk(kv, each) for each in blocks]
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
        for _ in range(2):
            for _, measure in measurements:
                await measure()
        before = [tensor.clone() for tensor in kv.tensors]
        await offload()
        for tensor in kv.tensors:
            tensor.zero_()
        await load()
        accelerator.synchronize()
        same = all((tensor == old).all() for tensor, old in zip(kv.tensors, before, strict=True))
        report.check("through the cache and back", bool(same))
        for pair in range(report.amount.pairs):
            # `load` needs what `offload` stored last.
            for figure, measure in measurements if pair % 2 == 0 else [*measurements[1::-1], *measurements[:1:-1]]:
                accelerator.synchronize()
                began = asyncio.get_running_loop().time()
                await measure()
                accelerator.synchronize()
                took = asyncio.get_running_loop().time() - began
                report.figures.add(figure, run.total_bytes / took / 1e9)
    kv.close()
