"""How long after the device's work ended the coroutine that awaits it goes on, what waiting costs, and whether it disturbs
an engine that captures a CUDA graph meanwhile."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.report import Report
from tiercache.device.device import Lane
from tiercache.device.paged import PagedKv

_CYCLES = 4_000_000
"""Of a GPU's clock: about two milliseconds."""
_CAPTURED = 20_000


def measure_events(report: Report, accelerator: Accelerator) -> None:
    """`events.LOOP.p50_us`, `.p99_us`: from when the event is seen to have happened until the coroutine goes on, and
    `events.LOOP.cpu_us`: the processor time of this whole process for one wait of two milliseconds."""
    for loop_name, factory in _loops().items():
        with report.step(f"events: {loop_name}"), asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_measure(report, accelerator, f"events.{loop_name}"))
    if accelerator.is_gpu:
        with report.step("events: a graph is captured meanwhile"):
            _capture(report, accelerator)


def _loops() -> dict[str, Callable[[], Any] | None]:
    loops: dict[str, Callable[[], Any] | None] = {"asyncio": None}
    try:
        import uvloop
    except ImportError:
        return loops
    return loops | {"uvloop": uvloop.new_event_loop}


async def _measure(report: Report, accelerator: Accelerator, name: str) -> None:
    driver, lane = accelerator.driver, Lane(accelerator.driver, "bench")
    late_s: list[float] = []
    rounds = report.amount.of(300, 150, 20)

    def work() -> None:
        import torch

        if accelerator.is_gpu:
            torch.cuda._sleep(_CYCLES)

    for _ in range(rounds):
        driver.enqueue(lane.stream, work)
        event = driver.record(lane.stream)
        end = lane.end()
        while not driver.query(event):
            await asyncio.sleep(0)
        seen_s = time.perf_counter()
        await end
        late_s.append(time.perf_counter() - seen_s)
    used_s = time.process_time()
    for _ in range(rounds):
        driver.enqueue(lane.stream, work)
        event = driver.record(lane.stream)
        await lane.end()
        report.check("events: nobody goes on before the end", driver.query(event))
    report.figures.add(f"{name}.cpu_us", (time.process_time() - used_s) / rounds * 1e6)
    late_s.sort()
    report.figures.add(f"{name}.p50_us", late_s[len(late_s) // 2] * 1e6)
    report.figures.add(f"{name}.p99_us", late_s[math.ceil(len(late_s) * 0.99) - 1] * 1e6)
    lane.close()


def _capture(report: Report, accelerator: Accelerator) -> None:
    """A thread of a cache's kind gathers and waits while this one captures in "global" mode, as vLLM does."""
    import torch

    driver = accelerator.driver
    kv = PagedKv(driver, [accelerator.random((64, 8, 16, 256), torch.bfloat16, seed=1)])
    kv.warm_up()
    chunk, host = driver.empty(16 * kv.block_bytes), accelerator.pinned(16 * kv.block_bytes)
    stop, rounds, trouble = threading.Event(), [0], []

    async def busy() -> None:
        lane = Lane(driver, "bench")
        while not stop.is_set():
            kv.gather(range(16), chunk, lane.stream)
            driver.copy(host, chunk, lane.stream)
            await lane.end()
            rounds[0] += 1
        lane.close()

    def run() -> None:
        try:
            asyncio.run(busy())
        except Exception as error:
            trouble.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    values, graph = torch.ones(1 << 20, device=accelerator.torch_device), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            before = rounds[0]
            for _ in range(_CAPTURED):
                values.add_(1)
            time.sleep(0.5)
            during = rounds[0] - before
        graph.replay()
        torch.cuda.synchronize()
        right = values[0].item() == _CAPTURED + 1
    finally:
        stop.set()
        thread.join()
    found = f"{during} rounds, replay {'right' if right else 'wrong'}, {trouble or 'no error'}"
    report.check("capture: copies and waits go on, and the graph is right", right and during > 0 and not trouble, found)
