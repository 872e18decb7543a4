"""What the tests of the shared memory tier share: an instance here, and one in another process."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np

from tests.tiers.opened import open_tier
from tests.tiers.others import Other, running
from tests.tiers.test_disk import FILE_BYTES, FINGERPRINT
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierFull
from tiercache.memory.slots import READ, Lease
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.shared_memory import SharedMemorySettings, SharedMemoryTier


@asynccontextmanager
async def opened(directory: Path, cap_chunks: int = 64) -> AsyncIterator[SharedMemoryTier]:
    """Chunks with numbers lie in one directory, "00". A directory takes no blocks on tmpfs."""
    async with open_tier(SharedMemoryTier(SharedMemorySettings((directory,), cap_chunks * FILE_BYTES), FINGERPRINT)) as tier:
        await tier.scanned()
        yield tier


def key_of(number: int) -> ChunkKey:
    return chunk(number)[0]


async def store(tier: SharedMemoryTier, *numbers: int) -> None:
    for number in numbers:
        assert await tier.write(*chunk(number), CHUNK_BYTES)


async def mapped(tier: SharedMemoryTier, number: int, content: int | None = None) -> Lease:
    """`content`: the chunk whose bytes it has, if others."""
    lease = await tier.map(key_of(number), READ)
    assert lease is not None and is_right(lease, number if content is None else content)
    return lease


def leased(tier: SharedMemoryTier, number: int) -> Lease:
    """Of what is mapped."""
    lease = tier.lease(key_of(number))
    assert lease is not None and is_right(lease, number)
    return lease


def is_right(lease: Lease, number: int) -> bool:
    return np.array_equal(lease.view, chunk(number)[1])


def deleted_maps(directory: Path) -> int:
    """Mappings of this process whose files in `directory` have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(directory) in line and line.endswith("(deleted)") for line in lines)


def other(directory: Path, cap_chunks: int = 64) -> AbstractAsyncContextManager[Other]:
    return running("-m", "tests.tiers.shared_memory", directory, cap_chunks)


async def _serve(directory: Path, cap_chunks: int) -> None:
    async with opened(directory, cap_chunks) as tier:
        print("ready", flush=True)
        for line in sys.stdin:
            command, *words = line.split()
            numbers = [int(word) for word in words]
            if command == "store":
                await store(tier, *numbers)
            elif command == "remove":
                for number in numbers:
                    assert await tier.remove(key_of(number))
            elif command == "replace":
                for number in numbers:
                    await tier.remove(key_of(number))
                    assert await tier.write(key_of(number), chunk(number + 1000)[1], CHUNK_BYTES)
            elif command == "right":
                for number in numbers:
                    (await mapped(tier, number)).release()
            elif command == "fill":  # until the process is killed
                number = numbers[0]
                print("filling", flush=True)
                while True:
                    with contextlib.suppress(TierFull):
                        await asyncio.gather(*(store(tier, number + lane) for lane in range(4)))
                    number += 4
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
