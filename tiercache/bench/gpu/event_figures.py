"""How long after the device's work ended the coroutine that awaits it goes on, and what waiting costs.

The end is written by the work itself: a kernel that spins for a given time and then stores the GPU's nanosecond clock in
pinned memory. Both clocks are compared before and after each measurement (`Accelerator.clock`; `clock_error_us` is what
remains). So the latency holds everything: the kernel's own end, the driver, the wake-up of the loop, and other coroutines
that go first.

So many are pending all the time: whoever goes on enqueues the next work on its stream and waits again. One of four streams
gets to an end every half a millisecond, which keeps the loop idle for most of the time, as a server's is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tiercache.bench.gpu.accelerator import Accelerator
from tiercache.bench.gpu.report import Report
from tiercache.device.driver import Stream
from tiercache.device.events import EventBridge

_STREAMS = 4
_BETWEEN_ENDS_S = 0.0005


def measure_events(report: Report, accelerator: Accelerator) -> None:
    """`events.LOOP.callback.PENDING.p50_us`, `.p99_us`, and `events.LOOP.callback.idle_cpu_percent`: the processor time of
    this whole process while 64 are pending and nothing ends, as a part of one core."""
    streams = [accelerator.driver.make_stream() for _ in range(_STREAMS)]
    for loop_name, factory in _loops().items():
        for _ in range(report.amount.of(2, 1, 1)):
            with report.step(f"events: {loop_name}"), asyncio.Runner(loop_factory=factory) as runner:
                runner.run(_measure(report, accelerator, streams, f"events.{loop_name}.callback"))


def _loops() -> dict[str, Callable[[], Any] | None]:
    loops: dict[str, Callable[[], Any] | None] = {"asyncio": None}
    try:
        import uvloop
    except ImportError:
        return loops
    return loops | {"uvloop": uvloop.new_event_loop}


async def _measure(report: Report, accelerator: Accelerator, streams: list[Stream], name: str) -> None:
    bridge = EventBridge(accelerator.driver)
    try:
        for pending in (1, 64, 1024):
            samples = report.amount.of(600, 300, 30)
            latencies, error_us = await _latencies(accelerator, bridge, streams, pending, samples)
            found = sorted(latencies)
            report.figures.add(f"{name}.{pending}.p50_us", found[len(found) // 2])
            report.figures.add(f"{name}.{pending}.p99_us", found[math.ceil(len(found) * 0.99) - 1])
            report.facts["clock_error_us"] = max(report.facts.get("clock_error_us", 0.0), error_us)
            report.check("events: nobody goes on before the end", found[0] > -error_us)
        cpu = await _idle(accelerator, bridge, streams, report.amount.of(1, 1, 0) or 0.2)
        report.figures.add(f"{name}.idle_cpu_percent", cpu)
        report.check("events: nothing is left pending", bridge.pending == 0)
    finally:
        bridge.close()


async def _latencies(
    accelerator: Accelerator, bridge: EventBridge, streams: list[Stream], pending: int, samples: int
) -> tuple[list[float], float]:
    """In microseconds, and by how much they may all be wrong. Enqueueing the first of them keeps the loop busy; what ends
    then is not counted, nor what ends when fewer and fewer are left."""
    streams = streams[: min(len(streams), pending)]
    settling = 16 + pending // 8
    last = settling + samples + pending
    stamps = accelerator.pinned((last + pending) * 8).view(np.int64)
    duration_s = _BETWEEN_ENDS_S * len(streams)
    before = accelerator.clock()
    found: list[tuple[int, int]] = []
    begun = 0

    async def wait(stream: Stream) -> None:
        nonlocal begun
        while begun < last:
            position, begun = begun, begun + 1
            accelerator.work(stream, duration_s if begun > len(streams) else begun * _BETWEEN_ENDS_S, stamps, position)
            await bridge.after(stream)
            found.append((position, time.perf_counter_ns()))

    await asyncio.gather(*(wait(streams[number % len(streams)]) for number in range(pending)))
    counted = found[settling : settling + samples]
    after = accelerator.clock()
    latencies = [(went_on - before.to_host(int(stamps[position]), after)) / 1e3 for position, went_on in counted]
    return latencies, (before.error_ns + after.error_ns) / 1e3


async def _idle(accelerator: Accelerator, bridge: EventBridge, streams: list[Stream], duration_s: float) -> float:
    stamps = accelerator.pinned(len(streams) * 8).view(np.int64)
    for position, stream in enumerate(streams):
        accelerator.work(stream, duration_s * 3.0, stamps, position)
    futures = [bridge.after(streams[number % len(streams)]) for number in range(64)]
    await asyncio.sleep(duration_s * 0.2)
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(duration_s)
    percent = 100 * (time.process_time() - used) / (time.perf_counter() - began)
    assert not any(future.done() for future in futures)
    await asyncio.gather(*futures)
    return percent
