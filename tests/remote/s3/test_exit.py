"""A process that ends right after its requests, or in the midst of them."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.servers.s3 import S3Server

REPOSITORY = Path(__file__).parents[3]

LEAVING = """
import asyncio, sys
from tests.remote.s3.conftest import settings_for
from tiercache.testing import chunk, page_aligned
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.remote.s3 import S3Tier

async def main(endpoint, closes):
    tier = S3Tier(settings_for(endpoint, prefix=sys.argv[3], skip_signature=True))
    await tier.open()
    await asyncio.gather(*(tier.write(*chunk(number), CHUNK_BYTES) for number in range(1, 9)))
    if closes:
        await tier.close()
        return
    for number in range(1, 9):
        asyncio.ensure_future(tier.read(chunk(number)[0], page_aligned(CHUNK_BYTES)))
    await asyncio.sleep(0)
    sys.exit(0)

asyncio.run(main(sys.argv[1], sys.argv[2] == "closes"))
"""


@pytest.mark.parametrize("leaving", ["closes", "just goes"])
async def test_a_process_ends_well_right_after_its_requests(s3_server: S3Server, leaving: str, tmp_path: Path) -> None:
    """The client's threads must not come back to an interpreter that ends: that is SIGABRT, now and then."""

    async def run(number: int) -> int | None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LEAVING, s3_server.endpoint, leaving, f"{tmp_path.name}{number}"),
            cwd=REPOSITORY, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        return await process.wait()

    assert await asyncio.gather(*(run(number) for number in range(4))) == [0] * 4
