"""Replay requests at the times of the trace, `speed_up` times as fast, concurrently.

A session sends a request only after its previous request has ended. Instead of computing, a request sleeps: its tokens
at the engine's rate, `speed_up` times as fast. All else is real: lookups, gets, copies, reads that bypass the page
cache, puts, write-behind and evictions.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tiercache.cache import TierCache
from tiercache.replay.figures import Figures
from tiercache.replay.formats import Request
from tiercache.replay.real.calibration import Speeds
from tiercache.replay.real.contents import Contents
from tiercache.replay.real.place import DISK
from tiercache.replay.real.serial import check, note_session
from tiercache.replay.setting import Setting
from tiercache.replay.simulator import Simulator

_BEGIN_S = 0.1


@dataclass
class Timed:
    """The results of the timed part, measured or simulated. Times are of the compressed trace, in seconds."""

    requests: int = 0
    blocks: int = 0
    ram_blocks: int = 0
    """Blocks in RAM at the request's arrival, within the contiguous prefix of both tiers."""
    flash_blocks: int = 0
    """Blocks on flash at the request's arrival."""
    lost_blocks: int = 0
    """Blocks found at the request's arrival and evicted before their delivery."""
    written_blocks: int = 0
    skipped_blocks: int = 0
    """Blocks not written to flash, or not stored at all."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    moved: int = 0
    """Requests that started later than in the trace, because their session's previous request had not ended."""
    late_s: float = 0.0
    """Largest delay of a request's start: more than some ms means that the machine was too busy."""


def compressed(setting: Setting, speed_up: float, speeds: Speeds) -> Setting:
    """Return the setting to simulate beside a real replay: a faster engine on the same machine."""
    hardware = setting.hardware
    return replace(
        setting,
        hardware=replace(
            hardware,
            prefill_tokens_per_s=hardware.prefill_tokens_per_s * speed_up,
            ram_bytes_per_s=speeds.ram_bytes_per_s,
            flash_read_bytes_per_s=speeds.flash_bytes_per_s,
            flash_latency_s=speeds.flash_latency_s,
        ),
    )


def simulate_timed(requests: Iterable[Request], setting: Setting, block_tokens: int) -> Timed:
    """Return the simulated results for the same requests."""
    figures: Figures = Simulator(setting, block_tokens).run(requests)
    return Timed(
        figures.requests,
        figures.blocks,
        figures.ram_blocks,
        figures.flash_blocks,
        written_blocks=figures.flash_written_blocks,
        ttft_s=figures.ttft_s,
    )


class Player:
    """Replays requests through `cache` on the loop's clock. Call `play` once."""

    def __init__(self, cache: TierCache, contents: Contents, setting: Setting, block_tokens: int) -> None:
        """`setting` is the compressed setting."""
        self.found = Timed()
        self._cache = cache
        self._contents = contents
        self._hardware = setting.hardware
        self._block_tokens = block_tokens
        self._engines = asyncio.Semaphore(setting.hardware.engines) if setting.hardware.engines else None
        self._last: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._begin_s = 0.0

    async def play(self, requests: Iterable[Request]) -> Timed:
        """Replay the requests. Holds all of them, and a task for each that has not ended.

        Cancellation ends all tasks. Raises ReplayFailed for wrong contents.
        """
        coming = list(requests)
        self._begin_s = self._loop.time() + _BEGIN_S
        async with asyncio.TaskGroup() as running:
            for request in coming:
                await asyncio.sleep(max(0.0, request.time_s - self._now_s))
                run = request.session
                task = running.create_task(self._request(request, self._last.get(run) if run is not None else None))
                if run is not None:
                    self._last[run] = task
        await self._cache.flush()
        return self._counted()

    async def _request(self, request: Request, before: asyncio.Task[None] | None) -> None:
        cache, found, keys = self._cache, self.found, request.keys
        came_s = request.time_s
        found.late_s = max(found.late_s, self._now_s - came_s)
        if before is not None and not before.done():
            await asyncio.wait([before])
            came_s = self._now_s
            found.moved += 1
        if self._engines is not None:
            await self._engines.acquire()
        try:
            hit = await cache.lookup_keys(keys)
            note_session(cache, keys, hit.chunks)
            delivered = await cache.get_to(keys[: hit.chunks], [self._contents.sink(key) for key in keys[: hit.chunks]])
            tokens = max(1, request.input_tokens - delivered * self._block_tokens)
            await asyncio.sleep(tokens / self._hardware.prefill_tokens_per_s)
        finally:
            if self._engines is not None:
                self._engines.release()
        first_token_s = self._now_s
        found.requests += 1
        found.blocks += len(keys)
        found.ram_blocks += hit.by_tier["cpu"]
        found.flash_blocks += hit.by_tier.get(DISK, 0)
        found.lost_blocks += hit.chunks - delivered
        found.ttft_s.append(first_token_s - came_s)
        length = self._contents.chunk_bytes
        items = [(key, length, self._contents.source(key)) for key in keys[delivered:]]
        stored = await cache.put_from(items, prefix=True)
        found.skipped_blocks += len(keys) - delivered - stored
        cache.cpu.link(keys)

    def _counted(self) -> Timed:
        check(self._contents)
        known = self._cache.statistics()
        if DISK in known.tiers:
            self.found.written_blocks = known.tiers[DISK].writes
            writer = known.writers[DISK]
            self.found.skipped_blocks += writer.skipped + writer.replaced + writer.dropped
        return self.found

    @property
    def _now_s(self) -> float:
        """Seconds since the trace began."""
        return self._loop.time() - self._begin_s
