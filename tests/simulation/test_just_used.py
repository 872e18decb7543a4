"""What was just stored or loaded is there for the next request while a slow device still has much to write: by seed."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.torture.simulation.files import Disk, FileCalls
from tests.torture.simulation.process import Process
from tests.torture.simulation.system import ROOT, System
from tests.torture.simulation.weather import Weather
from tests.torture.simulation.world import World
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.core.layout import Layout

SLOTS = 128
CHUNK_BYTES = 16384
LAYOUT = Layout("test-model", chunk_tokens=64, bytes_per_token=256)
PAYLOAD = np.zeros(CHUNK_BYTES, np.uint8)
AT_MOST = SLOTS * 8 // 10 - SLOTS // 2
"""Chunks that fit beside what may be held for writing."""


def key(number: int) -> bytes:
    return number.to_bytes(24, "big")


def requests(seed: int) -> Iterator[list[bytes]]:
    """Chats that grow, and now and then a long document."""
    chance = random.Random(7 + seed)
    chats: list[list[int]] = []
    fresh = iter(range(1, 1_000_000))
    for step in range(100):
        if step % 10 == 9:
            yield [key(next(fresh)) for _ in range(chance.randint(SLOTS * 15 // 100, SLOTS * 6 // 10))]
        else:
            if len(chats) < 12 or chance.random() < 0.3:
                chats.append([0, *(next(fresh) for _ in range(chance.randint(2, 10)))])
            chat = chance.choice(chats[-12:])
            chat += [next(fresh) for _ in range(chance.randint(1, 4))]
            yield [key(number) for number in chat[:90]]


async def serve(seed: int) -> None:
    options = {"max_local_cpu_size": SLOTS * CHUNK_BYTES / 2**30}
    options |= {"local_disk": f"{ROOT}/disk/kv", "max_local_disk_size": 1.0}
    async with TierCache.open(Config.load(environ={}, overrides=options), LAYOUT) as cache:
        for step, keys in enumerate(requests(seed)):
            delivered = await cache.get_into(keys, [np.empty(CHUNK_BYTES, np.uint8) for _ in keys])
            if len(keys) <= AT_MOST:
                assert cache.lookup_hot(keys[:delivered]) == delivered, f"just loaded, step {step}"
            await cache.put_many(keys, [PAYLOAD] * len(keys), prefix=True)
            if len(keys) <= AT_MOST:
                assert cache.lookup_hot(keys) == len(keys), f"just stored, step {step}"


@pytest.mark.parametrize("seed", [4, 10, 21])
def test_a_prefix_is_whole_while_half_of_the_cache_waits_to_be_written(seed: int) -> None:
    world = World(seed * 4)
    weather = Weather(world, "disk")
    weather.slow = True
    disk = Disk(f"{ROOT}/disk", 2 << 30, lambda: 1.7e9 + world.now_s)
    calls = FileCalls([disk], lambda *call: weather.before(*call) if world.current else None)
    served = []

    async def main() -> None:
        await serve(seed)
        served.append(True)
        world.stop()

    with System(world, calls, lambda: world.pause(world.chance.random() * 3e-5)).installed():
        Process(world, 2, lambda process: setattr(calls, "process", process)).run("main", main)
        try:
            world.run()
        finally:
            world.end()
    assert served
