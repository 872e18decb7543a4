"""`python -m tests.bench --only vllm`: what the cache costs where it cannot help, and what it gives where it can."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.vllm.clients import Run, ask_all, ask_until
from tests.bench.vllm.servers import ALONE, CEILING, FEW, OURS, Side, side, steps_file
from tests.bench.vllm.slow_disk import SlowDisk, slow_disk
from tests.bench.vllm.steps import steps_s
from tests.bench.vllm.workload import (
    BLOCK_TOKENS,
    CLIENTS,
    DOCUMENT_TOKENS,
    FITTING_DOCUMENTS,
    FULL,
    QUICK,
    Amounts,
    Ask,
    crowd,
    engine_hits,
    new_prompts,
    questions,
    with_hang_ups,
)
from tiercache.bench.figures import Figures
from tiercache.bench.loop_figures import p99
from tiercache.bench.workload import Plan, in_turn
from tiercache.demo.model import ModelFailed, prepare_model
from tiercache.demo.server import ServerFailed
from tiercache.errors import TierCacheError

_SHOWN = ("total_s", "tokens_per_s", "ttft_mean_ms", "ttft_p99_ms", "cpu_s")


def measure_vllm(figures: Figures, plan: Plan, amounts: Amounts | None = None, model: Path | None = None) -> None:
    """Figures of real servers, each `.total_s`, `.tokens_per_s`, `.ttft_mean_ms`, `.ttft_p99_ms`, `.cpu_s` (of all its
    processes, until everything is written) and `.hit_part` (of the prompts' tokens), for the workloads

    - `vllm.new`: no prompt was ever seen, so nothing hits; beside vLLM alone;
    - `vllm.engine_hits`: all is in the engine's own prefix cache; beside vLLM alone;
    - `vllm.documents`: questions about more than the engine's cache holds; beside vLLM alone, beside one whose engine
      cache holds everything, the ceiling, and beside such a one that runs as few requests at a time as the small cache
      has room for. All begin with nothing in any cache;
    - `vllm.hang_ups`: the same with clients that go in the middle, beside the ceiling;
    - `vllm.disk_*`: the same on a disk that is slow, hangs, and is well again, beside vLLM alone (`slow_disk.py`);
    - `vllm.step_*_ms`: what the scheduler spends in the connector in each step, with 64 requests waiting.

    `model` is the demo's unless another is given. Raises TierCacheError with the end of the log of a server that
    failed.
    """
    amounts = amounts or (QUICK if plan.quick else FULL)
    try:
        plan.progress("vLLM: preparing the model")
        model = model or prepare_model()
        _measure(Bench(figures, plan, amounts, text_of(model)), model)
    except (ModelFailed, ServerFailed) as error:
        raise TierCacheError(str(error)) from error


def text_of(model: Path) -> list[int]:
    """Real prose, the language reference that comes with Python, as the model's token ids."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    found: list[int] = tokenizer("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False).input_ids
    return found


@dataclass
class Bench:
    figures: Figures
    plan: Plan
    amounts: Amounts
    text: Sequence[int]

    @property
    def pairs(self) -> int:
        return 1 if self.plan.quick else self.plan.pairs

    async def run(self, at: Side, workload: str, asks: Sequence[Ask], before: Sequence[Ask] = ()) -> None:
        """Ask everything, with nothing in the engine's own cache but what `before` leaves there, and add the figures."""
        await asyncio.to_thread(at.server.forget_prefix_cache)
        if before:
            await ask_all(at.server, before, 1)
        await at.settle()
        cpu_s = at.cpu_s()
        run = await ask_all(at.server, asks)
        await at.settle()
        self.add(at.name, workload, run, at.cpu_s() - cpu_s)

    def add(self, side_name: str, workload: str, run: Run, cpu_s: float) -> None:
        ttfts_s = run.ttfts_s
        values = (
            run.total_s, run.tokens / run.total_s, statistics.fmean(ttfts_s) * 1e3, p99(ttfts_s) * 1e3, cpu_s
        )  # fmt: skip
        for what, value in zip(_SHOWN, values, strict=True):
            self.figures.add(f"{side_name}.{workload}.{what}", value)
        self.figures.add(f"{side_name}.{workload}.hit_part", run.hit_part)

    def compare(self, workload: str, *others: str) -> None:
        for what in _SHOWN:
            for other in others:
                self.figures.compare(f"{OURS}.{workload}.{what}", f"{other}.{workload}.{what}")

    def progress(self, what: str, pair: int, pairs: int) -> None:
        self.plan.progress(f"vLLM: {what}, pair {pair + 1} of {pairs}")


def _measure(bench: Bench, model: Path) -> None:
    place, amounts = bench.plan.directory / "vllm", bench.amounts
    everything = amounts.documents * (DOCUMENT_TOKENS[1] // BLOCK_TOKENS + 1) + 2 * CLIENTS
    with ExitStack() as servers:
        bench.plan.progress("vLLM: starting it alone")
        alone = servers.enter_context(side(ALONE, model, place / "alone"))
        with ExitStack() as others:
            bench.plan.progress("vLLM: starting it with tiercache")
            ours = others.enter_context(
                side(OURS, model, place / "ours", hot_gb=amounts.hot_gb, disk=place / "ours" / "kv")
            )
            bench.plan.progress("vLLM: starting it with an engine cache that holds everything")
            ceiling = others.enter_context(side(CEILING, model, place / "ceiling", everything))
            few = others.enter_context(side(FEW, model, place / "few", everything, requests=FITTING_DOCUMENTS))
            asyncio.run(_measure_well(bench, ours, alone, [ceiling, few], place / "ours"))
        with slow_disk(bench.plan, model, place / "slow", amounts.fault_hot_gb) as disk:
            if disk is not None:
                asyncio.run(_measure_slow(bench, disk, alone))


async def _measure_well(bench: Bench, ours: Side, alone: Side, ceilings: Sequence[Side], place: Path) -> None:
    for at in (ours, alone, *ceilings):
        await ask_all(at.server, new_prompts(bench.text, -1, 2))
        await at.settle()
        bench.figures.add(f"{at.name}.idle_cpu_part", await at.busy_part(1.0))
    await _measure_cost(bench, ours, alone)
    await _measure_documents(bench, ours, alone, ceilings)
    await _measure_steps(bench, ours, steps_file(place))


async def _measure_cost(bench: Bench, ours: Side, alone: Side) -> None:
    """Where nothing is to be won."""
    for pair in range(bench.pairs):
        bench.progress("nothing hits", pair, bench.pairs)
        asks = new_prompts(bench.text, pair, bench.amounts.new_prompts)
        await in_turn(pair, *(partial(bench.run, at, "new", asks) for at in (ours, alone)))
        bench.progress("all hits the engine's own cache", pair, bench.pairs)
        before, asks = engine_hits(bench.text, pair, bench.amounts.engine_hits)
        await in_turn(pair, *(partial(bench.run, at, "engine_hits", asks, before) for at in (ours, alone)))
    bench.compare("new", ALONE)
    bench.compare("engine_hits", ALONE)


async def _measure_documents(bench: Bench, ours: Side, alone: Side, ceilings: Sequence[Side]) -> None:
    amounts = bench.amounts
    pairs = min(bench.pairs, amounts.document_pairs)
    for pair in range(pairs):
        bench.progress("documents", pair, pairs)
        asks = questions(bench.text, pair, amounts.documents, amounts.requests)
        sides = [ours, *ceilings, *([alone] if pair < amounts.alone_pairs else [])]
        await in_turn(pair, *(partial(bench.run, at, "documents", asks) for at in sides))
        if pair >= amounts.hang_up_pairs:
            continue
        bench.progress("clients that hang up", pair, min(pairs, amounts.hang_up_pairs))
        asks = with_hang_ups(questions(bench.text, -2 - pair, amounts.documents, amounts.requests), pair)
        await in_turn(pair, *(partial(bench.run, at, "hang_ups", asks) for at in (ours, ceilings[0])))
    bench.compare("documents", ALONE, CEILING, FEW)
    bench.compare("hang_ups", CEILING)


async def _measure_steps(bench: Bench, ours: Side, file: Path) -> None:
    amounts = bench.amounts
    bench.plan.progress(f"vLLM: steps with {amounts.waiting} requests waiting")
    await asyncio.to_thread(ours.server.forget_prefix_cache)
    os.truncate(file, 0)  # the connector appends to it
    asks = crowd(bench.text, 0, amounts.waiting + CLIENTS + amounts.waiting_ends)
    await ask_until(ours.server, asks, amounts.waiting_ends)
    await ours.settle()
    found_s = steps_s(file.read_text(), amounts.waiting)
    if not found_s:
        raise ours.server.failed(f"{amounts.waiting} requests never waited at once")
    bench.figures.add(f"{OURS}.step_median_ms", statistics.median(found_s) * 1e3)
    bench.figures.add(f"{OURS}.step_p99_ms", p99(found_s) * 1e3)
    bench.figures.add(f"{OURS}.step_count", len(found_s))


async def _measure_slow(bench: Bench, disk: SlowDisk, alone: Side) -> None:
    """Documents that were all asked about before, and lie on the disk. All states beside one run of vLLM alone."""
    amounts = bench.amounts
    asks = questions(bench.text, -1, amounts.fault_documents, amounts.fault_requests)
    bench.plan.progress("vLLM: documents on a disk that is well, a FUSE mount")
    await ask_all(disk.side.server, asks)
    await disk.side.settle()
    cpu_s = alone.cpu_s()
    await asyncio.to_thread(alone.server.forget_prefix_cache)
    without = await ask_all(alone.server, asks)
    cpu_s = alone.cpu_s() - cpu_s
    for state in disk.states:
        bench.plan.progress(f"vLLM: documents on a disk that is {state.replace('_', ' ')}")
        with disk.being(state):
            await bench.run(disk.side, f"disk_{state}", asks)
        bench.add(ALONE, f"disk_{state}", without, cpu_s)
        bench.compare(f"disk_{state}", ALONE)
    for name, value in (("well", disk.well_s), ("slow", disk.slow_s)):
        bench.figures.add(f"{OURS}.disk_{name}.file_read_ms", value * 1e3)
