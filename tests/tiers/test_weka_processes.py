"""The Weka tier beside other processes, which are killed with SIGKILL. The clock is the real one."""

from pathlib import Path

import numpy as np

from tests.servers.processes import stop_process
from tests.tiers.others import running
from tests.tiers.test_disk import is_hit
from tests.tiers.weka import opened, physical_bytes, store, until

WRITER = """
import asyncio, sys
from pathlib import Path
from tests.tiers.weka import opened, store
from tiercache.errors import TierFull

async def main(place, number):
    async with opened(place, cap_chunks=40, refresh_s=0.02) as tier:
        print("ready", flush=True)
        while True:
            try:
                await store(tier, range(number, number + 1))
                print(number, flush=True)
            except TierFull:
                pass
            number += 1

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


async def test_cap_holds_while_processes_write_evict_and_are_killed(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    async with opened(tmp_path, cap_chunks=40, refresh_s=0.02) as tier:
        cap_bytes, known = tier.settings.cap_bytes, tier.directories.all[0].index
        number = 1
        for round_number in range(4):
            async with running("-c", WRITER, tmp_path, 10_000 * (round_number + 1)) as writer:
                for _ in range(int(random.integers(20, 60))):
                    await writer.line()
                    await store(tier, range(number, number + 1))
                    number += 1
                stop_process(writer.process.pid)
                assert physical_bytes(tmp_path) <= cap_bytes
                await writer.kill()
            await store(tier, range(number, number + 10))
            number += 10
            await tier.refreshed()
            assert physical_bytes(tmp_path) <= cap_bytes
            await until(lambda: {key.hex() for key in known.keys} == {path.name for path in tmp_path.glob("00/*")})
        assert await is_hit(tier, number - 1)
        assert tier.statistics().corrupt == 0
    async with opened(tmp_path, cap_chunks=40) as tier:
        assert tier.statistics().occupied_bytes == physical_bytes(tmp_path) + 4096
