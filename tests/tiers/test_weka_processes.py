"""The Weka tier beside other processes, which are killed with SIGKILL."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.servers.processes import stop_process
from tests.tiers.others import Other, running
from tests.tiers.test_disk import is_hit
from tests.tiers.weka import key_of, opened, physical_bytes, store, until
from tiercache.tiers.weka import WekaTier

OTHER = """
import asyncio, sys
from pathlib import Path
from tests.tiers.weka import key_of, opened, store
from tiercache.errors import TierFull

async def main(place, cap_chunks):
    async with opened(place, cap_chunks=cap_chunks, refresh_s=0.02) as tier:
        print("ready", flush=True)
        for line in sys.stdin:
            command, first, end = line.split()
            numbers = range(int(first), int(end))
            if command == "store":
                await store(tier, numbers)
            elif command == "remove":
                for number in numbers:
                    assert await tier.remove(key_of(number))
            elif command == "write":
                for number in numbers:
                    try:
                        await store(tier, range(number, number + 1))
                        print(number, flush=True)
                    except TierFull:
                        pass
            print("done", flush=True)

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


def other(place: Path, cap_chunks: int = 64) -> AbstractAsyncContextManager[Other]:
    return running("-c", OTHER, place, cap_chunks)


def claimed(tier: WekaTier) -> set[str]:
    return {key.hex() for key in tier.directories.all[0].index.keys}


async def test_chunks_come_and_go_with_what_the_other_process_does(tmp_path: Path) -> None:
    async with opened(tmp_path, refresh_s=0.02) as tier, other(tmp_path) as process:
        assert await process.do("store", 1, 6) == "done"
        await tier.refreshed()
        assert tier.prefix([key_of(number) for number in range(1, 7)]) == 5
        assert await is_hit(tier, 5)
        assert await process.do("remove", 2, 4) == "done"
        await tier.refreshed()
        assert [tier.contains(key_of(number)) for number in range(1, 6)] == [True, False, False, True, True]
        assert not await is_hit(tier, 2)


@pytest.mark.parametrize("seed", [1, 2])
async def test_cap_holds_while_processes_write_evict_and_are_killed(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    async with opened(tmp_path, cap_chunks=40, refresh_s=0.02) as tier:
        cap_bytes = tier.settings.cap_bytes
        number = 1
        for round_number in range(4):
            async with other(tmp_path, 40) as process:
                process.say("write", 10_000 * (round_number + 1), 10_000 * (round_number + 2))
                for _ in range(int(random.integers(20, 60))):
                    await process.line()
                    await store(tier, range(number, number + 1))
                    number += 1
                stop_process(process.process.pid)
                assert physical_bytes(tmp_path) <= cap_bytes
                await process.kill()
            await store(tier, range(number, number + 10))
            number += 10
            await tier.refreshed()
            assert physical_bytes(tmp_path) <= cap_bytes
            await until(lambda: claimed(tier) == {path.name for path in tmp_path.glob("00/*")})
        assert await is_hit(tier, number - 1)
        assert tier.statistics().corrupt == 0
    async with opened(tmp_path, cap_chunks=40) as tier:
        assert tier.statistics().occupied_bytes == physical_bytes(tmp_path) + 4096
