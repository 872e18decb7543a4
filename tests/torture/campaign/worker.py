"""A process that embeds a cache and does with it what an engine would, by seed, until it is told to stop or killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import traceback
from random import Random

import msgspec

from tests.torture.campaign.messages import (
    Broken,
    Command,
    End,
    Find,
    Found,
    Mouth,
    Opened,
    Order,
    Prove,
    Proved,
    Refused,
    Rest,
    Rested,
    Work,
    command_of,
    now_s,
)
from tests.torture.campaign.operations import FLUSH_S, OPERATION_S, Lane, Tally
from tests.torture.campaign.payloads import CHUNK_BYTES, LANES
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.errors import CacheClosed, ConfigError

LAYOUT = Layout("campaign", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16)
CLOSE_S = 5.0
CLOSE_SLACK_S = 10.0
"""The documented half second, and what a machine with too few cores takes."""
LIFE_SIGN_S = 0.5
_AT_ONCE = 8
_FEWEST_STEPS, _MOST_STEPS = 100, 1000
"""Of all lanes together, before the cache is closed and opened again."""


def _give_memory_back() -> None:
    """Else resident memory shows what the process once used and freed, not what it keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def run(order: bytes, connection: socket.socket) -> None:
    """The life of a worker. Ends when it is told to, or when nobody is left to tell it."""
    told = msgspec.json.decode(order, type=Order)
    log = open(told.log, "a", buffering=1)  # noqa: SIM115 - until the end
    form = f"%(asctime)s {told.name} %(name)s: %(message)s"
    logging.basicConfig(stream=log, level=logging.WARNING, format=form, force=True)
    # Into the nursery's log, where anything is a finding:
    logging.getLogger("asyncio").addHandler(logging.StreamHandler())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    if told.place == "hf3fs":
        from tests.hf3fs_emulator import install

        install()
    asyncio.run(Worker(told, connection).live())


class Worker:
    def __init__(self, order: Order, connection: socket.socket) -> None:
        self.order = order
        self._config = Config.load(environ={}, overrides=order.overrides)
        self._connection = connection
        self._mouth = Mouth(connection)
        self._random = Random(order.seed)
        self._tally = Tally()
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._heard = b""
        self._work: asyncio.Task[None] | None = None
        self._stopping = False

    async def live(self) -> None:
        asyncio.get_running_loop().add_reader(self._connection, self._read)
        began_s = now_s()
        try:
            await self._open()
        except ConfigError as error:
            self._mouth.say(Refused(str(error)))
            return
        self._mouth.say(Opened(now_s() - began_s))
        signs = asyncio.create_task(self._give_signs())
        while not isinstance(command := await self._commands.get(), End):
            try:
                await self._obey(command)
            except Exception:
                self._mouth.say(Broken(traceback.format_exc()))
        await self._stop_work()
        await self._close()
        signs.cancel()

    async def _obey(self, command: Command) -> None:
        if isinstance(command, Work):
            if self._work is None:
                self._stopping = False
                self._work = asyncio.create_task(self._go_on_working())
        elif isinstance(command, Rest):
            await self._stop_work()
            await self._cache.flush(FLUSH_S)
            self._cache.clear_hot()
            _give_memory_back()
            self._report()
            self._mouth.say(Rested())
        elif isinstance(command, Prove):
            await self._stop_work()
            lane = self._lane(LANES)
            well = await lane.remove([command.number]) and await lane.store([command.number], flush=True)
            self._mouth.say(Proved(well))
        elif isinstance(command, Find):
            await self._stop_work()
            self._mouth.say(Found(await self._find(command.numbers)))

    async def _find(self, numbers: list[int]) -> list[int]:
        lane = self._lane(LANES)
        found: list[int] = []
        for first in range(0, len(numbers), _AT_ONCE):
            part = numbers[first : first + _AT_ONCE]
            there = await asyncio.gather(*map(lane.find, part))
            found += [number for number, is_there in zip(part, there, strict=True) if is_there]
        return found

    async def _go_on_working(self) -> None:
        try:
            while not self._stopping:
                steps = self._random.randint(_FEWEST_STEPS, _MOST_STEPS) // LANES
                await asyncio.gather(*(self._run_lane(self._lane(number), steps) for number in range(LANES)))
                if not self._stopping:
                    await self._close()
                    await self._open_in_time()
                    self._tally.operations["close and reopen"] += 1
        except Exception:
            self._mouth.say(Broken(traceback.format_exc()))

    async def _run_lane(self, lane: Lane, steps: int) -> None:
        for _ in range(steps):
            if self._stopping:
                return
            await lane.step()

    async def _stop_work(self) -> None:
        self._stopping = True
        work, self._work = self._work, None
        if work is not None:
            await asyncio.wait([work], timeout=OPERATION_S)

    async def _open(self) -> None:
        cache = TierCache(self._config, LAYOUT)
        await cache.start()
        self._cache = cache
        self._tally.another_cache()

    async def _open_in_time(self) -> None:
        """A place that is away refuses who opens it; this one comes again."""
        while True:
            try:
                await self._open()
                return
            except ConfigError:
                self._tally.operations["openings refused"] += 1
                if self._stopping:
                    raise
                await asyncio.sleep(0.2)

    async def _close(self) -> None:
        self._report()
        began_s = now_s()
        await self._cache.close(CLOSE_S)
        if (took_s := now_s() - began_s) > CLOSE_S + CLOSE_SLACK_S:
            self._mouth.say(Broken(f"close took {took_s:.1f} s, its deadline is {CLOSE_S:.0f}"))

    async def _give_signs(self) -> None:
        while True:
            await asyncio.sleep(LIFE_SIGN_S)
            with contextlib.suppress(CacheClosed):  # between two caches
                self._report()

    def _report(self) -> None:
        self._mouth.say(self._tally.reported(self._cache))

    def _lane(self, number: int) -> Lane:
        order = self.order
        return Lane(order.place, order.slot, number, self._cache, self._random, self._mouth, self._tally)

    def _read(self) -> None:
        received = self._connection.recv(1 << 16)
        if not received:
            os._exit(0)  # the campaign is gone
        *lines, self._heard = (self._heard + received).split(b"\n")
        for line in lines:
            self._commands.put_nowait(command_of(line))
