"""A real forward pass over KV that went through the cache: the same logits, the time to the first token, and what offloading
beside it costs."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.engine import Engine
from tests.bench.gpu.model import LLAMA_31_8B, TINY
from tests.bench.gpu.report import Report
from tiercache.bench.workload import config_of, new_keys
from tiercache.bridge import CacheThread
from tiercache.cache import TierCache

MIB = 1 << 20
_TTFT_TOKENS = 15_376


def _engine(report: Report, accelerator: Accelerator, full: int, quick: int) -> Engine:
    amount = report.amount
    shape = TINY if amount.cpu else LLAMA_31_8B
    return Engine(accelerator, shape, amount.of(full, quick, 177), amount.of(256, 256, 32))


def check_model(report: Report, accelerator: Accelerator) -> None:
    """KV goes out through the cache and comes back into other blocks of other tensors; the last tokens of the prompt and one
    decoded token are computed on both. The same bytes through the same kernels give the same logits, bit by bit."""
    with report.step("the same logits from reloaded KV"):
        asyncio.run(_check_model(report, _engine(report, accelerator, 2100, 1100)))


async def _check_model(report: Report, engine: Engine) -> None:
    import torch

    amount = report.amount
    directory = report.directory / "model"
    config = config_of(
        2 * engine.cached_bytes + 64 * MIB,
        directory / "disk",
        4 * engine.cached_bytes + 64 * MIB,
        gds_path=(str(directory / "gds"),),
        gds_buffer_size=_pool_mib(engine),
        max_gds_size=(4 * engine.cached_bytes + 64 * MIB) / 2**30,
        use_gds=False,
    )
    engine.prefill()
    expected = engine.rest(engine.before, engine.old_blocks)
    next_token = expected.argmax()[None]
    then = engine.model.forward(next_token, engine.prompt_tokens, engine.before, engine.old_blocks)
    assert bool(torch.isfinite(expected).all()) and float(expected.std()) > 0.01, "logits are no numbers"
    async with TierCache.open(config, engine.layout, device=engine.accelerator.driver) as cache:
        keys = engine.keys(cache)
        assert await cache.put_many(keys, engine.chunks_of(engine.stored, engine.old_blocks)) == engine.chunks
        await cache.flush()
        for tier in ("cpu", "disk or GDS"):
            if tier != "cpu":
                cache.clear_hot()
            for tensor in engine.after.layers:
                tensor.zero_()
            chunks = engine.chunks_of(engine.loaded, engine.new_blocks)
            assert await cache.get_into(keys, chunks) == engine.chunks
            same = engine.same_kv() and torch.equal(engine.rest(engine.after, engine.new_blocks), expected)
            decoded = engine.model.forward(next_token, engine.prompt_tokens, engine.after, engine.new_blocks)
            report.check("model: KV and logits are the same", same and torch.equal(decoded, then), f"failed from {tier}")
        # Another block in the place of one; two that change places would not do, attention does not see their order.
        wrong_blocks = engine.new_blocks.clone()
        wrong_blocks[0] = wrong_blocks[1]
        wrong = engine.rest(engine.after, wrong_blocks)
        report.check("model: a wrong block changes the logits", not torch.equal(wrong, expected))
    report.facts |= {"model": vars(engine.shape), "prompt_tokens": engine.prompt_tokens, "pairs": amount.pairs}


def measure_ttft(report: Report, accelerator: Accelerator) -> None:
    """`ttft.cold_s`: prefill of the whole prompt. `ttft.TIER_s`: all full chunks from that tier into other blocks, and the
    forward pass of the remaining tokens. Until the logits are on the host. `ttft.floor_s`: one pinned copy of the same bytes
    and the same forward pass, which nothing can beat. `disk` and `gds` lie in the benchmark's directory, `memory` is the
    disk tier over /dev/shm, which shows what is left when storage costs nothing."""
    with report.step("time to the first token"):
        asyncio.run(_measure_ttft(report, _engine(report, accelerator, _TTFT_TOKENS, 4112)))


async def _measure_ttft(report: Report, engine: Engine) -> None:
    import torch

    accelerator, driver = engine.accelerator, engine.accelerator.driver
    total = engine.cached_bytes
    room = total + total // 4 + 64 * MIB
    host = accelerator.pinned(total)
    place = accelerator.empty((total,), torch.uint8)
    stream = driver.make_stream()
    chunks = engine.chunks_of(engine.loaded, engine.new_blocks)
    engine.prefill()
    expected = engine.rest(engine.before, engine.old_blocks).cpu()
    places = _places(report, room)
    for name in ("floor", "cpu", *places, "gds"):
        report.figures.compare("ttft.cold_s", f"ttft.{name}_s")
    report.figures.compare("ttft.cpu_s", "ttft.floor_s")
    report.facts |= {"model": vars(engine.shape), "prompt_tokens": engine.prompt_tokens, "loaded_bytes": total}
    async with _caches(engine, places, room) as caches:

        async def cold() -> None:
            engine.prefill().argmax().item()

        async def floor() -> None:
            driver.copy(place, host, stream)
            driver.finish(stream)
            engine.rest(engine.after, engine.new_blocks).argmax().item()

        def warm(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
            async def run() -> None:
                cache = caches["disk" if name == "cpu" else name]
                delivered = await cache.get_into(engine.keys(cache), chunks, deadline_s=60)
                assert delivered == engine.chunks, f"{name}: {delivered} of {engine.chunks} chunks"
                logits = engine.rest(engine.after, engine.new_blocks).cpu()
                report.check("ttft: the same logits from every tier", torch.equal(logits, expected), f"failed from {name}")

            return run

        measurements = {"cold": cold, "floor": floor} | {name: warm(name) for name in ("cpu", *caches)}
        for repetition in range(report.amount.pairs + 1):
            for name in measurements if repetition % 2 == 0 else reversed(measurements):
                cache = caches.get("disk" if name == "cpu" else name)
                if cache is not None and name == "cpu":
                    await cache.get_into(engine.keys(cache), chunks, deadline_s=60)  # makes them hot
                elif cache is not None:
                    cache.clear_hot()
                for tensor in engine.after.layers if name not in ("floor", "cold") else ():
                    tensor.zero_()
                accelerator.synchronize()
                began = time.perf_counter()
                try:
                    await measurements[name]()
                except AssertionError as error:
                    report.check("ttft: the same logits from every tier", False, str(error))
                    continue
                accelerator.synchronize()
                if repetition:  # the first one warms up
                    report.figures.add(f"ttft.{name}_s", time.perf_counter() - began)
            report.save()


def _places(report: Report, room: int) -> dict[str, Path]:
    places = {"disk": report.directory / "ttft"}
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * room:
        places["memory"] = memory / f"tiercache-{report.directory.parent.name}"
    return places


@asynccontextmanager
async def _caches(engine: Engine, places: dict[str, Path], room: int) -> AsyncIterator[dict[str, TierCache]]:
    """`disk` (hot cache before it), the same over memory, and `gds` without a hot cache; each holds the prompt."""
    driver = engine.accelerator.driver
    caches = {
        name: TierCache(config_of(room, path, 2 * room), engine.layout, device=driver) for name, path in places.items()
    }
    gds = config_of(
        256 * MIB,
        gds_path=(str(places["disk"] / "gds"),),
        gds_buffer_size=_pool_mib(engine),
        max_gds_size=2 * room / 2**30,
        local_cpu=False,
        queue_wait_s=60.0,
    )
    caches["gds"] = TierCache(gds, engine.layout, device=driver)
    started = []
    try:
        for cache in caches.values():
            await cache.start()
            started.append(cache)
            stored = await cache.put_many(
                engine.keys(cache), engine.chunks_of(engine.stored, engine.old_blocks), deadline_s=60
            )
            assert stored == engine.chunks, f"{stored} of {engine.chunks} chunks stored"
            await cache.flush(60)
        yield caches
    finally:
        for cache in started:
            await cache.close()
        for path in places.values():
            shutil.rmtree(path, ignore_errors=True)


def measure_overlap(report: Report, accelerator: Accelerator) -> None:
    """`overlap.slowdown_percent`: forward passes over the prompt, each while the KV of the pass before is put into the
    cache from a thread with a loop of its own, as an engine's connector does, beside passes without."""
    with report.step("offload beside a forward pass"):
        _measure_overlap(report, _engine(report, accelerator, 4112, 2064))


def _measure_overlap(report: Report, engine: Engine) -> None:
    accelerator, driver = engine.accelerator, engine.accelerator.driver
    chunks = engine.chunks_of(engine.loaded, engine.new_blocks)
    engine.prefill()
    for after, before in zip(engine.after.layers, engine.before.layers, strict=True):
        after.copy_(before)  # what is moved is not zeroes
    passes = report.amount.of(4, 2, 2)
    config = config_of(3 * engine.cached_bytes + 64 * MIB)
    with closing(CacheThread(config, engine.layout, device=driver)) as thread:

        async def offload_after(after: Any) -> None:
            stored = await thread.cache.put_many(new_keys(len(chunks)), chunks, after=after, deadline_s=60)
            assert stored == len(chunks), f"{stored} of {len(chunks)} chunks stored"

        def forward(offload: bool) -> None:
            for _ in range(passes):
                # What was enqueued by now is what the copies wait for, and not the pass that comes next.
                after = driver.record(driver.current_stream())
                put = thread.submit(offload_after(after)) if offload else None
                engine.prefill()
                accelerator.synchronize()
                if put is not None:
                    put.result(60)

        forward(True)
        forward(False)
        for pair in range(2 * report.amount.pairs):
            alone = accelerator.seconds(lambda: forward(False)) if pair % 2 == 0 else 0.0
            beside = accelerator.seconds(lambda: forward(True))
            alone = alone or accelerator.seconds(lambda: forward(False))
            report.figures.add("overlap.alone_s", alone / passes)
            report.figures.add("overlap.beside_s", beside / passes)
            report.figures.add("overlap.slowdown_percent", 100 * (beside / alone - 1))
            report.save()
    report.facts |= {"model": vars(engine.shape), "prompt_tokens": engine.prompt_tokens}
    report.facts["offloaded_bytes_per_pass"] = engine.cached_bytes
    report.facts["noise_percent"] = _spread(report.figures.samples["overlap.alone_s"])


def _spread(samples: list[float]) -> float:
    middle = statistics.median(samples)
    return 100 * statistics.median(abs(sample - middle) for sample in samples) / middle


def _pool_mib(engine: Engine) -> int:
    """Sixteen slots."""
    return -(-16 * (engine.layout.chunk_bytes + 8192) // MIB)
